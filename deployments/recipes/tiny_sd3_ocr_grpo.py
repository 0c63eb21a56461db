"""A small SD3 that draws words learns to draw readable ones: no GPU, no download, minutes."""

from deployments.recipes.tiny_sd3_jpeg_grpo import tiny_sd3_jpeg_grpo
from miles_core.config import RunConfig


def tiny_sd3_ocr_grpo() -> RunConfig:
    """Flow-GRPO on the OCR reward with real PaddleOCR. The checkpoint spells, but draws most words so that they are hard to
    read: how it draws them is decided in the first steps, and those are the ones that are trained."""
    return tiny_sd3_jpeg_grpo().replace(
        hf_checkpoint="tiny:words",
        prompt_data="tiny-ocr",
        rm_type="ocr",
        num_rollout=10,
        rollout_batch_size=8,
        n_samples_per_prompt=16,
        rollout_microgroup_size=8,
        diffusion_height=64,
        diffusion_width=128,
        diffusion_num_steps=10,
        diffusion_num_sde_steps=2,
        diffusion_sde_window_range=(0, 4),
        diffusion_guidance_scale=1.0,
        lr=1e-3,
        wandb_project="miles-diffusion-grpo",
        wandb_log_num_images=8,
    )
