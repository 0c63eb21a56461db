"""The engine that a configuration asks for, not started."""

from pathlib import Path
from typing import Any

from miles_core.config import RunConfig
from miles_core.rollout.protocol import RolloutEngine


def make_engine(name: str, config: RunConfig, checkpoint: str, family: str, device: str, logs: Path) -> RolloutEngine:
    """`logs`: the folder that a server of its own prints into."""
    made: dict[str, Any] = {"name": name, "checkpoint": checkpoint, "family": family, "device": device}
    made["dtype"] = config.training.diffusion_forward_dtype
    if config.cluster.rollout_engine == "diffusers":
        from miles_core.rollout.diffusers_engine import DiffusersEngine

        return DiffusersEngine(**made, lora_target_modules=config.lora.lora_target_modules)
    from miles_core.rollout.sglang.engine import Looks, SglangEngine

    c = config.cluster
    interval, timeout = c.rollout_health_check_interval, c.rollout_health_check_timeout
    return SglangEngine(
        **made,
        log=logs / f"{name}.log",
        options=config.rollout.sglang_options,
        seconds=60.0 * c.distributed_timeout_minutes,
        looks=Looks(interval, timeout, c.rollout_health_check_first_wait) if c.use_fault_tolerance else None,
    )
