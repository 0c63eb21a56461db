"""A new run that goes on from another one's iteration."""

import shlex
from typing import Any, Literal

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from miles_core.config.forms import NONE, Options, changes_of
from miles_core.config.overrides import as_flags
from miles_core.pipeline.fork import begin_fork, plan_fork, told_of
from miles_core.pipeline.run import open_run
from miles_core.store.files import prove_conditional_put
from tasks.failure import told
from tasks.publish import key_of

Stage = Literal["prompts", "rollout", "rewards", "advantages", "update"]


@flow(name="fork", flow_run_name="{run} · fork at {iteration} as {run_id}", validate_parameters=False)
def fork(
    run: str,
    iteration: int,
    run_id: str,
    stage: Stage | None = None,
    from_attempt: str | None = None,
    options: Options = NONE,
    artifact_root: str | None = None,
) -> dict[str, Any]:
    """Begin a run that keeps another's iterations before this one, and of this one what comes before the changed stage, or
    what an attempt was made from. Nothing is copied. The deployment train carries it on, with the recipe `same`.

    Args:
        run: name of the run that is kept, or latest: the one trained last.
        iteration: the iteration from which on the new run is its own.
        run_id: name of the new run.
        stage: first stage of the iteration that is made again; unset: the first that the options change.
        from_attempt: attempt of the iteration that the new run goes on from.
        options: options by concern that differ from the run's.
        artifact_root: folder of all runs; unset: MILES_ARTIFACT_ROOT, else the user's data folder.
    """
    changes = changes_of(options)
    words = [*(["--stage", stage] if stage else []), *(["--from-attempt", from_attempt] if from_attempt else [])]
    command = ["miles", "fork", run, str(iteration), "--run-id", run_id, *words, *as_flags(changes)]
    with told(f"fork of {run}", run, shlex.join(command)):
        parent, config = open_run(run, artifact_root)
        prove_conditional_put(parent.files)
        planned = plan_fork(
            parent, config, str(iteration), run_id, stage=stage, attempt=from_attempt, overrides=changes
        )
        begin_fork(planned)
        lines = "\n".join(f"- {line}" for line in told_of(planned))
        total = planned.config.run.num_rollout
        create_markdown_artifact(
            f"## {run_id} is a fork of {parent.run} at iteration {iteration}\n\n{lines}\n\n"
            f"Carry it on up to iteration {total - 1}, or further with a larger num_rollout: deployment **train**, recipe "
            f"`same`, options.run.run_id `{run_id}`; or `miles train same --run-id {run_id} --num-rollout {total}`.\n",
            key=key_of(run_id, "fork"),
            description=f"{run_id} is a fork of {parent.run} at iteration {iteration}",
        )
        return {"run": run_id, "parent": parent.run, "iteration": planned.iteration, "first_stage": planned.stage}
