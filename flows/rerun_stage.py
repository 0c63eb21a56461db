"""One stage again, of one iteration or of many, beside the run's line, inputs pinned."""

import shlex
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.session import Session, run_session
from miles_core.config.forms import NONE, Options, changes_of
from miles_core.config.overrides import as_flags
from miles_core.errors import InputError, StageError, StoreError
from miles_core.observe.terminal import figures_of, several
from miles_core.pipeline.feed import RolloutFeed, replay
from miles_core.pipeline.lineage import consumed_by
from miles_core.pipeline.rerun import (
    Chosen,
    Rerunnable,
    RerunPlan,
    chosen_inputs,
    made_before,
    plan_rerun,
    read_line,
    stale,
    upstream_of,
)
from miles_core.pipeline.run import LATEST, any_run
from miles_core.pipeline.stage import Step, Upstreams
from miles_core.store.compare import IDENTICAL, compare
from miles_core.store.files import DamagedError
from miles_core.store.manifest import Manifest
from miles_core.store.stages import StageName
from tasks.advantages import normalize_advantages
from tasks.failure import told
from tasks.prompts import sample_prompts
from tasks.publish import Backfill, commit_or_reuse
from tasks.rewards import score_rewards
from tasks.rollout import generate_rollout
from tasks.update import update_policy


@flow(name="rerun-stage", flow_run_name="{run} · rerun {stage} of {iterations}", validate_parameters=False)
def rerun_stage(
    run: str = "latest",
    iterations: str = "latest",
    stage: Rerunnable = "rewards",
    options: Options = NONE,
    downstream: bool = False,
    force: bool = False,
    from_attempt: str | None = None,
    artifact_root: str | None = None,
) -> list[dict[str, Any]]:
    """Make a stage again, with other options if given; attempts stand side by side and the run's line stays. What is
    committed with the same inputs and options is reused. An iteration that fails does not keep the others back.

    Args:
        run: name of the run, or latest: the one trained last.
        iterations: a number; FIRST:END, END left out; latest, or latest:3 for the newest three; failed: where a stage
            made is missing, damaged or was never finished; unscored: where the rewards are missing.
        stage: the stage.
        options: options by concern that differ from the run's; only those that affect the stages made.
        downstream: also make the later stages of each iteration, up to update.
        force: make them although they are committed, and say what differs.
        from_attempt: attempt whose inputs are taken instead of the line's; for a later stage it is an input itself.
        artifact_root: folder of all runs; unset: MILES_ARTIFACT_ROOT, else the user's data folder.
    """
    changes = changes_of(options)
    if run == LATEST and not any_run(artifact_root):
        print("there is no run yet, there is nothing to do", flush=True)
        return []
    chosen = ["--from-attempt", from_attempt] if from_attempt else []
    words = [*(["--downstream"] if downstream else []), *(["--force"] if force else []), *chosen, *as_flags(changes)]
    with told(f"rerun of {stage}", run, shlex.join(["miles", "rerun", run, iterations, stage, *words])):
        plan = plan_rerun(
            run, artifact_root, iterations, stage, overrides=changes, downstream=downstream, attempt=from_attempt
        )
        return _run_plan(plan, iterations, changes, force)


def _run_plan(plan: RerunPlan, iterations: str, changes: dict[str, Any], force: bool) -> list[dict[str, Any]]:
    for number in plan.selection.left_out:
        print(f"iteration {number} is left out: the run is being trained and has not finished it", flush=True)
    if not plan.selection.iterations:
        print(f"run {plan.store.run}: no iteration is {iterations}, there is nothing to do", flush=True)
        return []
    print(
        f"run {plan.store.run}: {', '.join(plan.stages)} of {several(len(plan.selection.iterations), 'iteration')}",
        flush=True,
    )
    with run_session(plan.store.run, plan.store.files.root, changes, moves_line=False) as session:
        return _backfill(session, plan, force)


def _backfill(session: Session, plan: RerunPlan, force: bool) -> list[dict[str, Any]]:
    chosen, made, failed = plan.selection.iterations, [], {}
    shown = Backfill(plan.store.run, plan.stages[0], len(chosen))
    for place, number in enumerate(chosen, 1):
        print(f"iteration {number}" + (f" ({place} of {len(chosen)})" if len(chosen) > 1 else ""), flush=True)
        step = session.step(number, moves_line=False, flow_run_id=flow_run.id, force=force)
        try:
            rows, lines = _iteration(step, plan.stages, chosen_inputs(step, plan.attempt))
        except StoreError:
            raise
        except (StageError, DamagedError, InputError) as fault:
            if not plan.selection.many:
                raise
            failed[number] = str(fault)
            rows, lines = [], [f"failed: {fault}"]
            print(f"  failed: {fault}", flush=True)
        made += rows
        shown.told(number, lines)
    if failed:
        each = "; ".join(f"iteration {number}: {fault}" for number, fault in failed.items())
        raise StageError(
            f"{plan.stages[0]} failed in {len(failed)} of {len(chosen)} iterations, the others are committed. {each}. Run the "
            "same command again to make what is missing"
        )
    return made


def _iteration(step: Step, stages: tuple[StageName, ...], chosen: Chosen) -> tuple[list[dict[str, Any]], list[str]]:
    """The stages of one iteration: a row for each, and what there is to say about them."""
    store, made, rows, lines = step.store, Chosen(), [], []

    def say(text: str) -> None:
        lines.append(text)
        print(f"    {text}", flush=True)

    for stage in stages:
        upstream = upstream_of(step, stage, made, chosen)
        before = made_before(step, stage, upstream) if step.force else None
        made[stage], reused = _run(step, stage, upstream)
        if stage == "rewards" and step.config.in_waves:
            say("the stored samples are scored, no wave is drawn; which groups are kept is asked again for advantages")
        lines.append(f"{stage} {made[stage].attempt} {'reused' if reused else 'computed'}")
        say(read_line(store, upstream))
        compared = compare(store.files, before, made[stage]) if before else None
        if before and compared:
            say(f"compared with {before.attempt}: {compared}")
            if compared != IDENTICAL:
                say(f"{figures_of(stage, before.summary)} → {figures_of(stage, made[stage].summary)}")
        rows.append(
            {
                "iteration": step.iteration,
                "stage": stage,
                "attempt": made[stage].attempt,
                "folder": store.files.url(made[stage].folder),
                "reused": reused,
                "read": {name: manifest.attempt for name, manifest in upstream.items()},
                "compared": compared,
            }
        )
    behind = stale(store, list(made.values()))
    if behind:
        say(behind)
    return rows, lines


def _run(step: Step, stage: StageName, upstream: Upstreams) -> tuple[Manifest, bool]:
    if stage == "prompts":
        return commit_or_reuse(sample_prompts, step, upstream)
    if stage == "rollout":
        return commit_or_reuse(generate_rollout, step, upstream["prompts"], upstream["policy"], RolloutFeed())
    if stage == "rewards":
        rollout = upstream["rollout"]
        return commit_or_reuse(score_rewards, step, replay(rollout, consumed_by(step.store, rollout, "prompts")))
    if stage == "advantages":
        return commit_or_reuse(normalize_advantages, step, upstream["rewards"])
    return commit_or_reuse(update_policy, step, upstream["rollout"], upstream["advantages"], upstream["policy"])
