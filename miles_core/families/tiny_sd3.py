"""A tiny SD3 pipeline with random weights, made by code: for trials and tests, nothing is downloaded.

Run as `python -m miles_core.families.tiny_sd3 FOLDER`. diffusers loads any folder; the sglang engine knows the
model by the folder's name, which must contain stable-diffusion-3.5-medium.
"""

import os
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any, cast

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from tokenizers import pre_tokenizers
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)
from transformers.utils import logging as transformers_logging

from miles_core.errors import InputError

HEADS, HEAD_DIM, LAYERS = 4, 16, 2
CLIP_WIDTH, JOINT_WIDTH = 32, 64


def make_tiny_sd3(folder: Path, seed: int = 0) -> Path:
    """Write a random SD3 pipeline (0.4 M parameters, VAE / 8 with 16 channels) into `folder`.

    The same seed and library versions give the same bytes. The folder appears whole or not at all. Raises
    InputError where `folder` exists and is not empty.
    """
    folder = Path(folder).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists already and is not an empty folder: give a new one or empty it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()
    unfinished = folder.parent / f".{folder.name}.{uuid.uuid4().hex}"
    try:
        cast(Any, tiny_sd3_pipeline(seed)).save_pretrained(unfinished, safe_serialization=True)
        os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def tiny_sd3_pipeline(seed: int = 0) -> StableDiffusion3Pipeline:
    """The pipeline in memory, fp32; the caller's random state is left as it was."""
    tokenizers = clip_tokenizer("<|endoftext|>"), clip_tokenizer("!"), _t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return StableDiffusion3Pipeline(
            text_encoder=clip_encoder(tokenizers[0]),
            text_encoder_2=clip_encoder(tokenizers[1]),
            text_encoder_3=t5_encoder(),
            transformer=_transformer(),
            vae=small_vae(),
            tokenizer=tokenizers[0],
            tokenizer_2=tokenizers[1],
            tokenizer_3=tokenizers[2],
            scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0),
        )


def clip_tokenizer(pad_token: str) -> CLIPTokenizer:
    """A token a character."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*characters, *(c + "</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[], pad_token=pad_token, model_max_length=77
    )


def _t5_tokenizer() -> T5Tokenizer:
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("▁", -2.0)]
    vocab = [*special, *((chr(code), -3.0) for code in range(33, 127))]
    return T5Tokenizer(vocab=vocab, extra_ids=0, additional_special_tokens=[], model_max_length=512)


def clip_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """Random, of CLIP_WIDTH."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=CLIP_WIDTH,
        intermediate_size=2 * CLIP_WIDTH,
        projection_dim=CLIP_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        hidden_act="quick_gelu",
    )
    return CLIPTextModelWithProjection(config).eval()


def t5_encoder(tokens: int = 128, width: int = JOINT_WIDTH, key_width: int = 16, hidden: int = 64) -> T5EncoderModel:
    """Random, two layers of four heads."""
    untied: dict[str, Any] = {"tie_word_embeddings": False}
    config = T5Config(
        vocab_size=tokens,
        d_model=width,
        d_kv=key_width,
        d_ff=hidden,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        **untied,
    )
    return T5EncoderModel(config).eval()


def _transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=32,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=LAYERS,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        joint_attention_dim=JOINT_WIDTH,
        caption_projection_dim=HEADS * HEAD_DIM,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=24,
    )


def small_vae(
    channels: tuple[int, ...] = (8, 8, 16, 16), norm_groups: int = 4, scaling: float = 1.5305, shift: float = 0.0609
) -> AutoencoderKL:
    """Random. sample_size is SD3's own: sglang decodes whatever is larger in tiles, which leave seams."""
    return AutoencoderKL(
        latent_channels=16,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=channels,
        layers_per_block=1,
        norm_num_groups=norm_groups,
        sample_size=1024,
        scaling_factor=scaling,
        shift_factor=shift,
        use_quant_conv=False,
        use_post_quant_conv=False,
        force_upcast=True,
    )


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m miles_core.families.tiny_sd3 FOLDER", file=sys.stderr)
        return 2
    try:
        print(make_tiny_sd3(Path(arguments[0])))
    except InputError as fault:
        print(fault, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
