"""The tiny run with the OCR reward: proves the path, not the learning, since a random model draws no words."""

from deployments.recipes.tiny_sd3_jpeg_grpo import tiny_sd3_jpeg_grpo
from miles_core.config import RunConfig


def tiny_sd3_ocr_grpo() -> RunConfig:
    """Flow-GRPO on the OCR reward with real PaddleOCR on two CPU processes."""
    return tiny_sd3_jpeg_grpo().replace(
        prompt_data="tiny-ocr",
        rm_type="ocr",
        ocr_num_workers=2,
        num_rollout=1,
        diffusion_height=64,
        diffusion_width=128,
    )
