"""Which prompts an iteration trains on: the data source, its buffer, and groups that are dropped once they are scored."""

from typing import Annotated, Any

from pydantic import BeforeValidator

from miles_core.config.base import Group, Text, option

NONZERO_STD = "check_reward_nonzero_std"
_HUBS = (
    "",
    "miles.rollout.filter_hub.dynamic_sampling_filters",
    "miles.rollout.filter_hub.dynamic_sampling_filters.py",
    "miles_core.algorithms.filters",
)
_SOURCES = tuple(
    f"{module}.RolloutDataSourceWithBuffer" for module in ("miles.rollout.data_source", "miles_core.data.data_source")
)
_POPS = tuple(f"{module}.pop_first" for module in ("miles.rollout.data_source", "miles_core.data.data_source"))


def _filter_name(value: Any) -> Any:
    """The stock filter by its own name, however it is spelled; any other value as it is."""
    hub, _, name = str(value or "").replace("/", ".").rpartition(".")
    return NONZERO_STD if name == NONZERO_STD and hub in _HUBS else value


def _source(value: Any) -> Any:
    return None if value in _SOURCES else value


def _pop(value: Any) -> Any:
    return None if value in _POPS else value


class SamplingGroup(Group):
    """The data source, and dynamic sampling: prompts are drawn in waves until enough groups are kept.

    Without a filter and over-sampling an iteration draws rollout_batch_size prompts at once, before anything is generated.
    """

    data_source_path: Annotated[Text | None, BeforeValidator(_source)] = option(
        None,
        "dotted path of an own class (args) with get_samples, add_samples, save and load, in the place of prompt_data and its "
        "buffer. Enters by its source and what that imports from the code path",
        affects=("prompts",),
        code=True,
    )
    buffer_filter_path: Annotated[Text | None, BeforeValidator(_pop)] = option(
        None,
        "dotted path of an own (args, rollout_id, buffer, num_samples) -> groups taken out of the data source's buffer; "
        "unset: the first ones. Enters by its source and what that imports from the code path",
        affects=("prompts",),
        code=True,
    )
    over_sampling_batch_size: int | None = option(
        None, "prompts a wave, at least rollout_batch_size; unset: as many", affects=("prompts",), ge=1, le=1_000_000
    )
    dynamic_sampling_filter_path: Annotated[Text | None, BeforeValidator(_filter_name)] = option(
        None,
        "which scored groups are kept: check_reward_nonzero_std, or the dotted path of an own (args, samples) -> "
        "DynamicFilterOutput or bool. Waves of prompts are drawn until rollout_batch_size groups are kept",
        affects=("prompts", "advantages"),
    )
    dynamic_sampling_max_waves: int = option(
        8, "waves of an iteration after which it fails, to be carried on with a larger number", ge=1, le=100_000
    )
