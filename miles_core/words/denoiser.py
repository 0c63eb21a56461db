"""Text encoders and transformer as one module, its flow-matching loss, and a plain sampler to watch it by."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from miles_core.families.sd3 import ENCODERS, Sd3PipelineConfig, encode_tokens
from miles_core.words.architecture import SHIFT, TOKENS

TOKENIZERS = ("tokenizer", "tokenizer_2", "tokenizer_3")


class Denoiser(nn.Module):
    """forward: latents (N, 16, 8, 16), timesteps (N,) in [0, 1000] and the ids (N, 24) of three encoders -> the velocity,
    noise less image, (N, 16, 8, 16)."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(getattr(pipeline, name) for name in ENCODERS)
        self.transformer = pipeline.transformer

    def forward(
        self, latents: torch.Tensor, timesteps: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> torch.Tensor:
        hidden, pooled = encode_tokens(list(self.encoders), [a, b, c])
        velocity: torch.Tensor = self.transformer(
            hidden_states=latents,
            timestep=timesteps,
            encoder_hidden_states=hidden,
            pooled_projections=pooled,
            return_dict=False,
        )[0]
        return velocity


def tokenized(pipeline: Any, texts: Sequence[str]) -> list[torch.Tensor]:
    """The ids (N, 24) of the three tokenizers."""
    return [
        getattr(pipeline, name)(
            list(texts), padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt"
        ).input_ids
        for name in TOKENIZERS
    ]


def flow_loss(
    denoiser: nn.Module, latents: torch.Tensor, ids: Sequence[torch.Tensor], generator: torch.Generator
) -> torch.Tensor:
    """Mean squared error of the velocity (Lipman et al. 2022), the noise levels shifted as the sampler's are."""
    u = torch.rand(len(latents), device=latents.device, generator=generator)
    sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
    noise = torch.randn(latents.shape, device=latents.device, generator=generator)
    noisy = torch.lerp(latents, noise, sigma[:, None, None, None])
    velocity = denoiser(noisy, sigma * 1000, *ids)
    return F.mse_loss(velocity.float(), noise - latents)


@torch.no_grad()
def sample(pipeline: Any, denoiser: nn.Module, ids: Sequence[torch.Tensor], seed: int, steps: int = 10) -> torch.Tensor:
    """Images (N, 3, 64, 128) in [0, 1] by Euler steps, no guidance."""
    device = ids[0].device
    generator = torch.Generator(device).manual_seed(seed)
    latents = torch.randn(len(ids[0]), 16, 8, 16, device=device, generator=generator)
    sigmas, timesteps = Sd3PipelineConfig().sigmas_and_timesteps(pipeline.scheduler.config, steps, height=64, width=128)
    for i in range(steps):
        times = timesteps[i].to(device).expand(len(latents))
        latents = latents + (sigmas[i + 1] - sigmas[i]).item() * denoiser(latents, times, *ids).float()
    return decoded(pipeline.vae, latents)


def decoded(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Images in [0, 1] of the transformer's latents."""
    images = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor, return_dict=False)[0]
    return (images.float() / 2 + 0.5).clamp(0, 1)
