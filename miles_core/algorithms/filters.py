"""Which groups and samples take part: the defaults, which leave everything in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from miles_core.data.sample import Sample


@dataclass(frozen=True)
class DynamicFilterOutput:
    """Verdict of a group filter: `reason` says why the group is dropped, None where it is kept."""

    keep: bool
    reason: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What a group filter said of a group."""

    group_index: int
    keep: bool
    reason: str | None = None


def first_kept(verdicts: Iterable[Verdict], wanted: int) -> tuple[list[int], list[int]]:
    """(used, surplus): the first `wanted` kept groups by group index, whenever they came, and the other kept ones."""
    kept = sorted(verdict.group_index for verdict in verdicts if verdict.keep)
    return kept[:wanted], kept[wanted:]


def check_reward_nonzero_std(args: Any, samples: Sequence[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Drop a group whose samples all have the same reward: it teaches nothing. The reason names that reward."""
    rewards = [float(sample.reward) for sample in samples]  # type: ignore[arg-type]
    if min(rewards) < max(rewards):
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")


def keep_all_groups(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep the scored group `samples`: the default of --dynamic-sampling-filter-path."""
    return DynamicFilterOutput(keep=True, reason=None)


def keep_all_samples(args: Any, data: list[list[Sample]]) -> None:
    """Mark no sample of the groups `data` for removal: the default of --rollout-sample-filter-path.

    A filter sets sample.remove_sample = True in place: such a sample leaves the loss and still counts in its
    group's mean and std.
    """
