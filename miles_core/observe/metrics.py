"""The reference's metric names, from what the stages committed."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from miles_core.data.sample import Sample

TRAIN = {
    "train/loss": "loss",
    "train/policy_loss": "policy_loss",
    "train/kl_loss": "kl_loss",
    "train/grad_norm": "grad_norm",
    "train/clip_frac": "clip_frac",
    "train/log_prob_mean_abs_diff": "log_prob_mean_abs_diff",
    "train/lr": "lr",
}


def rollout_metrics(rewards: Sequence[float], rollout_time: float) -> dict[str, float]:
    """rollout/reward/raw_mean and its spread (ddof 0), perf/rollout_time in seconds."""
    return _reward_metrics("rollout", rewards) | {"perf/rollout_time": rollout_time}


def eval_metrics(rewards: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """eval/<set>/reward/raw_mean of each set, and its spread (ddof 0)."""
    return {
        name: value for each, own in rewards.items() for name, value in _reward_metrics(f"eval/{each}", own).items()
    }


def _reward_metrics(prefix: str, rewards: Sequence[float]) -> dict[str, float]:
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)
    return {
        f"{prefix}/reward/raw_mean": mean,
        f"{prefix}/reward/raw_std": math.sqrt(variance),
        f"{prefix}/reward/raw_min": min(rewards),
        f"{prefix}/reward/raw_max": max(rewards),
    }


def train_metrics(summary: Mapping[str, Any], train_time: float) -> dict[str, float]:
    """train/* means over the iteration's optimizer steps, perf/train_time in seconds."""
    return {name: float(summary[key]) for name, key in TRAIN.items()} | {"perf/train_time": train_time}


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
    rollout_id: int, args: Any, data: Mapping[str, Any], extra_metrics: Mapping[str, float] | None
) -> bool:
    """Print evaluation metrics, one line. Default of --custom-eval-rollout-log-function-path. data: rewards by set."""
    print(f"  {metrics_line(eval_metrics(data) | dict(extra_metrics or {}))}", flush=True)
    return False
