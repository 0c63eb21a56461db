"""Train pairs as tensors: what a micro-batch gives to the transformer and to the loss."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from miles_core.data.sample import Sample
from miles_core.errors import StageError

_PAIR = frozenset({"sample", "sample_index", "step", "advantage", "loss_mask", "old_log_prob"})
# What a micro-batch holds of the rollout; and what a part of pairs has of its own.
OF_THE_BATCH = frozenset(
    "latents next_latents timesteps sigma sigma_next sigma_max old_log_prob conditioning row_digest".split()
)
Conditioning = Mapping[str, Mapping[str, torch.Tensor]]


def pair_batch(
    samples: Sequence[Sample],
    pairs: Mapping[str, Sequence[Any]],
    rows: Sequence[int],
    conditioning: Conditioning,
    device: torch.device,
) -> dict[str, Any]:
    """The pairs `rows` of `pairs`, B of them, checked by `check_pairs` before, on `device`. Their column old_log_prob, where
    it is there, comes before the stored ones.

    latents x_t and next_latents x_{t+1} (B, C, h, w) in the stored dtype; timesteps, sigma, sigma_next, sigma_max,
    old_log_prob, advantage, loss_mask (B,) fp32; sample_index (list); conditioning {name: (B, ...)}; further columns of a
    user's pairs (B,) fp32.
    """
    chosen = [(samples[pairs["sample"][row]], int(pairs["step"][row])) for row in rows]

    def numbers(values: Sequence[Any]) -> torch.Tensor:
        return torch.tensor([float(v) for v in values], dtype=torch.float32).to(device)

    texts = [conditioning[cast(str, sample.conditioning_id)] for sample, _ in chosen]
    return {
        "latents": torch.stack([_latents(sample, step) for sample, step in chosen]).to(device),
        "next_latents": torch.stack([_latents(sample, step + 1) for sample, step in chosen]).to(device),
        "timesteps": numbers([sample.timesteps[step] for sample, step in chosen]),
        "sigma": numbers([sample.sigmas[step] for sample, step in chosen]),
        "sigma_next": numbers([sample.sigmas[step + 1] for sample, step in chosen]),
        "sigma_max": numbers([sample.sigmas[1] for sample, _ in chosen]),
        "old_log_prob": numbers(
            [pairs["old_log_prob"][row] for row in rows]
            if "old_log_prob" in pairs
            else [sample.log_probs[step] for sample, step in chosen]
        ),
        "advantage": numbers([pairs["advantage"][row] for row in rows]),
        "loss_mask": numbers([pairs["loss_mask"][row] for row in rows]),
        "sample_index": [sample.index for sample, _ in chosen],
        "conditioning": {name: torch.stack([text[name] for text in texts]).to(device) for name in texts[0]},
        **{name: numbers([values[row] for row in rows]) for name, values in pairs.items() if name not in _PAIR},
    }


def check_pairs(
    samples: Sequence[Sample],
    pairs: Mapping[str, Sequence[Any]],
    micro_batches: Sequence[Sequence[int]],
    conditioning: Conditioning,
) -> None:
    """Raises StageError for a sample without conditioning, a pair whose latents were not stored, and a micro-batch
    that mixes conditioning of different shapes."""
    for sample in samples:
        if sample.conditioning_id not in conditioning:
            raise StageError(f"the rollout holds no conditioning {sample.conditioning_id} for sample {sample.index}")
    for position, step in zip(pairs["sample"], pairs["step"], strict=True):
        sample = samples[position]
        if not {step, step + 1} <= set(sample.latent_steps):
            raise StageError(
                f"sample {sample.index} is to be trained at step {step} and its rollout row holds only the latents "
                f"at {sample.latent_steps}"
            )
    for rows in micro_batches:
        texts = [conditioning[cast(str, samples[pairs["sample"][row]].conditioning_id)] for row in rows]
        if len({tuple((name, text[name].shape) for name in sorted(text)) for text in texts}) > 1:
            raise StageError(
                "a micro-batch mixes conditioning of different shapes, which no attention mask tells apart: "
                "give --micro-batch-size 1"
            )


def unmasked(pairs: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The pairs that enter the loss; the others need no forward."""
    rows = [i for i, mask in enumerate(pairs["loss_mask"]) if mask > 0]
    return {name: [values[i] for i in rows] for name, values in pairs.items()}


def not_finite(samples: Sequence[Sample], pairs: Mapping[str, Sequence[Any]]) -> set[int]:
    """Numbers of the samples with a pair whose stored log-prob or advantage is not finite."""
    bad = set()
    for position, step, advantage in zip(pairs["sample"], pairs["step"], pairs["advantage"], strict=True):
        numbers = torch.tensor([float(samples[position].log_probs[step]), float(advantage)])
        if not torch.isfinite(numbers).all():
            bad.add(samples[position].index)
    return bad


def _latents(sample: Sample, position: int) -> torch.Tensor:
    return cast(torch.Tensor, sample.latents[sample.latent_steps.index(position)])
