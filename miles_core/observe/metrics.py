"""The reference's metric names, from what the stages committed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.data.sample import Sample
from miles_core.store.manifest import Manifest
from miles_core.store.schemas import OWN_METRIC

TRAIN = {
    "train/loss": "loss",
    "train/policy_loss": "policy_loss",
    "train/kl_loss": "kl_loss",
    "train/grad_norm": "grad_norm",
    "train/clip_frac": "clip_frac",
    "train/log_prob_mean_abs_diff": "log_prob_mean_abs_diff",
    "train/lr": "lr",
}

ROLLOUT_TIME = "perf/rollout_time"


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (ddof 0) of at least one value."""
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))


def metrics_of(manifest: Manifest) -> dict[str, float]:
    """What a committed stage says under the reference's names, from its summary and times alone; nothing for a stage that
    has no figures of its own."""
    summary, seconds = manifest.summary, seconds_of(manifest)
    # What is generated in waves is generated before the prompts are committed.
    if manifest.stage == "prompts" and "waves" in summary:
        return wave_metrics(summary) | {ROLLOUT_TIME: seconds}
    if manifest.stage == "rollout":
        return {} if summary.get("in_waves") else {ROLLOUT_TIME: seconds}
    if manifest.stage == "rewards":
        means = summary.get("score_means", {})
        return _told("rollout", summary) | score_metrics(means)
    if manifest.stage == "advantages":
        return {"rollout/zero_std_share": summary["zero_std_groups"] / summary["groups"]}
    if manifest.stage == "update":
        return train_metrics(summary, seconds)
    if manifest.stage == "sync":
        return {"perf/update_weights_time": seconds}
    if manifest.stage == "evaluation":
        sets = summary["sets"].items()
        return {k: v for name, own in sets for k, v in _told(f"eval/{name}", own).items()} | {"perf/eval_time": seconds}
    return {}


def seconds_of(manifest: Manifest) -> float:
    """From a stage's start to its commit."""
    return manifest.times["committed_at"] - manifest.times["started_at"]


def score_metrics(means: Mapping[str, float]) -> dict[str, float]:
    """The mean of each scorer by name, where there are several."""
    return {f"rollout/reward/{name}_mean": mean for name, mean in means.items()} if len(means) > 1 else {}


def _told(prefix: str, figures: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a summary; one that an older program wrote has no spread."""
    names = ("mean", "std", "min", "max")
    return {f"{prefix}/reward/raw_{n}": float(figures[f"reward_{n}"]) for n in names if f"reward_{n}" in figures}


def rollout_metrics(rewards: Sequence[float], rollout_time: float) -> dict[str, float]:
    """rollout/reward/raw_mean and its spread (ddof 0), perf/rollout_time in seconds."""
    return _reward_metrics("rollout", rewards) | {ROLLOUT_TIME: rollout_time}


def eval_metrics(rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """eval/<set>/reward/raw_mean of each set, and its spread (ddof 0)."""
    return {
        name: value for each, own in rewards.items() for name, value in _reward_metrics(f"eval/{each}", own).items()
    }


def _reward_metrics(prefix: str, rewards: Sequence[float]) -> dict[str, float]:
    mean, spread = mean_and_std(rewards)
    return {
        f"{prefix}/reward/raw_mean": mean,
        f"{prefix}/reward/raw_std": spread,
        f"{prefix}/reward/raw_min": min(rewards),
        f"{prefix}/reward/raw_max": max(rewards),
    }


def wave_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """rollout/dynamic_sampling/* of prompts that were drawn in waves: waves, groups drawn, kept and surplus, groups in the
    buffer, and groups dropped by reason."""
    named = {
        "waves": "waves",
        "drawn": "prompts",
        "kept": "groups_kept",
        "surplus": "groups_surplus",
        "buffer": "buffer",
    }
    found = {name: float(summary[key]) for name, key in named.items() if key in summary}
    found |= {f"drop_{reason}": float(count) for reason, count in summary["groups_dropped"].items()}
    return {f"rollout/dynamic_sampling/{name}": value for name, value in found.items()}


def train_metrics(summary: Mapping[str, Any], train_time: float) -> dict[str, float]:
    """train/* means over the iteration's optimizer steps, those that the loss formula reported, perf/train_time in seconds."""
    found = {name: float(summary[key]) for name, key in TRAIN.items() if key in summary}
    own = {
        f"train/{key.removeprefix(OWN_METRIC)}": float(summary[key]) for key in summary if key.startswith(OWN_METRIC)
    }
    return found | own | {"perf/train_time": train_time}


def metrics_line(metrics: Mapping[str, float]) -> str:
    """name=value pairs, four significant digits."""
    return "  ".join(f"{name}={value:.4g}" for name, value in metrics.items())


def log_rollout_data(
    rollout_id: int,
    args: Any,
    samples: Sequence[Sample],
    rollout_extra_metrics: Mapping[str, float] | None,
    rollout_time: float,
) -> bool:
    """Print an iteration's rollout metrics. Default of --custom-rollout-log-function-path; False lets more follow."""
    rewards = [float(s.reward) for s in samples if isinstance(s.reward, int | float)]
    metrics = rollout_metrics(rewards, rollout_time) | dict(rollout_extra_metrics or {})
    print(f"  {metrics_line(metrics)}", flush=True)
    return False


def log_eval_rollout_data(
    rollout_id: int, args: Any, data: Mapping[str, Mapping[str, Any]], extra_metrics: Mapping[str, float] | None
) -> bool:
    """Print evaluation metrics, one line. Default of --custom-eval-rollout-log-function-path. data: by set, `rewards` and
    `samples`."""
    metrics = eval_metrics({name: own["rewards"] for name, own in data.items()})
    print(f"  {metrics_line(metrics | dict(extra_metrics or {}))}", flush=True)
    return False
