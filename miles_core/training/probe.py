"""The probe: one forward on fixed inputs, made by engine and trainer, that shows whether both hold the same policy."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from miles_core.errors import StageError
from miles_core.weights.packing import from_safetensors, to_safetensors
from miles_core.weights.probe_spec import probe_tolerance
from miles_core.weights.verify import relative_distance

_CONDITIONING = "cond."


@dataclass(frozen=True)
class Probe:
    """latents (1, C, h, w), timestep (1,), conditioning {name: (1, ...)}, model_output (1, C, h, w): the engine's,
    guidance included."""

    latents: torch.Tensor
    timestep: torch.Tensor
    conditioning: dict[str, torch.Tensor]
    guidance_scale: float
    model_output: torch.Tensor


Predict = Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], float], torch.Tensor]


def read_probe(data: bytes) -> Probe:
    """The probe that rollout wrote. Raises StageError where a tensor is absent."""
    tensors = from_safetensors(data)
    absent = {"latents", "timestep", "guidance_scale", "model_output"} - tensors.keys()
    if absent:
        raise StageError(f"the rollout's probe lacks {min(absent)}")
    return Probe(
        latents=tensors["latents"],
        timestep=tensors["timestep"],
        conditioning={
            name.removeprefix(_CONDITIONING): tensor[None]
            for name, tensor in tensors.items()
            if name.startswith(_CONDITIONING)
        },
        guidance_scale=tensors["guidance_scale"].item(),
        model_output=tensors["model_output"],
    )


def run_probe(probe: Probe, predict: Predict, device: torch.device) -> torch.Tensor:
    """The trainer's own output on the probe's inputs, (1, C, h, w) fp32 on the CPU. A collective under FSDP."""
    conditioning = {name: tensor.to(device) for name, tensor in probe.conditioning.items()}
    with torch.no_grad():
        return predict(probe.latents.to(device), probe.timestep.to(device), conditioning, probe.guidance_scale).cpu()


def check_parity(probe: Probe, before: torch.Tensor, dtype: str) -> None:
    """Raises StageError where the trainer's output before the first step is not the engine's: with such a policy the
    importance ratio would not start at 1."""
    distance, tolerance = relative_distance(before, probe.model_output), probe_tolerance(dtype)
    if not distance <= tolerance:
        raise StageError(
            f"train/rollout mismatch: on the rollout's probe the trainer's output lies {distance:.3g} from the "
            f"engine's (relative L2, at most {tolerance:.3g} in {dtype})"
        )


def encode_probe(before: torch.Tensor, after: torch.Tensor) -> bytes:
    """probe.safetensors of an update: the trainer's outputs before its first step and after its last."""
    return to_safetensors({"before": before, "after": after})
