"""sync: every engine holds the new policy, and proves it."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from miles_core.pipeline import sync
from miles_core.pipeline.stage import Step, run_stage
from miles_core.store.manifest import Manifest
from tasks.publish import publish


@task(name="sync", task_run_name="sync", cache_policy=NO_CACHE)
def sync_weights(step: Step, update: Manifest) -> Manifest:
    """Push the adapter to every engine and verify digest, bound modules and the probe."""
    return publish(run_stage(step, "sync", {"update": update}, sync.push), step)
