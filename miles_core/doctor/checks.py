"""The checks in their order: what is cheap and what others need come first."""

from miles_core.doctor import batches, installs, logs, memory, place, policy, prompts, rewards, services
from miles_core.doctor.check import Check

CHECKS = (
    Check("installs", installs.installs),
    Check("Ray", services.ray),
    Check("artifact root", place.artifact_root),
    Check("batches", batches.batches),
    Check("learning rate", batches.learning_rates),
    Check("clip range", policy.clip_range),
    Check("prompts", prompts.prompts),
    Check("model", policy.model),
    Check("LoRA", policy.lora),
    Check("prompt length", prompts.prompt_length),
    Check("GPUs", services.gpus),
    Check("memory", memory.memory),
    Check("scorers", rewards.self_test),
    Check("run", place.run),
    Check("disk", place.disk),
    Check("logging", logs.logs),
    Check("ratio", policy.ratio, loads_model=True),
    Check("parity", policy.parity, loads_model=True),
    Check("noise level", rewards.noise_level, loads_model=True),
    Check("reward spread", rewards.spread, loads_model=True),
)


def chosen(quick: bool) -> list[Check]:
    """All, or those that do not load the model."""
    return [check for check in CHECKS if not (quick and check.loads_model)]
