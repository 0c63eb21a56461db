"""Flow-GRPO's objective on a batch of train pairs: clipped surrogate and KL to the reference, in fp32.

Source: Flow-GRPO (arXiv 2505.05470) and its code, scripts/train_sd3.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_core.algorithms.sde import SdeStepBackend, mean_over_sample, per_row
from miles_core.errors import StageError

_PREPARE_KEYS = ("latents", "timesteps", "conditioning")
_LOSS_KEYS = (
    "latents",
    "next_latents",
    "sigma",
    "sigma_next",
    "sigma_max",
    "old_log_prob",
    "advantage",
    "loss_mask",
)


@dataclass(frozen=True)
class LossContext:
    """What a loss may read beside its batch: the flat configuration and the run's SDE dynamics."""

    args: Any
    sde_backend: SdeStepBackend


@dataclass(frozen=True)
class PreparedBatch:
    """Inputs of the transformer: latents (B, C, h, w), timesteps (B,), conditioning by name, each (B, ...)."""

    latents: Tensor
    timesteps: Tensor
    conditioning: dict[str, Tensor]


@dataclass(frozen=True)
class PolicyTerms:
    """Per pair, each (B,): the clipped surrogate, the importance ratio, and whether it lies outside of the range."""

    loss_per_pair: Tensor
    ratio: Tensor
    clipped: Tensor


def policy_loss(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_range: float, adv_clip_max: float
) -> PolicyTerms:
    """max(-A * ratio, -A * clip(ratio, 1 - clip_range, 1 + clip_range)) per pair; all inputs (B,).

    A is the advantage clamped to +-adv_clip_max, ratio = exp(log_prob - old_log_prob). Gradient flows through
    log_prob alone.
    """
    advantage = advantage.detach().float().clamp(-adv_clip_max, adv_clip_max)
    ratio = torch.exp(log_prob.float() - old_log_prob.detach().float())
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    return PolicyTerms(
        loss_per_pair=torch.maximum(unclipped, clipped),
        ratio=ratio,
        clipped=(ratio.detach() - 1.0).abs() > clip_range,
    )


def kl_term(mean: Tensor, ref_mean: Tensor, kl_std: Tensor) -> Tensor:
    """Mean over all non-batch dims of (mean - ref_mean)^2 / (2 kl_std^2): (B, ...) -> (B,).

    flow_grpo's form: kl_std is StepStatistics.kl_std, for sde the noise scale s without sqrt(-dt). The paper's KL
    between the two Gaussians divides by s^2 (-dt) and so is larger by 1 / (-dt). No gradient to ref_mean.
    """
    squared = (mean.float() - ref_mean.detach().float()) ** 2
    return mean_over_sample(squared / (2 * per_row(kl_std, squared) ** 2))


def prepare_flow_grpo_batch(
    ctx: LossContext, batch: Mapping[str, Any], *, pad_to_len: int | None = None
) -> PreparedBatch:
    """The transformer's inputs of a batch of pairs: the default of --custom-prepare-train-batch-path.

    `pad_to_len` is a number of text tokens; the pairs carry no attention mask, so any other than the
    conditioning's own is refused. Raises StageError for that and for a key that the batch lacks.
    """
    _require(batch, _PREPARE_KEYS, "prepare_flow_grpo_batch")
    conditioning: dict[str, Tensor] = dict(batch["conditioning"])
    lengths = {n: t.shape[1] for n, t in conditioning.items() if n.split(".")[-1] == "encoder_hidden_states"}
    if pad_to_len is not None and any(length != pad_to_len for length in lengths.values()):
        raise StageError(
            f"prepare_flow_grpo_batch was asked for {pad_to_len} text tokens and the conditioning holds {lengths}: "
            "without an attention mask padding would change the model's output"
        )
    return PreparedBatch(latents=batch["latents"], timesteps=batch["timesteps"], conditioning=conditioning)


def flow_grpo_loss_formula(
    ctx: LossContext,
    batch: Mapping[str, Tensor],
    prepared: PreparedBatch,
    *,
    new_pred: Tensor,
    ref_pred: Tensor | None,
    metrics: dict[str, Tensor],
    **kwargs: Any,
) -> Tensor:
    """Sum over pairs of loss_mask * (policy loss + diffusion_kl_beta * KL), a scalar in fp32.

    A sum, so that the caller divides once by the pairs of the whole optimizer step and accumulation and data
    parallelism stay exact. The default of --custom-loss-function-path.

    batch: latents x_t and next_latents x_{t+1} (B, C, h, w); sigma, sigma_next, sigma_max, old_log_prob,
    advantage, loss_mask (B,). new_pred, ref_pred: model outputs (B, C, h, w) of policy and reference, ref_pred
    None where there is no reference. Into `metrics` go detached sums over the pairs with loss_mask > 0:
    policy_loss, kl_loss (before beta), clip_frac, ratio_mean, log_prob_mean_abs_diff, adv_mean (clamped), pairs
    (their count); and ratio_max_abs_dev, the largest |ratio - 1|.

    Raises StageError for a key that the batch lacks, and for a KL factor without a reference.
    """
    _require(batch, _LOSS_KEYS, "flow_grpo_loss_formula")
    args = ctx.args
    schedule = (batch["sigma"], batch["sigma_next"], batch["sigma_max"])
    stats = ctx.sde_backend.statistics(new_pred, batch["latents"], *schedule)
    log_prob = ctx.sde_backend.log_prob(batch["next_latents"], stats)
    terms = policy_loss(
        log_prob, batch["old_log_prob"], batch["advantage"], args.diffusion_clip_range, args.diffusion_adv_clip_max
    )
    per_pair = terms.loss_per_pair
    kl = torch.zeros_like(per_pair)
    if ref_pred is not None:
        ref_stats = ctx.sde_backend.statistics(ref_pred.detach(), batch["latents"], *schedule)
        kl = kl_term(stats.mean, ref_stats.mean, stats.kl_std)
    if args.diffusion_kl_beta > 0:
        if ref_pred is None:
            raise StageError(
                "--diffusion-kl-beta above 0 needs the reference's model output: give --ref-mode lora_base"
            )
        per_pair = per_pair + args.diffusion_kl_beta * kl

    kept = batch["loss_mask"] > 0
    advantage = batch["advantage"].float().clamp(-args.diffusion_adv_clip_max, args.diffusion_adv_clip_max)
    ratio_dev = (terms.ratio - 1.0).abs()
    metrics["policy_loss"] = _sum(terms.loss_per_pair, kept)
    metrics["kl_loss"] = _sum(kl, kept)
    metrics["clip_frac"] = _sum(terms.clipped.float(), kept)
    metrics["ratio_mean"] = _sum(terms.ratio, kept)
    metrics["log_prob_mean_abs_diff"] = _sum((log_prob - batch["old_log_prob"].float()).abs(), kept)
    metrics["adv_mean"] = _sum(advantage, kept)
    metrics["pairs"] = kept.sum().float()
    metrics["ratio_max_abs_dev"] = torch.where(kept, ratio_dev.detach(), 0.0).amax()
    return (batch["loss_mask"].float() * per_pair).sum()


def _sum(values: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept, values.detach(), 0.0).sum()


def _require(batch: Mapping[str, Any], keys: tuple[str, ...], who: str) -> None:
    missing = [key for key in keys if key not in batch]
    if missing:
        raise StageError(f"{who} needs {missing} and the batch holds only {sorted(batch)}")
