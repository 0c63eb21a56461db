"""Proof that an engine computes with the policy that the trainer holds: one forward on both sides."""

import torch

from miles_core.errors import StageError
from miles_core.weights.probe_spec import ProbeResult

_NOISE_SHARE = 1e-2
_MOVED_SHARE = 0.1


def relative_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """L2 norm of a - b over the L2 norm of b, in float64; inf where shapes differ or a value is not finite."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return float("inf")
    distance, norm = torch.linalg.vector_norm(a - b).item(), torch.linalg.vector_norm(b).item()
    if norm == 0:
        return 0.0 if distance == 0 else float("inf")
    return distance / norm


def check_probe(
    engine_before: torch.Tensor,
    engine_after: torch.Tensor,
    trainer_before: torch.Tensor,
    trainer_after: torch.Tensor,
    tolerance: float,
) -> ProbeResult:
    """Compare the engine's outputs before and after a push with the trainer's before and after its update.

    All (1, C, h, w). Raises StageError where the engine's output after the push is not the trainer's, and where the
    trainer's moved (by more than rounding, a hundredth of `tolerance`) and the engine's moved by less than a tenth
    of it: an update smaller than `tolerance` that never arrived.
    """
    diff = relative_distance(engine_after, trainer_after)
    moved = relative_distance(engine_after, engine_before)
    trainer_moved = relative_distance(trainer_after, trainer_before)
    if not diff <= tolerance:
        raise StageError(
            f"after the push the engine's output lies {diff:.3g} from the trainer's (relative L2, at most "
            f"{tolerance:.3g}): the engine does not compute with the new policy"
        )
    if trainer_moved > _NOISE_SHARE * tolerance and not moved >= _MOVED_SHARE * trainer_moved:
        raise StageError(
            f"the update moved the trainer's output by {trainer_moved:.3g} (relative L2) and the push moved the "
            f"engine's by {moved:.3g}: the new policy did not reach the engine"
        )
    return ProbeResult(diff=diff, moved=moved)
