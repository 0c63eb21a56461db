"""Whether engine and trainer agree on the log-probs that the ratio is made of, before anything is trained."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from miles_core.algorithms.flow_grpo import LossContext, prepare_flow_grpo_batch
from miles_core.training.batch import Conditioning, pair_batch
from miles_core.training.probe import Predict
from miles_core.training.step import RankShare, empty_pass

# A difference of this share of the clip range makes the ratio's noise count beside what training moves.
NEAR = 0.5


@dataclass(frozen=True)
class Difference:
    """Of the trainer's log-probs from the engine's, over `pairs` pairs: the sum of absolute differences, the largest."""

    total: float = 0.0
    largest: float = 0.0
    pairs: int = 0

    @property
    def mean(self) -> float:
        return self.total / max(self.pairs, 1)

    def __add__(self, other: "Difference") -> "Difference":
        return Difference(self.total + other.total, max(self.largest, other.largest), self.pairs + other.pairs)


@torch.no_grad()
def recomputed(
    transformer: nn.Module,
    predict: Predict,
    ctx: LossContext,
    share: RankShare,
    conditioning: Conditioning,
    passes: int,
    *,
    guidance_scale: float,
    device: torch.device,
    on_pass: Callable[[int], None],
) -> tuple[RankShare, Difference]:
    """The share with the trainer's own log-probs as the old ones, by forwards of the very micro-batches that are trained
    (--diffusion-recompute-old-log-prob): the first ratio is then exp(0). Every rank makes `passes` forwards.
    """
    log_probs = [0.0] * len(share.pairs["step"])
    found = Difference()
    for number in range(passes):
        on_pass(number)
        if number >= len(share.micro_batches):
            empty_pass(transformer, predict, share.spare, conditioning, guidance_scale, device)
            continue
        rows = share.micro_batches[number]
        batch = pair_batch(share.samples, share.pairs, rows, conditioning, device)
        prepared = prepare_flow_grpo_batch(ctx, batch)
        output = predict(prepared.latents, prepared.timesteps, prepared.conditioning, guidance_scale)
        schedule = (batch["sigma"], batch["sigma_next"], batch["sigma_max"])
        stats = ctx.sde_backend.statistics(output, batch["latents"], *schedule)
        own = ctx.sde_backend.log_prob(batch["next_latents"], stats).float()
        gap = (own - batch["old_log_prob"]).abs().double()
        found += Difference(gap.sum().item(), gap.max().item(), len(rows))
        for row, value in zip(rows, own.tolist(), strict=True):
            log_probs[row] = value
    return replace(share, pairs={**share.pairs, "old_log_prob": log_probs}), found


def over_all_ranks(difference: Difference) -> Difference:
    """The same over all ranks. A collective."""
    sums = torch.tensor([difference.total, float(difference.pairs)], dtype=torch.float64)
    largest = torch.tensor(difference.largest, dtype=torch.float64)
    dist.all_reduce(sums, op=dist.ReduceOp.SUM)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return Difference(sums[0].item(), largest.item(), int(sums[1].item()))


def told(mean: float, clip_range: float, *, recompute: bool) -> str:
    """What to say of a mean absolute difference of log-probs; empty where it is far below the clip range."""
    if mean <= NEAR * clip_range:
        return ""
    said = (
        f"the trainer's log-probs lie {mean:.2g} from the engine's on average, and the ratio is clipped at "
        f"{clip_range:.2g}"
    )
    if recompute:
        return f"{said}: the trainer's own are taken (--diffusion-recompute-old-log-prob)"
    return f"{said}: give --diffusion-recompute-old-log-prob, or both the same precision and batch"


def gate(mean: float, clip_range: float, mode: str) -> str:
    """Why training must not begin: a difference that nears the clip range where `mode` is stop; empty where it may."""
    said = told(mean, clip_range, recompute=False) if mode == "stop" else ""
    return f"{said} (--alignment-gate stop)" if said else ""
