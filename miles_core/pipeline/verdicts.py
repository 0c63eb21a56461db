"""Which scored groups are kept: the group filter's verdicts, and what was recorded of them with the prompts."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from miles_core.algorithms.filters import (
    DynamicFilterOutput,
    Verdict,
    check_reward_nonzero_std,
    first_kept,
    keep_all_groups,
)
from miles_core.config.folders import own_args
from miles_core.config.sampling import NONZERO_STD
from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.pipeline.stage import Step
from miles_core.store.manifest import Manifest
from miles_core.store.parts import read_table
from miles_core.user_code import own_function

GROUPS = "groups/"
SURPLUS = "surplus: in the buffer"
_OPTION = "dynamic_sampling_filter_path"


def decide(step: Step, groups: Iterable[Sequence[Sample]]) -> list[Verdict]:
    """The filter's verdict on each scored group, asked for in group-index order.

    Raises StageError for an answer that is neither DynamicFilterOutput nor bool.
    """
    args, path = own_args(step.config), step.config.sampling.dynamic_sampling_filter_path
    own = own_function(_OPTION, args, f" in iteration {step.iteration}") if _OPTION in step.config.own_code else None
    stock = check_reward_nonzero_std if path == NONZERO_STD else keep_all_groups
    ordered = sorted(groups, key=lambda group: group[0].group_index)
    return [_verdict((own or stock)(args, list(group)), group[0].group_index, path) for group in ordered]


def _verdict(answer: Any, group_index: int, path: str | None) -> Verdict:
    output = answer if isinstance(answer, DynamicFilterOutput) else DynamicFilterOutput(answer)
    keep: Any = output.keep
    # A number of numpy or torch, as `tensor.std() > 0` gives it.
    keep = keep.item() if callable(getattr(keep, "item", None)) else keep
    if not isinstance(keep, bool):
        raise StageError(
            f"--dynamic-sampling-filter-path {path} returned {type(keep).__name__} for group {group_index}: return "
            "DynamicFilterOutput(keep=..., reason=...) or a bool"
        )
    return Verdict(group_index, keep, None if keep else str(output.reason or "dropped"))


def dropped(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many groups were dropped for each reason, the most frequent first."""
    return dict(Counter(str(verdict.reason) for verdict in verdicts if not verdict.keep).most_common())


def dropped_text(verdicts: Iterable[Verdict]) -> str:
    """The same in words."""
    return ", ".join(f"{count} {reason}" for reason, count in dropped(verdicts).items()) or "none"


def choose(step: Step, groups: Mapping[int, Sequence[Sample]], prompts: Manifest | None) -> dict[int, Verdict]:
    """The verdict on each group of an iteration, by group index; kept are the groups that are trained on.

    `prompts` are those that the samples were made of. Raises StageError where fewer than rollout_batch_size groups are kept,
    and for a filter that says something else of the same rewards than when the prompts were drawn.
    """
    if not step.config.in_waves:
        return {index: Verdict(index, True) for index in groups}
    verdicts, wanted = decide(step, groups.values()), step.config.data.rollout_batch_size
    if prompts is not None:
        _check_recorded(step, groups, {verdict.group_index: verdict for verdict in verdicts}, prompts)
    used, surplus = first_kept(verdicts, wanted)
    if len(used) < wanted:
        raise StageError(
            f"of the {len(groups)} groups of iteration {step.iteration} {len(used)} are kept under these rewards, fewer than the "
            f"{wanted} of --rollout-batch-size (dropped: {dropped_text(verdicts)}): no wave is drawn for stored samples, "
            "`miles fork` draws the iteration afresh"
        )
    left = set(surplus)
    return {v.group_index: Verdict(v.group_index, False, SURPLUS) if v.group_index in left else v for v in verdicts}


def _check_recorded(
    step: Step, groups: Mapping[int, Sequence[Sample]], now: Mapping[int, Verdict], prompts: Manifest
) -> None:
    for part in prompts.under(GROUPS):
        for row in read_table(step.store.files, part).to_pylist():
            index = row["group_index"]
            if index not in now or row["rewards"] != [sample.reward for sample in groups[index]]:
                continue
            asked = prompts.affecting_config.get(_OPTION) == step.config.sampling.dynamic_sampling_filter_path
            same_code = prompts.inputs.get(_OPTION) == step.inputs.hooks.get(_OPTION)
            if asked and same_code and now[index].keep != row["passed"]:
                raise StageError(
                    f"--dynamic-sampling-filter-path said {_said(row['passed'])} of group {index} when the prompts of iteration "
                    f"{step.iteration} were drawn and {_said(now[index].keep)} now, of the same rewards: let it depend on its "
                    "samples alone"
                )


def _said(keep: bool) -> str:
    return "keep" if keep else "drop"


def drawn(step: Step, rewards: Manifest) -> tuple[Manifest, dict[int, dict[str, Any]]]:
    """The prompts that scored samples were made of, and prompt, seed and metadata of each sample by its index.

    Raises StageError where they are gone.
    """
    rollout = step.store.product(rewards.upstream["rollout"])
    prompts = rollout and step.store.product(rollout.upstream["prompts"])
    if prompts is None:
        raise StageError(
            f"what {rewards.folder} was made from is gone: a function cannot be given prompts and metadata"
        )
    columns = ["sample_index", "prompt", "seed", "metadata"]
    table = pa.concat_tables([read_table(step.store.files, part, columns) for part in prompts.data])
    rows = {row.pop("sample_index"): row for row in table.to_pylist()}
    return prompts, {index: row | {"metadata": json.loads(row["metadata"])} for index, row in rows.items()}
