"""Whether engine and trainer agree on the log-probs that the ratio is made of, before anything is trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from miles_core.data.sample import Sample
from miles_core.training.batch import Conditioning, pair_batch
from miles_core.training.objective import Objective
from miles_core.training.probe import Predict
from miles_core.training.step import RankShare, empty_pass
from miles_core.weights.verify import relative_distance


@dataclass(frozen=True)
class Gap:
    """Of the trainer from the engine over `pairs` pairs, sums and largest: |difference| of log-probs, and relative L2
    distance of model outputs, None where the engine's were not kept."""

    pairs: int = 0
    log_prob: float = 0.0
    log_prob_max: float = 0.0
    output: float | None = None
    output_max: float | None = None

    @property
    def mean(self) -> float:
        """Of the log-probs."""
        return self.log_prob / max(self.pairs, 1)

    def __add__(self, other: "Gap") -> "Gap":
        outputs = [one for one in (self.output, other.output) if one is not None]
        largest = [one for one in (self.output_max, other.output_max) if one is not None]
        return Gap(
            self.pairs + other.pairs,
            self.log_prob + other.log_prob,
            max(self.log_prob_max, other.log_prob_max),
            sum(outputs) if outputs else None,
            max(largest) if largest else None,
        )


Gaps = Mapping[int, Gap]


def merged(gaps: Sequence[Gaps]) -> dict[int, Gap]:
    """One gap a denoising step, of all that were measured."""
    steps = sorted({step for one in gaps for step in one})
    return {step: sum((one[step] for one in gaps if step in one), Gap()) for step in steps}


def rows(gaps: Gaps, dtype: str) -> list[dict[str, Any]]:
    """A row a denoising step, for people."""
    return [
        {
            "step": step,
            "dtype": dtype,
            "pairs": gap.pairs,
            "log_prob_mean_abs_diff": gap.mean,
            "log_prob_max_abs_diff": gap.log_prob_max,
            "output_mean_rel_diff": None if gap.output is None else gap.output / gap.pairs,
            "output_max_rel_diff": gap.output_max,
        }
        for step, gap in gaps.items()
    ]


@torch.no_grad()
def compared(
    transformer: nn.Module,
    predict: Predict,
    objective: Objective,
    share: RankShare,
    conditioning: Conditioning,
    passes: int,
    *,
    guidance_scale: float,
    device: torch.device,
    on_pass: Callable[[int], None],
) -> tuple[RankShare, dict[int, Gap]]:
    """The share with the trainer's own log-probs as the old ones, by forwards of the very micro-batches that are trained
    (--diffusion-recompute-old-log-prob): the first ratio is then exp(0). And how far the engine's were off, by denoising
    step. Every rank makes `passes` forwards.
    """
    log_probs = [0.0] * len(share.pairs["step"])
    found: list[dict[int, Gap]] = []
    for number in range(passes):
        on_pass(number)
        if number >= len(share.micro_batches):
            empty_pass(transformer, predict, share.spare, conditioning, guidance_scale, device)
            continue
        chosen = share.micro_batches[number]
        batch = pair_batch(share.samples, share.pairs, chosen, conditioning, device)
        prepared = objective.prepare(objective.ctx, batch)
        outputs = predict(prepared.latents, prepared.timesteps, prepared.conditioning, guidance_scale)
        schedule = (batch["sigma"], batch["sigma_next"], batch["sigma_max"])
        backend = objective.ctx.sde_backend
        stats = backend.statistics(outputs, batch["latents"], *schedule)
        own = backend.log_prob(batch["next_latents"], stats).float()
        distances = (own - batch["old_log_prob"]).abs().double().tolist()
        for row, value, distance, output in zip(chosen, own.tolist(), distances, outputs, strict=True):
            log_probs[row] = value
            sample, step = share.samples[share.pairs["sample"][row]], int(share.pairs["step"][row])
            off = _distance(output, sample, step)
            found.append({step: Gap(1, distance, distance, off, off)})
    return replace(share, pairs={**share.pairs, "old_log_prob": log_probs}), merged(found)


def _distance(output: torch.Tensor, sample: Sample, step: int) -> float | None:
    """Relative L2 distance of the trainer's model output from the engine's; None where that was not kept."""
    if sample.model_outputs is None:
        return None
    return relative_distance(output, sample.model_outputs[(sample.sde_step_indices or []).index(step)])
