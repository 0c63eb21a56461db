"""Reruns: which stages, over which iterations, what they consume, and what on the line they leave behind."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles_core.config import FIELDS, RunConfig, affects, flag
from miles_core.errors import InputError
from miles_core.pipeline.inputs import Inputs
from miles_core.pipeline.lineage import attempt_of, consumed_by, made_from
from miles_core.pipeline.run import existing_iteration, inputs_of_run, open_run
from miles_core.pipeline.select import Selection, check_form, select
from miles_core.pipeline.stage import Step, Upstreams, stage_fingerprint
from miles_core.pipeline.upstream import line, policy_in_force, previous_prompts
from miles_core.runtime.workers import Workers
from miles_core.store.manifest import Manifest, Upstream
from miles_core.store.run_store import RunStore
from miles_core.store.stages import ITERATION_STAGES, STAGES, StageName, downstream_of

Rerunnable = Literal["prompts", "rollout", "rewards", "advantages", "update"]
_OF_TRAIN = (
    *("run_id", "new", "artifact_root", "num_rollout"),
    *("eval_interval", "skip_eval_before_train", "stop_on_eval_failure"),
)
RERUNNABLE: tuple[StageName, ...] = ("prompts", "rollout", "rewards", "advantages", "update")
Chosen = dict[StageName, Manifest]


@dataclass(frozen=True)
class RerunPlan:
    """A checked rerun, before anything is started. `attempt`: the name of the attempt whose inputs are taken."""

    store: RunStore
    config: RunConfig
    inputs: Inputs
    stages: tuple[StageName, ...]
    selection: Selection
    attempt: str | None


def plan_rerun(
    run: str,
    root: str | None,
    iterations: str,
    stage: str,
    *,
    overrides: dict[str, Any],
    downstream: bool = False,
    attempt: str | None = None,
) -> RerunPlan:
    """Check all that a rerun was asked for. Raises InputError."""
    stages = stages_of_rerun(stage, downstream)
    check_overrides(overrides, stages)
    check_form(iterations, stages[0])
    store, config = open_run(run, root)
    if iterations.isdecimal():
        existing_iteration(store, iterations)
    config = config.replace(**overrides)
    inputs = inputs_of_run(store, config, overrides)
    # It looks only.
    looking = Step(config, inputs, store, Workers(config, inputs, Path()), 0, moves_line=False)
    selection = select(looking, iterations, stages)
    if attempt:
        if len(selection.iterations) != 1:
            raise InputError(f"--from-attempt {attempt} belongs to one iteration: give its number, not {iterations}")
        attempt = attempt_of(store, selection.iterations[0], attempt).attempt
    return RerunPlan(store, config, inputs, stages, selection, attempt)


def stages_of_rerun(stage: str, downstream: bool) -> tuple[StageName, ...]:
    """The stages a rerun makes, in order. sync belongs to the line: it follows training alone."""
    if stage == "sync":
        raise InputError("sync belongs to the run's line: `miles train` runs it after each update")
    if stage == "evaluation":
        raise InputError("evaluation has a command of its own: `miles evaluate RUN ITER`")
    if stage not in RERUNNABLE:
        raise InputError(f"there is no stage {stage!r} to rerun: choose one of {', '.join(RERUNNABLE)}")
    first = next(name for name in RERUNNABLE if name == stage)
    later = tuple(s for s in downstream_of(first) if s != "sync") if downstream else ()
    return (first, *later)


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


def chosen_inputs(step: Step, attempt: str | None) -> Chosen:
    """The attempt of the step's iteration and what it was made from, by stage; nothing where none was chosen."""
    return made_from(step.store, attempt_of(step.store, step.iteration, attempt)) if attempt else {}


def upstream_of(step: Step, stage: StageName, made: Chosen, chosen: Chosen) -> Upstreams:
    """What a stage consumes in a rerun: what this rerun made, else what the chosen attempt was made from (itself, for a
    later stage), else what is on the run's line."""
    if stage == "prompts":
        before, had = previous_prompts(step), chosen[stage].upstream if stage in chosen else {}
        return {n: consumed_by(step.store, chosen[stage], n) if n in had else m for n, m in before.items()}
    found: Upstreams = {}
    for name in STAGES[stage].upstream:
        if name == "policy":
            holder = chosen.get(stage) or chosen.get("rollout")
            found[name] = consumed_by(step.store, holder, name) if holder else policy_in_force(step)
        else:
            found[name] = made.get(name) or chosen.get(name) or line(step, name, step.iteration)
    return found


def made_before(step: Step, stage: StageName, upstream: Upstreams) -> Manifest | None:
    """The whole attempt that a forced remake is compared with."""
    wanted = stage_fingerprint(step, stage, {n: m.fingerprint for n, m in upstream.items()})
    return step.store.find(stage, step.iteration, wanted, upstream)


def read_line(store: RunStore, upstream: Upstreams) -> str:
    """What a stage read, in words: attempt by attempt, and where each stands."""
    words = []
    for name, manifest in upstream.items():
        standing = store.on_line(manifest.stage, manifest.iteration)
        where = "on the line" if standing and standing.folder == manifest.folder else "beside the line"
        of = f" of run {manifest.held_by}" if manifest.held_by != store.run else ""
        words.append(f"{name} {manifest.attempt}{of} ({where})")
    return "read " + ", ".join(words) if words else "read nothing: the first prompts"


def stale(store: RunStore, made: list[Manifest]) -> str | None:
    """What on the line was made from another attempt than the ones just made, and the way to go on from these."""
    behind = []
    for manifest in made:
        for stage, iteration in _consumers(manifest):
            standing = store.on_line(stage, iteration)
            had = standing and next((u for u in standing.upstream.values() if _same_place(u, manifest)), None)
            if had and had.content_digest != manifest.content_digest:
                where = "" if iteration == manifest.iteration else f" of iteration {iteration}"
                behind.append(f"{stage}{where} on the line was made from {manifest.stage} {had.attempt}")
    if not behind:
        return None
    last = made[-1]
    way = f"`miles fork {store.run} {last.iteration} --from-attempt {last.attempt} --run-id NAME`"
    return f"{', '.join(behind)}: {way} trains on from {last.attempt}"


def _consumers(manifest: Manifest) -> list[tuple[StageName, int]]:
    if manifest.stage == "update":
        return [("rollout", manifest.iteration + 1), ("sync", manifest.iteration)]
    own = [
        (name, manifest.iteration) for name in downstream_of(manifest.stage) if manifest.stage in STAGES[name].upstream
    ]
    return own + ([("prompts", manifest.iteration + 1)] if manifest.stage == "prompts" else [])


def _same_place(consumed: Upstream, manifest: Manifest) -> bool:
    return consumed.stage == manifest.stage and consumed.iteration == manifest.iteration
