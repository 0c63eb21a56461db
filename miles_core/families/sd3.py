"""Stable Diffusion 3 and 3.5 (Esser et al. 2024, arXiv 2403.03206): MMDiT, two CLIP encoders and T5."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from miles_core.families.base import EngineComponents, TrainPipelineConfig
from miles_core.families.sizes import SHAPES

ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


class Sd3PipelineConfig(TrainPipelineConfig):
    """SD3's conditioning is `encoder_hidden_states` (333, D): 77 CLIP and 256 T5 tokens (fewer where the checkpoint's
    tokenizers say so), padded to T5's width, and `pooled_projections` (P,): both CLIP projections, as diffusers'
    StableDiffusion3Pipeline makes them."""

    family = "sd3"
    pipeline_class = "StableDiffusion3Pipeline"
    lora_target_modules = SHAPES["sd3"].lora_target_modules
    latent_channels = SHAPES["sd3"].latent_channels
    vae_scale_factor = SHAPES["sd3"].vae_scale_factor

    def fsdp_blocks(self, transformer: nn.Module) -> list[nn.Module]:
        return list(cast(nn.ModuleList, transformer.transformer_blocks))

    def dynamic_shift(self, scheduler_config: Mapping[str, Any], height: int, width: int) -> float | None:
        """diffusers' calculate_shift over the number of image tokens (patch size 2)."""
        if not scheduler_config.get("use_dynamic_shifting"):
            return None
        _, h, w = self.latent_shape(height, width)
        base_len, max_len = scheduler_config["base_image_seq_len"], scheduler_config["max_image_seq_len"]
        base, top = scheduler_config["base_shift"], scheduler_config["max_shift"]
        slope = (top - base) / (max_len - base_len)
        return float((h // 2) * (w // 2) * slope + base - slope * base_len)

    def encode_prompt(self, components: EngineComponents, prompt: str) -> dict[str, torch.Tensor]:
        encoders, tokenizers = components.text_encoders, components.tokenizers
        ids = [
            _tokens(tokenizers[name], prompt, min(most, tokenizers[name].model_max_length))
            for name, most in SHAPES["sd3"].longest_texts.items()
        ]
        hidden, pooled = encode_tokens([encoders[name] for name in ENCODERS], ids)
        return {"encoder_hidden_states": hidden[0], "pooled_projections": pooled[0]}

    def model_output(
        self,
        transformer: nn.Module,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        output = transformer(
            hidden_states=latents,
            timestep=timesteps,
            encoder_hidden_states=conditioning["encoder_hidden_states"],
            pooled_projections=conditioning["pooled_projections"],
            return_dict=False,
        )
        return cast(torch.Tensor, output[0])


def encode_tokens(encoders: Sequence[nn.Module], ids: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(encoder_hidden_states (B, L, D), pooled_projections (B, P)) of the ids (B, l) of two CLIP encoders and T5, as
    diffusers' StableDiffusion3Pipeline makes them: both CLIPs side by side, padded to T5's width, before T5."""
    clips = [
        encoder(some.to(_device(encoder)), output_hidden_states=True)
        for encoder, some in zip(encoders[:2], ids, strict=False)
    ]
    long = encoders[2](ids[2].to(_device(encoders[2])))[0]
    short = torch.cat([output.hidden_states[-2] for output in clips], dim=-1)
    short = nn.functional.pad(short, (0, long.shape[-1] - short.shape[-1]))
    return torch.cat([short, long], dim=-2), torch.cat([output.text_embeds for output in clips], dim=-1)


def _tokens(tokenizer: Any, prompt: str, length: int) -> torch.Tensor:
    encoded = tokenizer([prompt], padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return cast(torch.Tensor, encoded.input_ids)


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
