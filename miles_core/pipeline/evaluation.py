"""evaluation: samples of a fixed set by the policy in force, scored; nothing is made from it.

It stands beside the chain that carries a run on: fixed seeds, ODE steps, no trainer, so that a run with it has the bits
of one without. The policy that a run starts from is evaluated as iteration -1, beside policy/init.
"""

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from miles_core.config import RunConfig
from miles_core.config.folders import own_args
from miles_core.data.eval_samples import eval_samples
from miles_core.data.sample import Sample
from miles_core.errors import InputError, StageError
from miles_core.observe.metrics import mean_and_std
from miles_core.pipeline.inputs import EvalSet
from miles_core.pipeline.policy import adapter_of, policy_version
from miles_core.pipeline.rollout import CommittedPrompts
from miles_core.pipeline.stage import Outcome, Product, Step, Upstreams, find_stage, run_stage
from miles_core.pipeline.upstream import line
from miles_core.rollout.rollout_function import GENERATOR, run_rollout
from miles_core.runtime.faults import fault_point
from miles_core.store.lock import LockLost
from miles_core.store.manifest import Manifest
from miles_core.store.parts import Part, inspect_table, read_table
from miles_core.store.run_store import Attempt, RunStore
from miles_core.store.stages import StageName

BEFORE_TRAINING = -1
_PART = re.compile(r"(\d{8})-(\d+)\.parquet")


def due(step: Step) -> bool:
    """Whether training evaluates at the step's iteration: after every eval_interval of them, and at -1, before the
    first, unless that is skipped. A policy that a fork keeps of another run is that run's to evaluate."""
    e = step.config.evaluation
    if e.eval_interval is None or step.store.kept(_maker(step), step.iteration):
        return False
    return not e.skip_eval_before_train if step.iteration < 0 else (step.iteration + 1) % e.eval_interval == 0


def missing(step: Step) -> bool:
    """Whether an evaluation that is due at a finished iteration, or before the first, is not on the line and whole."""
    steps = [step, step.at(BEFORE_TRAINING)] if step.iteration == 0 else [step]
    return any(due(one) and not _on_line(one) for one in steps)


def evaluated_policy(step: Step) -> Manifest:
    """The policy that an evaluation at the step's iteration is of: its update, policy/init at -1."""
    return line(step, _maker(step), step.iteration)


def _maker(step: Step) -> StageName:
    return "policy" if step.iteration < 0 else "update"


def iteration_of(store: RunStore, given: str) -> int:
    """The iteration whose policy a person asks for: a number, latest, or init (-1). Raises InputError."""
    there = store.line_iterations("update")
    if given == "latest" and there:
        return there[-1]
    if given in ("init", "latest") and store.on_line("policy", BEFORE_TRAINING):
        return BEFORE_TRAINING
    if given.isdecimal() and len(given) <= 9 and int(given) in there:
        return int(given)
    known = f"0 to {there[-1]}, " if there else ""
    raise InputError(f"run {store.run} has no policy {given!r} to evaluate: give {known}latest or init")


def evaluate(step: Step, policy: Manifest) -> Outcome:
    """Evaluate a policy, or find it evaluated. Raises InputError where no set is named."""
    return run_stage(step, "evaluation", {"policy": policy}, compute)


def told(step: Step, fault: Exception) -> str:
    """The sentence about an evaluation that failed in training, which goes on.

    Raises the fault itself where it ends the command: outside of training, with --stop-on-eval-failure, and where the
    command lost the run or was ended.
    """
    stops = step.config.evaluation.stop_on_eval_failure or not step.moves_line
    if stops or isinstance(fault, LockLost) or step.workers.aborted:
        raise fault
    where = f"of iteration {step.iteration}" if step.iteration >= 0 else "before training"
    known = isinstance(fault, StageError | InputError | OSError)
    why = str(fault) if known else f"{type(fault).__name__}: {fault}"
    why = why.removesuffix("; run the same command again to resume")
    return f"evaluation {where} failed: {why}; training goes on, and the same command given again tries it again"


def compute(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """Generate and score what no earlier try left, a part per microgroup as it lands."""
    from miles_core.rollout.eval_dispatch import EvaluationDispatch

    evaluated, policy, files = _set_of(step), upstream["policy"], step.store.files
    # What an earlier command left may still write: it is ended before anything is looked at.
    step.workers.connect()
    groups = eval_samples(evaluated.prompts, step.config.evaluation.n_samples_per_eval_prompt)
    args = eval_args(step.config, len(groups))
    total = len(groups) * args.n_samples_per_prompt
    names = set(files.list(attempt.path("data")))
    landed: list[Part] = []

    def land(number: int, part: Part) -> None:
        landed.append(part)
        step.progress("evaluation", sum(p.rows for p in landed), total)
        fault_point("evaluation:landed")

    dispatch = EvaluationDispatch(
        step.workers,
        files,
        evaluated=evaluated,
        name_part=lambda number: attempt.path(f"data/{_free_name(number, names)}"),
        adapter=adapter_of(policy),
        digest=policy.summary["policy_digest"],
        version=policy_version(policy),
        landed=land,
        kept=_kept(step, attempt, groups, args.rollout_microgroup_size),
    )
    dispatch.load_policy()
    token = GENERATOR.set(dispatch)
    try:
        run_rollout(args, step.iteration, CommittedPrompts(groups), groups, evaluation=True)
    except* Exception as failures:
        raise _first(failures) from None
    finally:
        GENERATOR.reset(token)
    parts = list(dispatch.made.values())
    if sum(part.rows for part in parts) != total:
        raise StageError(
            f"the evaluation made {sum(part.rows for part in parts)} of {total} samples; run the same command again to "
            "resume"
        )
    rewards: dict[str, list[float]] = {name: [] for name, _ in evaluated.sets}
    for part in parts:
        for row in read_table(files, part, ["eval_set", "reward"]).to_pylist():
            rewards[row["eval_set"]].append(row["reward"])
    told_of = {"policy_digest": dispatch.digest, "policy_version": dispatch.version}
    return Product(parts, {"sets": {name: _figures(own) for name, own in rewards.items()}, **told_of})


def eval_args(config: RunConfig, prompts: int) -> SimpleNamespace:
    """The run's args as a rollout function of an evaluation sees them: the set's size, its samples and steps, all of
    them ODE steps. A request holds the samples of one prompt."""
    n = config.evaluation.n_samples_per_eval_prompt
    changes = {
        "rollout_batch_size": prompts,
        "over_sampling_batch_size": prompts,
        "n_samples_per_prompt": n,
        "rollout_microgroup_size": min(config.rollout.rollout_microgroup_size, n),
        "diffusion_num_steps": config.eval_num_steps,
        "diffusion_sde_type": "ode",
        "diffusion_noise_level": 0.0,
        "diffusion_num_sde_steps": 0,
        "diffusion_step_strategy_path": None,
    }
    return SimpleNamespace(**vars(own_args(config)) | changes)


def _set_of(step: Step) -> EvalSet:
    if step.inputs.evaluation is None:
        raise InputError("there is nothing to evaluate on: give --eval-prompt-data NAME PATH")
    return step.inputs.evaluation


def _on_line(step: Step) -> bool:
    found = find_stage(step, "evaluation", {"policy": evaluated_policy(step)})
    named = step.store.on_line("evaluation", step.iteration)
    return found is not None and named is not None and named.attempt == found.attempt


def _kept(step: Step, attempt: Attempt, groups: list[list[Sample]], size: int) -> dict[int, Part]:
    """Parts that an earlier try of this attempt left whole, by the number of their first sample."""
    files, kept = step.store.files, {}
    wanted = {g[i].index: [s.index for s in g[i : i + size]] for g in groups for i in range(0, len(g), size)}
    for name in files.list(attempt.path("data")):
        match = _PART.fullmatch(name)
        number = int(match[1]) if match else -1
        if number in wanted and number not in kept:
            part = inspect_table(files, attempt.path(f"data/{name}"))
            if part and read_table(files, part, ["sample_index"])["sample_index"].to_pylist() == wanted[number]:
                kept[number] = part
    return kept


def _free_name(number: int, names: set[str]) -> str:
    count = 1
    while f"{number:08d}-{count}.parquet" in names:
        count += 1
    names.add(f"{number:08d}-{count}.parquet")
    return f"{number:08d}-{count}.parquet"


def _figures(rewards: Sequence[float]) -> dict[str, Any]:
    mean, spread = mean_and_std(rewards)
    return {
        "samples": len(rewards),
        "reward_mean": mean,
        "reward_std": spread,
        "reward_min": min(rewards),
        "reward_max": max(rewards),
    }


def _first(failures: BaseExceptionGroup) -> BaseException:
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
