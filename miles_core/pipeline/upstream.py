"""What each stage consumes on a run's line."""

from miles_core.errors import StageError
from miles_core.pipeline.stage import Step, Upstreams
from miles_core.store.manifest import Manifest
from miles_core.store.stages import StageName


def previous_prompts(step: Step) -> Upstreams:
    """Upstream of prompts: the previous iteration's, none for the first; in waves also the policy that they are chosen by."""
    before = {} if step.iteration == 0 else {"prompts": line(step, "prompts", step.iteration - 1)}
    return before | ({"policy": policy_in_force(step)} if step.config.in_waves else {})


def policy_in_force(step: Step) -> Manifest:
    """The policy that this iteration generates with and trains from: the previous update, or policy/init."""
    return line(step, "policy", -1) if step.iteration == 0 else line(step, "update", step.iteration - 1)


def line(step: Step, stage: StageName, iteration: int) -> Manifest:
    """The attempt on the run's line. Raises StageError where it is missing or damaged."""
    manifest = step.store.on_line(stage, iteration)
    where = f"{stage} of iteration {iteration}" if iteration >= 0 else "policy/init"
    if manifest is None:
        raise StageError(f"run {step.store.run}: {where} is not committed; `miles train` makes it")
    damage = step.store.damage(manifest)
    if damage:
        raise StageError(f"run {step.store.run}: {where} is damaged: {damage}; `miles train` makes it afresh")
    return manifest
