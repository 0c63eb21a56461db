"""The pipeline that draws words, untrained: Stable Diffusion 3's parts, small enough for two CPU cores."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer, T5Tokenizer

from miles_core.families.tiny_sd3 import CLIP_WIDTH, clip_encoder, small_vae, t5_encoder
from miles_core.words.captions import vocabulary

TOKENS = 24
"""What each of the three encoders reads of a text, padding included. The tokenizers say so, and whoever calls another
engine says max_sequence_length=24: the text is most of what the transformer sees, so its length is most of its time."""

WIDTH, LAYERS, HEADS = 160, 6, 5
JOINT_WIDTH = 128
LATENT_CHANNELS = 16
SHIFT = 3.0


def words_pipeline(seed: int = 0) -> StableDiffusion3Pipeline:
    """The pipeline in memory, random, fp32; the caller's random state is left as it was."""
    tokenizers = clip_tokenizer("<|endoftext|>"), clip_tokenizer("!"), t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return StableDiffusion3Pipeline(
            text_encoder=clip_encoder(tokenizers[0]),
            text_encoder_2=clip_encoder(tokenizers[1]),
            text_encoder_3=t5_encoder(len(tokenizers[2]), JOINT_WIDTH, key_width=32, hidden=2 * JOINT_WIDTH),
            transformer=_transformer(),
            vae=small_vae((24, 32, 64, 64), norm_groups=8, scaling=1.0, shift=0.0),
            tokenizer=tokenizers[0],
            tokenizer_2=tokenizers[1],
            tokenizer_3=tokenizers[2],
            scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SHIFT),
        )


def clip_tokenizer(pad_token: str) -> CLIPTokenizer:
    """Letters, and a token for every word of the captions."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for word in vocabulary():
        pieces = [*word[:-1], word[-1] + "</w>"]
        merges += [("".join(pieces[:n]), pieces[n]) for n in range(1, len(pieces))]
    merges = list(dict.fromkeys(merges))
    tokens = [*characters, *(c + "</w>" for c in characters), *(a + b for a, b in merges)]
    tokens = [*dict.fromkeys(tokens), "<|startoftext|>", "<|endoftext|>"]
    vocabulary_ids = {token: i for i, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary_ids, merges=merges, pad_token=pad_token, model_max_length=TOKENS)


def t5_tokenizer() -> T5Tokenizer:
    """Characters, and a token for every word of the captions."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("▁", -2.0)]
    letters = [(chr(code), -3.0) for code in range(33, 127)]
    words = [("▁" + word, -2.0) for word in vocabulary() if len(word) > 1] + [("▁a", -2.0)]
    return T5Tokenizer(
        vocab=[*special, *letters, *words], extra_ids=0, additional_special_tokens=[], model_max_length=TOKENS
    )


def _transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        attention_head_dim=WIDTH // HEADS,
        joint_attention_dim=JOINT_WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )
