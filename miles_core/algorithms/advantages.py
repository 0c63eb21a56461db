"""GRPO advantages from rewards: numpy in float64, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from miles_core.errors import StageError

if TYPE_CHECKING:
    from miles_core.data.sample import Sample

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class AdvantageResult:
    """One row a sample, in the order given, each (N,).

    group_mean and group_std are the group's own also where the advantage used those of the whole batch.
    zero_std: all rewards of the group are exactly equal, so that it teaches nothing about its prompt.
    """

    advantage: Floats
    group_mean: Floats
    group_std: Floats
    zero_std: NDArray[np.bool_]


def normalize(
    rewards: Sequence[float],
    group_indices: Sequence[int],
    *,
    use_std: bool,
    global_mean: bool,
    global_std: bool,
    eps: float = 1e-4,
) -> AdvantageResult:
    """advantage = (reward - mean) / (std + eps), or reward - mean without `use_std`.

    std is the population's (ddof 0) and eps is 1e-4, as in flow_grpo's PerPromptStatTracker. Groups are the rows
    with one group index: their order and sizes are free, and prompts with the same text stay apart. Mean and std
    are the group's, or the whole batch's with `global_mean` and `global_std`. A group with one reward throughout
    (a group of one as well) has exactly advantage 0 under its own mean. A group of one has no std of its own, so
    with a global mean and group-wise std it is centred and not divided. Sums are exactly rounded: the result does
    not depend on the order of the rows.

    Raises StageError for no rewards, lengths that differ, and non-finite rewards (naming their positions).
    """
    reward = np.asarray(rewards, dtype=np.float64)
    groups = np.asarray(group_indices, dtype=np.int64)
    if reward.ndim != 1 or reward.size == 0 or reward.shape != groups.shape:
        raise StageError(
            f"advantages need one reward and one group index a sample: got shapes {reward.shape} and {groups.shape}"
        )
    bad = np.flatnonzero(~np.isfinite(reward))
    if bad.size:
        raise StageError(
            f"non-finite rewards at sample positions {bad[:20].tolist()} ({bad.size} of {reward.size}): "
            "fix the reward function, then run the same command again"
        )
    _, group_of = np.unique(groups, return_inverse=True)
    members = [np.flatnonzero(group_of == g) for g in range(int(group_of.max()) + 1)]
    moments = [_mean_std(reward[rows]) for rows in members]
    group_mean = np.array([m for m, _ in moments])[group_of]
    group_std = np.array([s for _, s in moments])[group_of]
    zero_std = np.array([bool(np.ptp(reward[rows]) == 0) for rows in members])[group_of]

    batch_mean, batch_std = _mean_std(reward)
    advantage = reward - (batch_mean if global_mean else group_mean)
    if use_std:
        alone = np.array([len(rows) == 1 for rows in members])[group_of]
        scale = np.where(alone, 1.0, group_std + eps) if not global_std else np.full_like(reward, batch_std + eps)
        advantage = advantage / scale
    return AdvantageResult(advantage=advantage, group_mean=group_mean, group_std=group_std, zero_std=zero_std)


def post_process_rewards(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """(raw rewards, advantages), both in the order of `samples`: the default of --custom-reward-post-process-path.

    Division by the std is off with --disable-grpo-std-normalization and at one sample a prompt, where every
    advantage is 0 unless --globalize-reward-mean. Raises StageError for a sample without a number as its reward.
    """
    raw = [_scalar_reward(sample) for sample in samples]
    result = normalize(
        raw,
        [sample.group_index for sample in samples],
        use_std=not args.disable_grpo_std_normalization and args.n_samples_per_prompt > 1,
        global_mean=args.globalize_reward_mean,
        global_std=args.globalize_reward_std,
    )
    return raw, result.advantage.tolist()


def several_rewards(
    args: Any, rewards: Mapping[str, Sequence[float]], group_indices: Sequence[int], weights: Mapping[str, float]
) -> AdvantageResult:
    """Each reward normalized by itself as the options say, and the weighted sum of that: no reward's scale outweighs
    another's (--rm-normalize). group_mean and group_std are of the weighted sum of the rewards; zero_std: no reward
    differs within the group."""
    made = {
        name: normalize(
            rewards[name],
            group_indices,
            use_std=not args.disable_grpo_std_normalization and args.n_samples_per_prompt > 1,
            global_mean=args.globalize_reward_mean,
            global_std=args.globalize_reward_std,
        )
        for name in weights
    }
    plain = sum(weights[name] * np.asarray(rewards[name], dtype=np.float64) for name in weights)
    own = normalize(list(np.asarray(plain)), group_indices, use_std=False, global_mean=False, global_std=False)
    return AdvantageResult(
        advantage=np.sum([weights[name] * result.advantage for name, result in made.items()], axis=0),
        group_mean=own.group_mean,
        group_std=own.group_std,
        zero_std=np.all([result.zero_std for result in made.values()], axis=0),
    )


def _mean_std(values: Floats) -> tuple[float, float]:
    if np.ptp(values) == 0:
        return float(values[0]), 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((values - mean) ** 2) / len(values))


def _scalar_reward(sample: Sample) -> float:
    if sample.reward is None or isinstance(sample.reward, dict):
        raise StageError(
            f"sample {sample.index} has {sample.reward!r} as its reward: advantages need one number a sample"
        )
    return float(sample.reward)
