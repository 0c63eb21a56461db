"""prompts: the samples that an iteration will make."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from miles_core.pipeline import prompts
from miles_core.pipeline.stage import Step, Upstreams, run_stage
from miles_core.pipeline.upstream import previous_prompts
from miles_core.store.manifest import Manifest
from tasks.publish import publish


@task(name="prompts", task_run_name="prompts", cache_policy=NO_CACHE)
def sample_prompts(step: Step, upstream: Upstreams | None = None) -> Manifest:
    """Draw prompts from where the previous iteration left the data source: that on the line, or another attempt."""
    before = previous_prompts(step) if upstream is None else upstream
    return publish(run_stage(step, "prompts", before, prompts.draw), step)
