"""One RL iteration: prompts → rollout → rewards → advantages → update → sync, and evaluation when it is due."""

from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

from prefect import flow
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from flows.session import run_session
from miles_core.pipeline.evaluation import BEFORE_TRAINING
from miles_core.pipeline.feed import RolloutFeed
from miles_core.pipeline.iteration import finished
from miles_core.pipeline.retention import retain
from miles_core.pipeline.upstream import policy_in_force
from tasks.advantages import normalize_advantages
from tasks.evaluation import evaluate_when_due
from tasks.pictures import Progress, publish_run, publish_samples
from tasks.prompts import sample_prompts
from tasks.publish import commit
from tasks.rewards import score_rewards
from tasks.rollout import generate_rollout
from tasks.sync import sync_weights
from tasks.update import initialize_policy, update_policy


@flow(
    name="iteration",
    flow_run_name="{run} · iteration {iteration}",
    task_runner=cast(Any, ThreadPoolTaskRunner(max_workers=2)),
    validate_parameters=True,
)
def iteration(run: str, iteration: int, artifact_root: str | None = None) -> None:
    """Run or resume one iteration of a run; what is committed is reused.

    Args:
        run: name of the run.
        iteration: number of the iteration, from 0; the ones before it must be committed.
        artifact_root: folder of all runs; unset: MILES_ARTIFACT_ROOT, else the user's data folder.
    """
    with run_session(run, artifact_root, moves_line=True) as session:
        step = session.step(iteration, flow_run_id=flow_run.id)
        step.progress = progress = Progress(run, step.progress)
        if not finished(step):
            session.workers.start_all()
        if iteration == 0:
            evaluate_when_due(step.at(BEFORE_TRAINING), commit(initialize_policy, step))
        feed, policy = RolloutFeed(), policy_in_force(step)
        try:
            prompts = commit(sample_prompts, step)
            rollout = generate_rollout.submit(step, prompts, policy, feed)
            rewards = score_rewards.submit(step, feed)
            made, scored = rollout.result(), rewards.result()
        except Exception:
            raise
        except BaseException:
            session.workers.abort()
            raise
        advantages = commit(normalize_advantages, step, scored)
        publish_samples(session.history, made, scored, advantages)
        update = commit(update_policy, step, made, advantages, policy)
        commit(sync_weights, step, update)
        evaluate_when_due(step, update)
        progress.finish()
        session.rewards[iteration] = scored.summary["reward_mean"]
        publish_run(session.history)
        retain(step)
        session.log.iteration(step)


def iteration_of(number: int, run: str) -> Callable[..., None]:
    """The flow `iteration`, known to a flow that calls it by the iteration's number and run.

    Prefect matches the calls of a flow that is tried again with those of its first try by function and order alone; a
    function of its own keeps each iteration's calls together, also where finished ones are passed over.
    """
    plain = cast(FunctionType, iteration.fn)
    one = FunctionType(plain.__code__, plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
    one.__doc__, one.__annotations__, one.__module__ = plain.__doc__, plain.__annotations__, plain.__module__
    one.__qualname__ = f"iteration_{number} of {run}"
    same: Any = {"name": iteration.name, "flow_run_name": iteration.flow_run_name, "task_runner": iteration.task_runner}
    made: Callable[..., None] = flow(**same)(one)
    return made
