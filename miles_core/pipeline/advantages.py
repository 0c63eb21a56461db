"""advantages: normalize rewards, drop groups and samples by the filters."""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import pyarrow as pa

from miles_core.algorithms.advantages import normalize as group_statistics
from miles_core.algorithms.advantages import post_process_rewards, several_rewards
from miles_core.algorithms.filters import Verdict, keep_all_samples
from miles_core.config.folders import own_args
from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.pipeline.stage import Product, Step, Upstreams
from miles_core.pipeline.train_data import own_train_data
from miles_core.pipeline.verdicts import choose, drawn
from miles_core.rewards.several import weights_of
from miles_core.store.parts import read_table, write_table
from miles_core.store.run_store import Attempt
from miles_core.store.schemas import ADVANTAGES
from miles_core.user_code import own_function


def normalize(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """Rewards to advantages, in sample order. Groups that are not trained on stay as rows that are not kept."""
    files, args = step.store.files, step.config.args()
    weights = weights_of(args) if args.rm_normalize else {}
    columns = ["sample_index", "group_index", "reward", *(f"score_{name}" for name in weights)]
    table = pa.concat_tables([read_table(files, part, columns) for part in upstream["rewards"].data])
    rows = table.sort_by("sample_index").to_pylist()
    filter_samples, post_process = (
        _own(step, "rollout_sample_filter_path"),
        _own(step, "custom_reward_post_process_path"),
    )
    looked_at = filter_samples or post_process or step.config.in_waves
    prompts, made = drawn(step, upstream["rewards"]) if looked_at else (None, {})
    unknown: dict[str, Any] = {"prompt": "", "seed": 0}
    every = [
        Sample(
            group_index=r["group_index"],
            index=r["sample_index"],
            reward=r["reward"],
            **made.get(r["sample_index"], unknown),
        )
        for r in rows
    ]
    groups: dict[int, list[Sample]] = {}
    for sample in every:
        groups.setdefault(sample.group_index, []).append(sample)
    verdicts = choose(step, groups, prompts)
    left = [group for index, group in groups.items() if not verdicts[index].keep]
    samples = [sample for sample in every if verdicts[sample.group_index].keep]
    rows = [row for row in rows if verdicts[row["group_index"]].keep]
    (filter_samples or keep_all_samples)(args, [group for index, group in groups.items() if verdicts[index].keep])
    raw, normalized = _normalized(post_process, args, samples) if post_process else post_process_rewards(args, samples)
    of = [s.group_index for s in samples]
    if weights:
        own = several_rewards(args, {name: [r[f"score_{name}"] for r in rows] for name in weights}, of, weights)
        normalized = own.advantage.tolist()
    else:
        own = group_statistics(raw, of, use_std=False, global_mean=False, global_std=False)
    out = [
        {
            "sample_index": sample.index,
            "group_index": sample.group_index,
            "raw_reward": raw[i],
            "advantage": normalized[i],
            "group_mean": float(own.group_mean[i]),
            "group_std": float(own.group_std[i]),
            "zero_std": bool(own.zero_std[i]),
            "kept": True,
            "reason": None,
            "remove_sample": sample.remove_sample,
            "row_digest": "",
        }
        for i, sample in enumerate(samples)
    ]
    pairs = own_train_data(step, attempt, upstream["rewards"], samples, out)
    table = pa.Table.from_pylist([*out, *_left_out(left, verdicts)], schema=ADVANTAGES).sort_by("sample_index")
    part = write_table(files, attempt.path("data/advantages.parquet"), table)
    zero = len({sample.group_index for i, sample in enumerate(samples) if own.zero_std[i]})
    summary = {"groups": len(groups) - len(left), "zero_std_groups": zero, "reward_mean": sum(raw) / len(raw)}
    return Product([part, *pairs], summary | ({"groups_left_out": len(left)} if left else {}))


def _left_out(groups: list[list[Sample]], verdicts: Mapping[int, Verdict]) -> list[dict[str, Any]]:
    """Rows of groups that are not trained on, with their own statistics."""
    samples = [sample for group in groups for sample in group]
    if not samples:
        return []
    rewards, of = [cast(float, s.reward) for s in samples], [s.group_index for s in samples]
    found = group_statistics(rewards, of, use_std=False, global_mean=False, global_std=False)
    return [
        {
            "sample_index": sample.index,
            "group_index": sample.group_index,
            "raw_reward": rewards[i],
            "advantage": 0.0,
            "group_mean": float(found.group_mean[i]),
            "group_std": float(found.group_std[i]),
            "zero_std": bool(found.zero_std[i]),
            "kept": False,
            "reason": verdicts[sample.group_index].reason,
            "remove_sample": True,
            "row_digest": "",
        }
        for i, sample in enumerate(samples)
    ]


def _own(step: Step, option: str) -> Callable[..., Any] | None:
    """The user's function in the place of a hook of this stage, its failures named."""
    return own_function(option, own_args(step.config), f" in iteration {step.iteration}")


def _normalized(post_process: Callable[..., Any], args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """(raw rewards, advantages) of the user's function. Raises StageError for what is not a finite number a sample each."""
    answer = post_process(args, samples)
    try:
        raw, normalized = ([float(value) for value in column] for column in answer)
    except (TypeError, ValueError):
        raise StageError("--custom-reward-post-process-path returned no pair of lists of numbers") from None
    if not len(raw) == len(normalized) == len(samples) or not all(map(math.isfinite, raw + normalized)):
        raise StageError(
            f"--custom-reward-post-process-path returned {len(raw)} and {len(normalized)} values for {len(samples)} samples, "
            "or one that is not finite: return a finite number each"
        )
    return raw, normalized
