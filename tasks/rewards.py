"""rewards: scores of a rollout."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from miles_core.pipeline import rewards
from miles_core.pipeline.feed import RolloutFeed
from miles_core.pipeline.stage import Step
from miles_core.store.manifest import Manifest
from tasks.publish import publish


@task(name="rewards", task_run_name="rewards", cache_policy=NO_CACHE)
def score_rewards(step: Step, feed: RolloutFeed) -> Manifest:
    """Score each part that comes through `feed`, while the rollout goes on."""
    return publish(rewards.score_behind(step, feed), step)
