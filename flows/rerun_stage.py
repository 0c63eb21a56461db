"""One stage of one iteration again, beside the run's line, inputs pinned."""

from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.session import run_session
from miles_core.config.overrides import from_mapping
from miles_core.errors import InputError
from miles_core.pipeline.feed import RolloutFeed, replay
from miles_core.pipeline.rerun import check_overrides, stages_of_rerun, upstream_of
from miles_core.pipeline.run import existing_iteration
from miles_core.pipeline.stage import Step
from miles_core.store.manifest import Manifest
from miles_core.store.stages import StageName
from tasks.advantages import normalize_advantages
from tasks.prompts import sample_prompts
from tasks.publish import commit
from tasks.rewards import score_rewards
from tasks.rollout import generate_rollout
from tasks.update import update_policy


@flow(name="rerun-stage", flow_run_name="{run} · rerun {stage} of iteration {iteration}")
def rerun_stage(
    run: str,
    iteration: int,
    stage: str,
    overrides: dict[str, Any] | None = None,
    downstream: bool = False,
    artifact_root: str | None = None,
) -> dict[str, str]:
    """Make a stage again, with other options if given; attempts stand side by side and the run's line stays.

    Args:
        run: name of the run.
        iteration: number of the iteration, from 0.
        stage: prompts, rollout, rewards, advantages or update.
        overrides: options by name, e.g. {"rm_type": "ocr"}; only those that affect the stages made.
        downstream: also make the later stages of the iteration, up to update.
        artifact_root: folder of all runs; unset: MILES_ARTIFACT_ROOT, else the user's data folder.
    """
    changes = from_mapping(overrides or {})
    stages = stages_of_rerun(stage, downstream)
    check_overrides(changes, stages)
    with run_session(run, artifact_root, changes, moves_line=False) as session:
        existing_iteration(session.store, str(iteration))
        step = session.step(iteration, moves_line=False, flow_run_id=flow_run.id)
        made: dict[StageName, Manifest] = {}
        for name in stages:
            made[name] = _run(step, name, made)
        return {name: step.store.files.url(m.folder) for name, m in made.items()}


def _run(step: Step, stage: StageName, made: dict[StageName, Manifest]) -> Manifest:
    upstream = upstream_of(step, stage, made)
    if stage == "prompts":
        return commit(sample_prompts, step)
    if stage == "rollout":
        return commit(generate_rollout, step, upstream["prompts"], upstream["policy"], RolloutFeed())
    if stage == "rewards":
        rollout = upstream["rollout"]
        prompts = step.store.product(rollout.upstream["prompts"])
        if prompts is None:
            raise InputError(f"the prompts {rollout.folder} was made from are gone: `miles train` makes them afresh")
        return commit(score_rewards, step, replay(rollout, prompts))
    if stage == "advantages":
        return commit(normalize_advantages, step, upstream["rewards"])
    return commit(update_policy, step, upstream["rollout"], upstream["advantages"], upstream["policy"])
