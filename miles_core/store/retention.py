"""Which iterations' large files are kept: a rule on numbers alone.

Adapters, images and all small tables are kept for ever. What goes: full checkpoints of updates, and latents and
conditioning of rollouts.
"""

from collections.abc import Collection
from dataclasses import dataclass

from miles_core.store.stages import StageName


@dataclass(frozen=True)
class Rule:
    """`folders` of a stage's attempts are kept for the newest `keep` iterations; 0 keeps all. `option` rules it."""

    stage: StageName
    folders: tuple[str, ...]
    keep: int
    option: str


def rules(*, full_checkpoints: int, latents_iterations: int) -> tuple[Rule, ...]:
    """The rules of a run by its two options."""
    return (
        Rule(
            "rollout",
            ("latents", "conditioning"),
            latents_iterations,
            f"--keep-latents-iterations {latents_iterations}",
        ),
        Rule("update", ("checkpoint",), full_checkpoints, f"--keep-full-checkpoints {full_checkpoints}"),
    )


def kept(on_line: Collection[int], keep: int, at: int) -> set[int]:
    """The iterations whose files stay: the newest `keep` on the line, and the newest `keep` up to `at`, the iteration
    that was just finished and that the next one follows."""
    ascending = sorted(on_line)
    if not keep:
        return set(ascending)
    return {*ascending[-keep:], *[i for i in ascending if i <= at][-keep:]}


def to_prune(existing: Collection[int], on_line: Collection[int], keep: int, at: int) -> list[int]:
    """The iterations whose files go, oldest first: older than the newest on the line, and not kept."""
    stay = kept(on_line, keep, at)
    if not keep or not stay:
        return []
    return sorted(i for i in existing if i < max(stay) and i not in stay)
