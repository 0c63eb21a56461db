"""What an update computes on its train pairs: Flow-GRPO's functions, or the user's own in their places."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch

from miles_core.algorithms.flow_grpo import (
    LossContext,
    PreparedBatch,
    flow_grpo_loss_formula,
    prepare_flow_grpo_batch,
)
from miles_core.algorithms.sde import SdeStepBackend, sde_step_backend
from miles_core.algorithms.train_pairs import expand_samples_to_train_pairs
from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.training.batch import OF_THE_BATCH
from miles_core.user_code import own_function

_PREPARE, _LOSS = "custom_prepare_train_batch_path", "custom_loss_function_path"
_EXPAND, _BACKEND = "custom_expand_samples_to_train_pairs_path", "sde_step_backend_path"


@dataclass(frozen=True)
class Objective:
    """`own`: the loss formula is the user's, and may report metrics of any name."""

    ctx: LossContext
    prepare: Callable[..., PreparedBatch]
    formula: Callable[..., torch.Tensor]
    own: bool


def objective_of(args: SimpleNamespace) -> Objective:
    """The functions that `args` names; its code_path is where the user's are found."""
    own_prepare, own_formula = own_function(_PREPARE, args), own_function(_LOSS, args)
    return Objective(
        LossContext(args=args, sde_backend=_backend(args)),
        _checked_prepare(own_prepare) if own_prepare else prepare_flow_grpo_batch,
        _checked_formula(own_formula) if own_formula else flow_grpo_loss_formula,
        own_formula is not None,
    )


def pairs_of(
    args: SimpleNamespace, samples: list[Sample], rewards: Sequence[float], raw_rewards: Sequence[float]
) -> dict[str, list[Any]]:
    """Train pairs of these samples by the function that `args` names. Raises StageError for what are no pairs."""
    own = own_function(_EXPAND, args)
    if own is None:
        return expand_samples_to_train_pairs(args, samples, rewards, raw_rewards)
    return checked_pairs(
        own(args, samples, list(rewards), list(raw_rewards)), samples, f"--{_EXPAND}".replace("_", "-")
    )


def checked_pairs(made: Any, samples: Sequence[Sample], who: str) -> dict[str, list[Any]]:
    """A user's train pairs as columns of equal length: sample (position) or sample_index, step, advantage, loss_mask (1 where
    it is left out), and any further numbers, which reach the loss as tensors of those names. Raises StageError."""
    if not isinstance(made, Mapping):
        raise StageError(
            f"{who} returned a {type(made).__name__}: return a dict of columns, step and advantage among them"
        )
    try:
        pairs: dict[str, list[Any]] = {str(name): list(values) for name, values in made.items()}
    except TypeError:
        raise StageError(f"{who} returned a column that is no list: return a list of numbers a column") from None
    positions = {sample.index: position for position, sample in enumerate(samples)}
    if "sample" in pairs:
        pairs["sample"] = [int(position) for position in pairs["sample"]]
        outside = [position for position in pairs["sample"] if not 0 <= position < len(samples)]
    elif "sample_index" in pairs:
        outside = [index for index in pairs["sample_index"] if index not in positions]
        pairs["sample"] = [positions.get(index, 0) for index in pairs["sample_index"]]
    else:
        raise StageError(f"{who} returned {sorted(pairs)}: name each pair's sample (its position) or sample_index")
    if outside:
        raise StageError(f"{who} returned a pair of sample {outside[0]}, which it was not given")
    if absent := {"step", "advantage"} - pairs.keys():
        raise StageError(f"{who} returned {sorted(pairs)}: the column {min(absent)} is missing")
    if taken := sorted(pairs.keys() & OF_THE_BATCH):
        raise StageError(f"{who} returned a column {taken[0]}, which the batch has of its own: name it otherwise")
    pairs["sample_index"] = [samples[position].index for position in pairs["sample"]]
    pairs.setdefault("loss_mask", [1.0] * len(pairs["sample"]))
    if len(lengths := {name: len(values) for name, values in pairs.items()}) and len(set(lengths.values())) != 1:
        raise StageError(f"{who} returned columns of different lengths: {lengths}")
    for name, values in pairs.items():
        pairs[name] = [
            _number(value, name, index, who) for value, index in zip(values, pairs["sample_index"], strict=True)
        ]
    return pairs


def _number(value: Any, column: str, sample: int, who: str) -> float | int:
    try:
        return int(value) if column in ("sample", "sample_index", "step") else float(value)
    except (TypeError, ValueError):
        raise StageError(f"{who} returned {value!r} in {column} of sample {sample}: return a number") from None


def _backend(args: SimpleNamespace) -> SdeStepBackend:
    own = own_function(_BACKEND, args)
    if own is None:
        return sde_step_backend(args)
    backend = own(noise_level=args.diffusion_noise_level, log_prob_no_const=args.diffusion_log_prob_no_const)
    absent = [name for name in ("statistics", "log_prob") if not callable(getattr(backend, name, None))]
    if absent:
        raise StageError(
            f"--sde-step-backend-path {args.sde_step_backend_path} has no {absent[0]}: derive it from SdeStepBackend"
        )
    return cast(SdeStepBackend, backend)


def _checked_prepare(own: Callable[..., Any]) -> Callable[..., PreparedBatch]:
    def prepare(ctx: LossContext, batch: Mapping[str, Any], **options: Any) -> PreparedBatch:
        made = own(ctx, batch, **options)
        absent = [name for name in ("latents", "timesteps", "conditioning") if not hasattr(made, name)]
        if absent:
            raise StageError(
                f"--custom-prepare-train-batch-path returned a {type(made).__name__} without {absent[0]}: return a PreparedBatch"
            )
        return cast(PreparedBatch, made)

    return prepare


def _checked_formula(own: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def formula(*arguments: Any, **options: Any) -> torch.Tensor:
        loss = own(*arguments, **options)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise StageError(
                "--custom-loss-function-path returned no loss to train on: return a tensor of one number, the sum over the "
                "batch's pairs, that depends on new_pred"
            )
        return loss.reshape(())

    return formula
