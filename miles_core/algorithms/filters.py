"""Which groups and samples take part: the defaults, which leave everything in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_core.data.sample import Sample


@dataclass(frozen=True)
class DynamicFilterOutput:
    """Verdict of a group filter: `reason` says why the group is dropped, None where it is kept."""

    keep: bool
    reason: str | None = None


def keep_all_groups(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep the scored group `samples`: the default of --dynamic-sampling-filter-path."""
    return DynamicFilterOutput(keep=True, reason=None)


def keep_all_samples(args: Any, data: list[list[Sample]]) -> None:
    """Mark no sample of the groups `data` for removal: the default of --rollout-sample-filter-path.

    A filter sets sample.remove_sample = True in place: such a sample leaves the loss and still counts in its
    group's mean and std.
    """
