"""Sample: one image or video to be made, then made, then scored; what every hook receives."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Sample:
    """Tensors are torch tensors on the CPU, present only where a stage loaded them.

    generated_output: (3, H, W) float32 in [0, 1]. latents: (P, C, h, w), the trajectory at `latent_steps`
    (P positions: i and i + 1 for each trained step i). sigmas: (T + 1,), timesteps: (T,), log_probs: (T,). model_outputs:
    (S, C, h, w) at the S trained steps, where they were kept.
    """

    group_index: int
    index: int
    prompt: str
    seed: int
    metadata: dict[str, Any] = field(default_factory=dict)
    negative_prompt: str | None = None
    generated_output: Any = None
    latents: Any = None
    latent_steps: list[int] = field(default_factory=list)
    sigmas: Any = None
    timesteps: Any = None
    log_probs: Any = None
    sde_step_indices: list[int] | None = None
    conditioning_id: str | None = None
    model_outputs: Any = None
    reward: float | dict[str, float] | None = None
    remove_sample: bool = False

    @property
    def rm_type(self) -> str | None:
        """The reward type that this sample's metadata names, before the run's own."""
        return self.metadata.get("rm_type")
