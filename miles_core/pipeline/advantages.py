"""advantages: normalize rewards, drop groups and samples by the filters."""

import math
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from miles_core.algorithms.advantages import normalize as group_statistics
from miles_core.algorithms.advantages import post_process_rewards
from miles_core.algorithms.filters import keep_all_groups, keep_all_samples
from miles_core.config import flag
from miles_core.config.folders import code_path
from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.pipeline.stage import Product, Step, Upstreams
from miles_core.store.manifest import Manifest
from miles_core.store.parts import read_table, write_table
from miles_core.store.run_store import Attempt
from miles_core.store.schemas import ADVANTAGES
from miles_core.user_code import load_hook


def normalize(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """Rewards to advantages, in sample order."""
    files, args = step.store.files, step.config.args()
    columns = ["sample_index", "group_index", "reward"]
    table = pa.concat_tables([read_table(files, part, columns) for part in upstream["rewards"].data])
    rows = table.sort_by("sample_index").to_pylist()
    filter_samples, post_process = (
        _own(step, "rollout_sample_filter_path"),
        _own(step, "custom_reward_post_process_path"),
    )
    made = _made(step, upstream["rewards"]) if filter_samples or post_process else {}
    samples = [
        Sample(
            group_index=r["group_index"],
            index=r["sample_index"],
            prompt=made.get(r["sample_index"], ("", 0))[0],
            seed=made.get(r["sample_index"], ("", 0))[1],
            reward=r["reward"],
        )
        for r in rows
    ]
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    decisions = {index: keep_all_groups(args, group) for index, group in groups.items()}
    (filter_samples or keep_all_samples)(args, list(groups.values()))
    raw, normalized = _normalized(post_process, args, samples) if post_process else post_process_rewards(args, samples)
    own = group_statistics(raw, [s.group_index for s in samples], use_std=False, global_mean=False, global_std=False)
    out = [
        {
            "sample_index": sample.index,
            "group_index": sample.group_index,
            "raw_reward": raw[i],
            "advantage": normalized[i],
            "group_mean": float(own.group_mean[i]),
            "group_std": float(own.group_std[i]),
            "zero_std": bool(own.zero_std[i]),
            "kept": decisions[sample.group_index].keep,
            "reason": decisions[sample.group_index].reason,
            "remove_sample": sample.remove_sample or not decisions[sample.group_index].keep,
            "row_digest": "",
        }
        for i, sample in enumerate(samples)
    ]
    part = write_table(files, attempt.path("data/advantages.parquet"), pa.Table.from_pylist(out, schema=ADVANTAGES))
    zero = len({sample.group_index for i, sample in enumerate(samples) if own.zero_std[i]})
    return Product([part], {"groups": len(groups), "zero_std_groups": zero, "reward_mean": sum(raw) / len(raw)})


def _made(step: Step, rewards: Manifest) -> dict[int, tuple[str, int]]:
    """Prompt and seed by sample, for functions that look at more than rewards."""
    rollout = step.store.product(rewards.upstream["rollout"])
    if rollout is None:
        raise StageError(
            f"the rollout that {rewards.folder} scored is gone: an own function cannot be given its prompts"
        )
    columns = ["sample_index", "prompt", "seed"]
    table = pa.concat_tables([read_table(step.store.files, part, columns) for part in rollout.data])
    return {row["sample_index"]: (row["prompt"], row["seed"]) for row in table.to_pylist()}


def _own(step: Step, option: str) -> Callable[..., Any] | None:
    """The user's function in the place of a hook of this stage, its failures named."""
    path = step.config.flat()[option]
    if path is None:
        return None
    function = load_hook(option, path, code_path(step.config))

    def named(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as fault:
            raise StageError(
                f"{flag(option)} {path} failed in iteration {step.iteration}: {type(fault).__name__}: {fault}; mend it and "
                "run the same command again"
            ) from fault

    return named


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
