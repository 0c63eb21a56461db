"""Gradients of one optimizer step: forward and backward over this rank's micro-batches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from miles_core.data.sample import Sample
from miles_core.training.batch import Conditioning, pair_batch
from miles_core.training.metrics import StepMetrics
from miles_core.training.model import lora_disabled
from miles_core.training.objective import Objective
from miles_core.training.probe import Predict


@dataclass(frozen=True)
class RankShare:
    """One rank's part of an optimizer step: its samples, their unmasked pairs, the pairs' micro-batches, and a
    sample of the step whose shapes an empty pass takes."""

    samples: list[Sample]
    pairs: Mapping[str, Sequence[Any]]
    micro_batches: list[list[int]]
    spare: Sample


@dataclass(frozen=True)
class Accumulation:
    """How micro-batches add up: `passes` forwards on every rank, whose losses are summed and then scaled."""

    passes: int
    scale: float


def accumulate(
    transformer: nn.Module,
    predict: Predict,
    objective: Objective,
    share: RankShare,
    conditioning: Conditioning,
    accumulation: Accumulation,
    *,
    guidance_scale: float,
    with_reference: bool,
    device: torch.device,
    before_pass: Callable[[int], None],
    on_pass: Callable[[int], None],
) -> tuple[StepMetrics, set[int]]:
    """Add the gradient of `scale` x (sum of the pairs' losses) to the parameters.

    Every rank makes the same number of forwards, as FSDP's collectives need it: one that has fewer micro-batches
    makes the rest on zeros, with no gradient from them. Gradients are reduced in the last pass alone. Returns the
    metrics' sums and the numbers of samples whose model output, target, log-prob or loss is not finite.
    """
    metrics = StepMetrics(device, own=objective.own)
    finite: list[torch.Tensor] = []
    healthy: list[torch.Tensor] = []
    indices: list[list[int]] = []
    sharded = cast(FSDPModule, transformer)
    for number in range(accumulation.passes):
        before_pass(number)
        sharded.set_requires_gradient_sync(number == accumulation.passes - 1)
        if number >= len(share.micro_batches):
            if with_reference:
                with torch.no_grad(), lora_disabled(transformer):
                    empty_pass(transformer, predict, share.spare, conditioning, guidance_scale, device)
            empty_pass(transformer, predict, share.spare, conditioning, guidance_scale, device).backward()
            on_pass(number)
            continue
        batch = pair_batch(share.samples, share.pairs, share.micro_batches[number], conditioning, device)
        prepared = objective.prepare(objective.ctx, batch)
        inputs = (prepared.latents, prepared.timesteps, prepared.conditioning, guidance_scale)
        ref_pred = _reference(transformer, predict, inputs) if with_reference else None
        new_pred = predict(*inputs)
        reported: dict[str, Any] = {}
        loss = objective.formula(objective.ctx, batch, prepared, new_pred=new_pred, ref_pred=ref_pred, metrics=reported)
        (loss * accumulation.scale).backward()
        finite.append(metrics.add(loss, reported))
        healthy.append(_finite(new_pred) & _finite(batch["next_latents"]))
        indices.append(batch["sample_index"])
        on_pass(number)
    return metrics, _culprits(finite, healthy, indices)


def _reference(transformer: nn.Module, predict: Predict, inputs: tuple[Any, ...]) -> torch.Tensor:
    with torch.no_grad(), lora_disabled(transformer):
        return predict(*inputs)


def empty_pass(
    transformer: nn.Module,
    predict: Predict,
    spare: Sample,
    conditioning: Conditioning,
    guidance_scale: float,
    device: torch.device,
) -> torch.Tensor:
    """A forward on zeros, for a rank that has no micro-batch left where the others have one; 0 times its sum."""
    latents = torch.zeros_like(spare.latents[:1]).to(device)
    timesteps = spare.timesteps[:1].to(device)
    like = conditioning[cast(str, spare.conditioning_id)]
    zeros = {name: torch.zeros_like(tensor)[None].to(device) for name, tensor in like.items()}
    return (predict(latents, timesteps, zeros, guidance_scale) * 0).sum()


def _finite(values: torch.Tensor) -> torch.Tensor:
    """(B, ...) -> (B,) bool: whether a row holds nothing but finite numbers."""
    return torch.isfinite(values.detach()).flatten(1).all(dim=1)


def _culprits(finite: list[torch.Tensor], healthy: list[torch.Tensor], indices: list[list[int]]) -> set[int]:
    """Samples with a model output or target that is not finite, and all of a micro-batch whose loss or metrics are
    not finite without one."""
    bad: set[int] = set()
    for fine, rows, samples in zip(finite, healthy, indices, strict=True):
        named = {sample for sample, row in zip(samples, rows.tolist(), strict=True) if not row}
        bad |= named
        if not named and not fine:
            bad |= set(samples)
    return bad
