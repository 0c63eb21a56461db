"""Images are decoded whole: no seams of tiles for a reward to learn."""

from pathlib import Path

import torch

from miles_core.families.base import DiffusersModelBackend
from miles_core.families.tiny_sd3 import make_tiny_sd3
from miles_core.rollout.diffusers_engine import _decode


def test_pitfall_24_an_image_is_decoded_whole_and_has_no_seams_of_tiles(tmp_path: Path) -> None:
    """Where tiles would be smaller than the image, what is decoded is still what the decoder gives for all of it."""
    folder = make_tiny_sd3(tmp_path / "tiny-stable-diffusion-3.5-medium")
    vae = DiffusersModelBackend().load_engine_components(folder, "fp32").vae
    vae.tile_latent_min_size, vae.tile_sample_min_size = 4, 32
    latents = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        made = _decode(vae, latents)
        whole = vae.decoder(latents / vae.config.scaling_factor + vae.config.shift_factor)
        vae.enable_tiling()
        tiled = _decode(vae, latents)
    assert torch.equal(made, (whole / 2 + 0.5).clamp(0, 1))
    assert tiled.shape == made.shape and (tiled - made).abs().max() > 1e-3
