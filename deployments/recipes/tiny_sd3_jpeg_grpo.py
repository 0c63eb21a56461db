"""A random tiny SD3 that learns to make images that compress well: no GPU, no download, minutes."""

from miles_core.config import RunConfig, build


def tiny_sd3_jpeg_grpo() -> RunConfig:
    """Flow-GRPO with KL on JPEG size. A random model's images carry no text, but their size differs in a group."""
    return build(
        {
            "run": {"num_rollout": 3},
            "cluster": {"device": "cpu"},
            "training": {"diffusion_forward_dtype": "fp32"},
            "optimizer": {"lr": 1e-2},
            "rollout": {
                "hf_checkpoint": "tiny:sd3",
                "diffusion_height": 64,
                "diffusion_width": 64,
                "diffusion_num_steps": 6,
                "diffusion_num_sde_steps": 2,
                "diffusion_sde_window_range": (0, 4),
                "diffusion_guidance_scale": 4.5,
                "diffusion_generator_device": "cpu",
                "rollout_microgroup_size": 4,
            },
            "data": {
                "prompt_data": "tiny",
                "rollout_batch_size": 4,
                "n_samples_per_prompt": 8,
                "num_steps_per_rollout": 2,
                "micro_batch_size": 8,
            },
            "algorithm": {"diffusion_kl_beta": 0.04, "globalize_reward_std": True},
            "reward": {"rm_type": "jpeg_compressibility"},
            "lora": {"use_lora": True, "lora_rank": 8, "lora_alpha": 16},
        }
    )
