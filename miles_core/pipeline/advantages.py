"""advantages: normalize rewards, drop groups and samples by the filters."""

import pyarrow as pa

from miles_core.algorithms.advantages import normalize as group_statistics
from miles_core.algorithms.advantages import post_process_rewards
from miles_core.algorithms.filters import keep_all_groups, keep_all_samples
from miles_core.data.sample import Sample
from miles_core.pipeline.stage import Product, Step, Upstreams
from miles_core.store.parts import read_table, write_table
from miles_core.store.run_store import Attempt
from miles_core.store.schemas import ADVANTAGES


def normalize(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """Rewards to advantages, in sample order."""
    files, args = step.store.files, step.config.args()
    columns = ["sample_index", "group_index", "reward"]
    table = pa.concat_tables([read_table(files, part, columns) for part in upstream["rewards"].data])
    rows = table.sort_by("sample_index").to_pylist()
    samples = [
        Sample(group_index=r["group_index"], index=r["sample_index"], prompt="", seed=0, reward=r["reward"])
        for r in rows
    ]
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_index, []).append(sample)
    decisions = {index: keep_all_groups(args, group) for index, group in groups.items()}
    keep_all_samples(args, list(groups.values()))
    raw, normalized = post_process_rewards(args, samples)
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
