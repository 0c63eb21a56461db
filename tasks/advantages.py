"""advantages: normalized rewards."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from miles_core.pipeline import advantages
from miles_core.pipeline.stage import Step, run_stage
from miles_core.store.manifest import Manifest
from tasks.publish import publish


@task(name="advantages", task_run_name="advantages", cache_policy=NO_CACHE)
def normalize_advantages(step: Step, rewards: Manifest) -> Manifest:
    """Normalize rewards within groups or over the batch, and apply the sample filters."""
    return publish(run_stage(step, "advantages", {"rewards": rewards}, advantages.normalize), step)
