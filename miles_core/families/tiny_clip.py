"""A tiny random CLIP with its processor, made by code: what a PickScore folder looks like, for tests and trials."""

from pathlib import Path

import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTextConfig, CLIPVisionConfig

from miles_core.families.tiny_sd3 import clip_tokenizer

WIDTH, SIZE = 32, 32


def make_tiny_clip(folder: Path, seed: int = 0) -> Path:
    """Write model and processor into one folder, as save_pretrained does; returns it."""
    tokenizer = clip_tokenizer("<|endoftext|>")
    kind = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = CLIPTextConfig(
        **kind,
        vocab_size=len(tokenizer),
        projection_dim=WIDTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    vision = CLIPVisionConfig(**kind, image_size=SIZE, patch_size=8, projection_dim=WIDTH)
    torch.manual_seed(seed)
    model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=WIDTH))
    model.eval().save_pretrained(folder)
    size = {"height": SIZE, "width": SIZE}
    images = CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=size)
    CLIPProcessor(images, tokenizer).save_pretrained(folder)
    return folder
