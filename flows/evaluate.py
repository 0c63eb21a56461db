"""The evaluation of one committed policy, beside the run's line and beside a training that goes on."""

from typing import Any, Literal

from prefect import flow
from prefect.runtime import flow_run

from flows.session import evaluation_session
from miles_core.pipeline.evaluation import evaluated_policy, iteration_of
from tasks.evaluation import evaluate_policy
from tasks.publish import commit


@flow(name="evaluate", flow_run_name="{run} · evaluate {iteration}")
def evaluate(
    run: str,
    iteration: int | Literal["latest", "init"] = "latest",
    overrides: dict[str, Any] | None = None,
    force: bool = False,
    artifact_root: str | None = None,
) -> str:
    """Evaluate a policy of a run, or find it evaluated; gives the folder of the evaluation.

    Args:
        run: name of the run.
        iteration: number of the iteration whose update made the policy; latest: the newest, init: the one that the run
            started from.
        overrides: options by name, e.g. {"diffusion_eval_num_steps": 40}; only those that affect evaluation.
        force: make it again, also where the same evaluation is committed.
        artifact_root: folder of all runs; unset: MILES_ARTIFACT_ROOT, else the user's data folder.
    """
    with evaluation_session(run, artifact_root, overrides or {}) as session:
        number = iteration_of(session.store, str(iteration))
        step = session.step(number, moves_line=False, force=force, flow_run_id=flow_run.id)
        made = commit(evaluate_policy, step, evaluated_policy(step))
        return session.store.files.url(made.folder)
