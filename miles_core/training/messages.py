"""What the driver tells an update and is told by it: no tensors, and no torch to import."""

from dataclasses import dataclass
from typing import Any

from miles_core.store.parts import Part


@dataclass(frozen=True)
class UpdateInputs:
    """Committed parts that one update reads.

    rollout and latents: rows and trajectories, parts of the same names. train_data: train pairs of a
    user's own, else none. policy_parts: of policy/init or of the previous update; policy_digest: that policy's. probe:
    rollout's safetensors file, None for no comparison with the engine. first_global_step: optimizer steps done before.
    """

    iteration: int
    rollout: list[Part]
    latents: list[Part]
    conditioning: list[Part]
    advantages: list[Part]
    train_data: list[Part]
    policy_parts: list[Part]
    policy_digest: str
    probe: Part | None
    first_global_step: int


@dataclass(frozen=True)
class UpdateResult:
    """What an update wrote, the same on every rank: `rows` (data/steps.parquet), `parts` beside it (checkpoint,
    adapter, probe), and the rows once more as `metrics`. policy_digest: of the new policy. log_prob_mismatch: mean absolute
    difference of the trainer's log-probs from the engine's before the first optimizer step. alignment: a row a denoising
    step (alignment.json), where outputs are compared."""

    parts: list[Part]
    rows: Part
    metrics: list[dict[str, Any]]
    policy_digest: str
    log_prob_mismatch: float
    alignment: list[dict[str, Any]]
