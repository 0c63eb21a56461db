"""The optimizer step itself, and the refusal to make one on numbers that are not finite."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from miles_core.config.groups import OptimizerGroup
from miles_core.errors import StageError


def make_adamw(parameters: Mapping[str, nn.Parameter], config: OptimizerGroup) -> torch.optim.AdamW:
    """AdamW over the parameters, in the mapping's order."""
    return torch.optim.AdamW(
        list(parameters.values()),
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )


def clip_and_step(optimizer: torch.optim.AdamW, lr: float | None, clip_grad: float, samples: set[int]) -> float:
    """Clip the global gradient norm to `clip_grad` (0: off) and step, or only drop the gradient where `lr` is None.

    Returns the norm before clipping. A collective.

    Raises StageError before the step, with the step's `samples`, where the norm is not finite.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if not torch.isfinite(norm):
        optimizer.zero_grad()
        refuse(samples, "the gradient norm of the step")
    if clip_grad > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, clip_grad, norm)
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad()
    return float(norm.item())


def refuse(samples: set[int], what: str) -> None:
    """Raises StageError that names the samples, where there are any."""
    if samples:
        raise StageError(f"{what} is not finite; no optimizer step was taken: samples {sorted(samples)}")
