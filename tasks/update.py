"""update: the policy's optimizer steps; and the policy that a run starts from."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from miles_core.pipeline import update
from miles_core.pipeline.iteration import ensure_policy
from miles_core.pipeline.stage import Step, run_stage
from miles_core.store.manifest import Manifest
from tasks.publish import publish


@task(name="policy", task_run_name="policy", cache_policy=NO_CACHE)
def initialize_policy(step: Step) -> Manifest:
    """policy/init: base weights' digest and the seeded adapter."""
    return publish(ensure_policy(step), step)


@task(name="update", task_run_name="update", cache_policy=NO_CACHE)
def update_policy(step: Step, rollout: Manifest, advantages: Manifest, policy: Manifest) -> Manifest:
    """Train the policy on a rollout; commits metrics, checkpoint and adapter."""
    products = {"rollout": rollout, "advantages": advantages, "policy": policy}
    return publish(run_stage(step, "update", products, update.train), step)
