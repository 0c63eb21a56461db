"""A run's line in run.json: a slot for each stage and iteration, and the attempt that stands in it.

An entry is the attempt's name, or RUN/ATTEMPT for one that a fork keeps in the run that it came from.
"""

from dataclasses import dataclass
from typing import Any

from miles_core.store.manifest import Manifest
from miles_core.store.stages import StageName


@dataclass(frozen=True)
class Kept:
    """An attempt of another run on a fork's line."""

    stage: StageName
    iteration: int
    run: str
    attempt: str
    content_digest: str


def slot(stage: StageName, iteration: int) -> str:
    """The key of a stage of an iteration; policy/init has one of its own."""
    return stage if stage == "policy" else f"{iteration:06d}/{stage}"


def entry(manifest: Manifest, run: str) -> str:
    """What stands in the slot of this attempt on the line of `run`."""
    return manifest.attempt if manifest.held_by == run else f"{manifest.held_by}/{manifest.attempt}"


def standing(named: str, run: str) -> tuple[str, str]:
    """The run that holds an entry's attempt, and the attempt's name."""
    holder, slash, attempt = named.partition("/")
    return (holder, attempt) if slash else (run, named)


def kept(record: dict[str, Any], stage: StageName, iteration: int) -> Kept | None:
    """What a fork's line keeps in a slot; None where the run has an attempt of its own there, or none."""
    named = record["line"].get(slot(stage, iteration), "")
    if "/" not in named:
        return None
    holder, attempt = standing(named, "")
    digest = record.get("parent", {}).get("kept", {}).get(slot(stage, iteration), "")
    return Kept(stage, iteration, holder, attempt, digest)


def iterations(record: dict[str, Any], stage: StageName | None = None) -> list[int]:
    """Iterations for which the line names an attempt, at `stage` where one is given, ascending; without one, -1 (the
    evaluation before training) is none."""
    slots = (key.partition("/") for key in record.get("line", {}))
    named = {int(number) for number, _, name in slots if name and stage in (None, name)}
    return sorted(named if stage else (number for number in named if number >= 0))
