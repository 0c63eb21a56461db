"""Which iterations a rerun is for: a number, a range, the newest, those that failed or that are not scored."""

import re
from dataclasses import dataclass

from miles_core.errors import InputError
from miles_core.pipeline.stage import Step, find_stage
from miles_core.store.lock import read_lock
from miles_core.store.run_store import RunStore
from miles_core.store.stages import STAGES, StageName

_RANGE = re.compile(r"(\d{0,9}):(\d{0,9})")
_NEWEST = re.compile(r"latest(?::(\d{1,9}))?")
FORMS = "a number, FIRST:END, latest, latest:N, failed or unscored"


@dataclass(frozen=True)
class Selection:
    """The iterations, ascending, and those that were left out because the run is being trained and is at them. `many`:
    a range or a rule, not one iteration by its number."""

    iterations: tuple[int, ...]
    left_out: tuple[int, ...]
    many: bool


def check_form(given: str, stage: StageName) -> None:
    """Refuse what names no iterations, before anything is looked at. Raises InputError."""
    if given == "unscored" and stage != "rewards":
        raise InputError(f"unscored names iterations whose rewards are missing: rerun rewards, not {stage}")
    named = given in ("failed", "unscored") or _NEWEST.fullmatch(given) or _RANGE.fullmatch(given)
    if not named and not (given.isdecimal() and len(given) <= 9):
        raise InputError(f"there is no iteration {given!r}: give {FORMS}")


def select(step: Step, given: str, stages: tuple[StageName, ...]) -> Selection:
    """The iterations that `given` names for a rerun of `stages` as `step` is configured.

    What a run that is being trained has not finished yet is left out, unless it is asked for by its number. Raises
    InputError where the run has none of them.
    """
    check_form(given, stages[0])
    store = step.store
    there = store.iterations()
    nothing = InputError(f"run {store.run} has no iteration {given!r}: `miles show {store.run}` lists those there are")
    if given.isdecimal():
        if int(given) not in there:
            raise nothing
        return Selection((int(given),), (), False)
    if newest := _NEWEST.fullmatch(given):
        wanted = int(newest[1] or 1)
        if not wanted:
            raise InputError(f"{given!r} asks for no iteration: give latest, or latest:N with N from 1")
        # None of a run that has just begun: a schedule that meets it has nothing to do.
        ready = [i for i in there if _ready(store, i, stages)]
        return Selection(tuple(ready[-wanted:]), (), newest[1] is not None)
    if bounds := _RANGE.fullmatch(given):
        first, end = (int(bounds[1] or 0), int(bounds[2]) if bounds[2] else None)
        there = [i for i in there if first <= i and (end is None or i < end)]
        if not there:
            raise nothing
    left_out = [i for i in there if not _ready(store, i, stages)] if _being_trained(store) else []
    if given in ("failed", "unscored"):
        # The one that training is at lacks stages because it is not over.
        left_out = [i for i in there if store.on_line("sync", i) is None] if _being_trained(store) else []
        rule = _failed if given == "failed" else _unscored
        there = [i for i in there if i not in left_out and rule(step.at(i), stages)]
    return Selection(tuple(i for i in there if i not in left_out), tuple(left_out), True)


def _needed(stages: tuple[StageName, ...]) -> list[StageName]:
    """What is on the line of an iteration that a rerun of these stages can take: what it reads, and the scored rollout."""
    scored: tuple[StageName, ...] = ("rollout", "rewards")
    return list(dict.fromkeys((*scored, *(n for n in STAGES[stages[0]].upstream if n != "policy"))))


def _ready(store: RunStore, iteration: int, stages: tuple[StageName, ...]) -> bool:
    return all(store.on_line(name, iteration) for name in _needed(stages))


def _being_trained(store: RunStore) -> bool:
    held = read_lock(store.files, store.run)
    return held is not None and not held.released and held.holder.lives_here() is not False


def _failed(step: Step, stages: tuple[StageName, ...]) -> bool:
    """Whether a stage is missing or damaged on the line, or an attempt at it was begun and, under its fingerprint,
    none was committed."""
    store = step.store
    for stage in stages:
        standing = store.on_line(stage, step.iteration)
        if standing is None or store.damage(standing):
            return True
        done = {_base(manifest.attempt) for manifest in store.committed(stage, step.iteration)}
        if {_base(name) for name in store.attempts(stage, step.iteration)} - done:
            return True
    return False


def _unscored(step: Step, stages: tuple[StageName, ...]) -> bool:
    """Whether the rollout on the line has no rewards of the kind that the step's options give."""
    rollout = step.store.on_line("rollout", step.iteration)
    return rollout is not None and find_stage(step, "rewards", {"rollout": rollout}) is None


def _base(attempt: str) -> str:
    return attempt.partition(".")[0]
