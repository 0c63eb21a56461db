"""One iteration without Prefect: the same stages in the same order, for machines where the server is not wanted."""

import threading

from miles_core.errors import StageError
from miles_core.pipeline import advantages, evaluation, policy, prompts, rewards, rollout, sync, update
from miles_core.pipeline.feed import RolloutFeed
from miles_core.pipeline.retention import retain
from miles_core.pipeline.stage import Outcome, Step, Upstreams, find_stage, run_stage
from miles_core.pipeline.upstream import policy_in_force, previous_prompts
from miles_core.store.manifest import Manifest
from miles_core.store.stages import ITERATION_STAGES, StageName


def ensure_policy(step: Step) -> Outcome:
    """policy/init of the run, made once."""
    return run_stage(step.at(-1), "policy", {}, policy.initialize)


def _evaluate_when_due(step: Step, evaluated: Manifest) -> Outcome | None:
    if not evaluation.due(step):
        return None
    try:
        return evaluation.evaluate(step, evaluated)
    except Exception as fault:
        print(f"  {evaluation.told(step, fault)}", flush=True)
        return None


def run_iteration(step: Step) -> dict[StageName, Outcome]:
    """All stages of the step's iteration; rewards run behind rollout. Then it is evaluated if that is due, and older
    iterations are pruned."""
    done: dict[StageName, Outcome] = {}
    done["prompts"] = run_stage(step, "prompts", previous_prompts(step), prompts.draw)
    in_force = policy_in_force(step)
    if step.iteration == 0:
        _evaluate_when_due(step.at(evaluation.BEFORE_TRAINING), in_force)
    feed = RolloutFeed()
    scored: list[Outcome | BaseException] = []

    def score() -> None:
        try:
            scored.append(rewards.score_behind(step, feed))
        except BaseException as error:
            scored.append(error)

    scorer = threading.Thread(target=score, name="rewards")
    scorer.start()
    try:
        drawn = {"prompts": done["prompts"].manifest, "policy": in_force}
        done["rollout"] = rollout.generate(step, drawn, feed)
    finally:
        scorer.join()
    if isinstance(scored[0], BaseException):
        raise scored[0]
    done["rewards"] = scored[0]
    done["advantages"] = run_stage(step, "advantages", {"rewards": done["rewards"].manifest}, advantages.normalize)
    products = {
        "rollout": done["rollout"].manifest,
        "advantages": done["advantages"].manifest,
        "policy": in_force,
    }
    done["update"] = run_stage(step, "update", products, update.train)
    done["sync"] = run_stage(step, "sync", {"update": done["update"].manifest}, sync.push)
    evaluated = _evaluate_when_due(step, done["update"].manifest)
    retain(step)
    if evaluated:
        done["evaluation"] = evaluated
    return done


def finished(step: Step) -> bool:
    """Whether every stage of the iteration is on the line, whole, and made from what is on the line now."""
    store, i = step.store, step.iteration
    on_line = {stage: store.on_line(stage, i) for stage in ITERATION_STAGES}
    if any(manifest is None for manifest in on_line.values()):
        return False
    made = {stage: m for stage, m in on_line.items() if m is not None}
    try:
        before, in_force = previous_prompts(step), policy_in_force(step)
    except StageError:
        return False
    upstreams: dict[StageName, Upstreams] = {
        "prompts": before,
        "rollout": {"prompts": made["prompts"], "policy": in_force},
        "rewards": {"rollout": made["rollout"]},
        "advantages": {"rewards": made["rewards"]},
        "update": {"rollout": made["rollout"], "advantages": made["advantages"], "policy": in_force},
        "sync": {"update": made["update"]},
    }
    for stage, upstream in upstreams.items():
        found = find_stage(step, stage, upstream)
        if found is None or found.attempt != made[stage].attempt:
            return False
    return True
