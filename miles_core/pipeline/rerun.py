"""Which stages a rerun makes, what they consume, and which changes make sense for them."""

from typing import Any

from miles_core.config import FIELDS, affects, flag
from miles_core.errors import InputError
from miles_core.pipeline.stage import Step, Upstreams
from miles_core.pipeline.upstream import line, policy_in_force, previous_prompts
from miles_core.store.manifest import Manifest
from miles_core.store.stages import ITERATION_STAGES, STAGES, StageName, downstream_of

_OF_TRAIN = (
    *("run_id", "new", "artifact_root", "num_rollout"),
    *("eval_interval", "skip_eval_before_train", "stop_on_eval_failure"),
)
RERUNNABLE: tuple[StageName, ...] = ("prompts", "rollout", "rewards", "advantages", "update")


def stages_of_rerun(stage: str, downstream: bool) -> tuple[StageName, ...]:
    """The stages a rerun makes, in order. sync belongs to the line: it follows training alone."""
    if stage == "sync":
        raise InputError("sync belongs to the run's line: `miles train` runs it after each update")
    if stage == "evaluation":
        raise InputError("evaluation has a command of its own: `miles evaluate RUN ITER`")
    if stage not in RERUNNABLE:
        raise InputError(f"there is no stage {stage!r} to rerun: choose one of {', '.join(RERUNNABLE)}")
    later = tuple(s for s in downstream_of(stage) if s != "sync") if downstream else ()
    return (stage, *later)


def check_overrides(overrides: dict[str, Any], stages: tuple[StageName, ...]) -> None:
    """Refuse a change that none of these stages depends on."""
    for name in overrides:
        wanted = affects(name)
        if name in _OF_TRAIN:
            raise InputError(f"{flag(name)} has a meaning for `miles train` alone: leave it out")
        if "policy" in wanted:
            raise InputError(f"{flag(name)} belongs to the whole run, not to a stage of it: start another run")
        if wanted and not set(wanted) & set(stages):
            raise InputError(
                f"{flag(name)} affects {', '.join(wanted)}, not {', '.join(stages)}: {_way(wanted, stages)}"
            )
        assert name in FIELDS


def _way(wanted: tuple[StageName, ...], stages: tuple[StageName, ...]) -> str:
    if "evaluation" in stages:
        return "leave it out"
    if wanted == ("evaluation",):
        return "`miles evaluate` takes it"
    return f"rerun {next(s for s in ITERATION_STAGES if s in wanted)}, or an earlier stage with --downstream"


def upstream_of(step: Step, stage: StageName, made: dict[StageName, Manifest]) -> Upstreams:
    """What a stage consumes in a rerun: what this rerun made, else what is on the run's line, pinned."""
    if stage == "prompts":
        return previous_prompts(step)
    found: Upstreams = {}
    for name in STAGES[stage].upstream:
        if name == "policy":
            found[name] = policy_in_force(step)
        else:
            found[name] = made.get(name) or line(step, name, step.iteration)
    return found
