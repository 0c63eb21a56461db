"""The hooks of the reference: flag, the function or class that stands in its place here, and its parameters.

Each default is called with the page's arguments at one place, so that a user's function can take its stead.
"""

import importlib
import inspect
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Hook:
    """`default` is a dotted path; `parameters` the names the page gives, in order, `keywords` those given by name, and
    `optional` those given by name to who takes them; `asynchronous` where it says so. `methods`: those of a class that are
    called, with their parameters."""

    flag: str
    default: str
    parameters: tuple[str, ...]
    asynchronous: bool = False
    keywords: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    methods: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def load(self) -> Any:
        """The default itself."""
        module, name = self.default.rsplit(".", 1)
        return getattr(importlib.import_module(module), name)


_CORE = "miles_core"
_ROLLOUT = ("args", "rollout_id", "data_source")

HOOKS: tuple[Hook, ...] = (
    Hook(
        "rollout_function_path",
        f"{_CORE}.rollout.rollout_function.generate_rollout",
        _ROLLOUT,
        optional=("evaluation",),
    ),
    Hook(
        "eval_function_path",
        f"{_CORE}.rollout.rollout_function.generate_rollout",
        _ROLLOUT,
        optional=("evaluation",),
    ),
    Hook(
        "data_source_path",
        f"{_CORE}.data.data_source.RolloutDataSourceWithBuffer",
        ("args",),
        methods=(
            ("get_samples", ("num_samples",)),
            ("add_samples", ("samples",)),
            ("save", ("rollout_id",)),
            ("load", ("rollout_id",)),
        ),
    ),
    Hook(
        "custom_generate_function_path",
        f"{_CORE}.rollout.rollout_function.generate_microgroup",
        ("args", "microgroup", "sampling_params"),
        asynchronous=True,
        optional=("evaluation",),
    ),
    Hook(
        "diffusion_step_strategy_path",
        f"{_CORE}.rollout.step_strategies.sde_window",
        ("args", "sample", "num_steps", "seed"),
    ),
    Hook("custom_rm_path", f"{_CORE}.rewards.rm_hub.batched_async_rm", ("args", "samples"), asynchronous=True),
    Hook("custom_reward_post_process_path", f"{_CORE}.algorithms.advantages.post_process_rewards", ("args", "samples")),
    Hook("dynamic_sampling_filter_path", f"{_CORE}.algorithms.filters.keep_all_groups", ("args", "samples")),
    Hook("buffer_filter_path", f"{_CORE}.data.data_source.pop_first", ("args", "rollout_id", "buffer", "num_samples")),
    Hook("rollout_sample_filter_path", f"{_CORE}.algorithms.filters.keep_all_samples", ("args", "data")),
    Hook(
        "custom_expand_samples_to_train_pairs_path",
        f"{_CORE}.algorithms.train_pairs.expand_samples_to_train_pairs",
        ("args", "samples", "rewards", "raw_rewards"),
    ),
    Hook(
        "custom_convert_samples_to_train_data_path",
        f"{_CORE}.algorithms.train_pairs.convert_samples_to_train_data",
        ("args", "samples"),
    ),
    Hook(
        "custom_prepare_train_batch_path",
        f"{_CORE}.algorithms.flow_grpo.prepare_flow_grpo_batch",
        ("ctx", "batch"),
        keywords=("pad_to_len",),
    ),
    Hook(
        "custom_loss_function_path",
        f"{_CORE}.algorithms.flow_grpo.flow_grpo_loss_formula",
        ("ctx", "batch", "prepared"),
        keywords=("new_pred", "ref_pred", "metrics"),
    ),
    Hook(
        "sde_step_backend_path",
        f"{_CORE}.algorithms.sde.SdeStepBackend",
        (),
        keywords=("noise_level", "log_prob_no_const"),
    ),
    Hook(
        "custom_rollout_log_function_path",
        f"{_CORE}.observe.metrics.log_rollout_data",
        ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
    ),
    Hook(
        "custom_eval_rollout_log_function_path",
        f"{_CORE}.observe.metrics.log_eval_rollout_data",
        ("rollout_id", "args", "data", "extra_metrics"),
    ),
    Hook("train_pipeline_config_path", f"{_CORE}.families.base.TrainPipelineConfig", ()),
    Hook("model_backend_path", f"{_CORE}.families.base.DiffusersModelBackend", ()),
)


def parameters_of(hook: Any) -> tuple[str, ...]:
    """Names of a function's parameters, or of a class's constructor, without self and variable ones."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = inspect.signature(hook).parameters.values()
    return tuple(p.name for p in found if p.kind not in kinds)
