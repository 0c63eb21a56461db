"""update: the optimizer steps of an iteration, from the previous policy, over the stored rollout."""

from typing import Any

from miles_core.pipeline.policy import adapter_of
from miles_core.pipeline.replay import with_checkpoint, with_latents
from miles_core.pipeline.rollout import PROBE
from miles_core.pipeline.stage import Product, Step, Upstreams
from miles_core.pipeline.train_data import TRAIN_DATA
from miles_core.store.manifest import Manifest
from miles_core.store.parts import Part, read_table
from miles_core.store.run_store import Attempt
from miles_core.store.schemas import OWN_METRIC, UPDATE
from miles_core.training.agreement import told


def train(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """Optimizer steps, then the checkpoint, the adapter and the trainer's side of the probe.

    Raises PrunedError where the rollout's latents were pruned. A policy whose checkpoint was pruned is replayed.
    """
    held = {
        "rollout": with_latents(step, upstream["rollout"]),
        "advantages": upstream["advantages"],
        "policy": with_checkpoint(step, upstream["policy"], optimize),
    }
    return optimize(step, attempt, held)


def optimize(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """The update of products that hold latents and checkpoint."""
    from miles_core.training.messages import UpdateInputs

    rollout, policy = upstream["rollout"], upstream["policy"]
    adapter_of(policy)
    inputs = UpdateInputs(
        iteration=step.iteration,
        rollout=list(rollout.data),
        latents=list(rollout.latents),
        conditioning=list(rollout.under("conditioning/")),
        advantages=list(upstream["advantages"].data),
        train_data=list(upstream["advantages"].under(TRAIN_DATA)),
        policy_parts=list(policy.under("checkpoint/") + policy.under("adapter/")),
        policy_digest=policy.summary["policy_digest"],
        probe=rollout.under(PROBE)[0],
        first_global_step=_steps_before(step, policy),
    )

    def watch(done: int, total: int) -> None:
        if total:
            step.progress("update", done, total)

    results = step.workers.train("update", step.store.files, inputs, attempt.folder, watch=watch)
    made = results[0]
    parts: list[Part] = [*made.parts, made.rows]
    told = {"policy_digest": made.policy_digest, "log_prob_mismatch": made.log_prob_mismatch}
    _warn(step, made.log_prob_mismatch)
    for row in made.alignment:
        print(f"  {_aligned(row)}", flush=True)
    return Product(parts, told | _figures(made.metrics))


def _warn(step: Step, mismatch: float) -> None:
    algorithm = step.config.algorithm
    said = told(mismatch, algorithm.diffusion_clip_range, recompute=algorithm.diffusion_recompute_old_log_prob)
    if said and algorithm.alignment_gate == "warn":
        print(f"  warning: {said}", flush=True)


def _aligned(row: dict[str, Any]) -> str:
    said = (
        f"alignment at step {row['step']} ({row['dtype']}, {row['pairs']} pairs): log-prob off "
        f"{row['log_prob_mean_abs_diff']:.2g}, at most {row['log_prob_max_abs_diff']:.2g}"
    )
    if row["output_mean_rel_diff"] is None:
        return f"{said}; the rollout holds no model outputs"
    return f"{said}; model output off {row['output_mean_rel_diff']:.2g}, at most {row['output_max_rel_diff']:.2g}"


def _steps_before(step: Step, policy: Manifest) -> int:
    """Optimizer steps of the whole run before this iteration. Counted, because a fork may take others from there on."""
    if policy.stage != "update":
        return 0
    steps = [read_table(step.store.files, part, ["global_step"]) for part in policy.data]
    return 1 + max(number for table in steps for number in table.column("global_step").to_pylist())


def _figures(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Means over the iteration's optimizer steps, for people; a user's own metrics as metric_<name>."""
    names = ("loss", "policy_loss", "kl_loss", "grad_norm", "clip_frac", "log_prob_mean_abs_diff", "lr")
    own = sorted({name for step in steps for name in step} - {*UPDATE.names})
    means = {name: _mean([s.get(name) for s in steps]) for name in (*names, *own)}
    told = {(f"{OWN_METRIC}{n}" if n in own else n): mean for n, mean in means.items() if mean is not None}
    return told | {"steps": len(steps)}


def _mean(values: list[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None
