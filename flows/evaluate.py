"""The evaluation of one committed policy, beside the run's line and beside a training that goes on."""

import shlex

from prefect import flow
from prefect.runtime import flow_run

from flows.session import evaluation_session
from miles_core.config.forms import NONE, Options, changes_of
from miles_core.config.overrides import as_flags
from miles_core.pipeline.evaluation import evaluated_policy, iteration_of
from tasks.evaluation import evaluate_policy
from tasks.failure import told
from tasks.publish import commit


@flow(name="evaluate", flow_run_name="{run} · evaluate {iteration}", validate_parameters=False)
def evaluate(
    run: str = "latest",
    iteration: str = "latest",
    options: Options = NONE,
    force: bool = False,
    artifact_root: str | None = None,
) -> str:
    """Evaluate a policy of a run, or find it evaluated; gives the folder of the evaluation.

    Args:
        run: name of the run, or latest: the one trained last.
        iteration: number of the iteration whose update made the policy; latest: the newest, init: the one that the run
            started from.
        options: options by concern that differ from the run's; only those that affect evaluation.
        force: make it again, also where the same evaluation is committed.
        artifact_root: folder of all runs; unset: MILES_ARTIFACT_ROOT, else the user's data folder.
    """
    changes = changes_of(options)
    words = [*(["--force"] if force else []), *as_flags(changes)]
    command = shlex.join(["miles", "evaluate", run, iteration, *words])
    with told(f"evaluation of {run}", run, command), evaluation_session(run, artifact_root, changes) as session:
        number = iteration_of(session.store, str(iteration))
        step = session.step(number, moves_line=False, force=force, flow_run_id=flow_run.id)
        made = commit(evaluate_policy, step, evaluated_policy(step))
        session.log.evaluation(step, made)
        return session.store.files.url(made.folder)
