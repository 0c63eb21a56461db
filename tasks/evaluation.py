"""evaluation: a policy's samples of a fixed set, scored; training goes on where it fails."""

from typing import cast

from prefect import task
from prefect.cache_policies import NO_CACHE

from miles_core.pipeline import evaluation
from miles_core.pipeline.stage import Step
from miles_core.store.manifest import Manifest
from tasks.publish import TOLD, publish, publish_failure


@task(name="evaluation", task_run_name="evaluation", cache_policy=NO_CACHE)
def evaluate_policy(step: Step, policy: Manifest) -> Manifest:
    """Generate the evaluation set's samples under `policy` and score them."""
    try:
        outcome = evaluation.evaluate(step, policy)
    except Exception as fault:
        sentence = evaluation.told(step, fault)
        return cast(Manifest, publish_failure(step.store.run, "evaluation", sentence))
    return publish(outcome, step)


def evaluate_when_due(step: Step, policy: Manifest) -> None:
    """Evaluate at the step's iteration if training is to. One that failed and was told of is passed over."""
    if evaluation.due(step):
        state = evaluate_policy(step, policy, return_state=True)
        if state.name != TOLD:
            state.result()
