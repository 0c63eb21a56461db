"""From scored samples to train pairs (sample, denoising step), and from pairs to micro-batches: indices only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from miles_core.algorithms.advantages import post_process_rewards
from miles_core.errors import InputError, StageError

if TYPE_CHECKING:
    from miles_core.data.sample import Sample


def expand_samples_to_train_pairs(
    args: Any, samples: list[Sample], rewards: Sequence[float], raw_rewards: Sequence[float]
) -> dict[str, list[Any]]:
    """Flow-GRPO's pairs: each sample, in the order given, at each of its SDE steps (None: all of the schedule's).

    Columns of equal length: sample (position in `samples`), sample_index, step (denoising step, from 0), advantage
    (= `rewards` of the sample, normalized), loss_mask (0.0 where the sample was removed, else 1.0). The default of
    --custom-expand-samples-to-train-pairs-path. Raises StageError where a sample has no step, or one outside of
    the schedule, and for lengths that differ.
    """
    if not len(samples) == len(rewards) == len(raw_rewards):
        raise StageError(
            f"train pairs need one reward a sample: {len(samples)} samples, {len(rewards)} normalized and "
            f"{len(raw_rewards)} raw rewards"
        )
    pairs: dict[str, list[Any]] = {"sample": [], "sample_index": [], "step": [], "advantage": [], "loss_mask": []}
    for position, (sample, advantage) in enumerate(zip(samples, rewards, strict=True)):
        for step in _trained_steps(sample, args.diffusion_num_steps):
            pairs["sample"].append(position)
            pairs["sample_index"].append(sample.index)
            pairs["step"].append(step)
            pairs["advantage"].append(float(advantage))
            pairs["loss_mask"].append(0.0 if sample.remove_sample else 1.0)
    return pairs


def convert_samples_to_train_data(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
    """Advantages, then pairs: the default of --custom-convert-samples-to-train-data-path."""
    raw_rewards, rewards = post_process_rewards(args, samples)
    return expand_samples_to_train_pairs(args, samples, rewards, raw_rewards)


def micro_batches(
    pairs: Mapping[str, Sequence[Any]],
    *,
    micro_batch_size: int,
    tile: tuple[int, int] | None,
    order: Literal["sample_major", "timestep_major"],
) -> list[list[int]]:
    """Row numbers of `pairs` (columns sample, step), partitioned: every pair in exactly one micro-batch.

    sample_major visits all steps of a sample before the next sample; timestep_major all samples at a step before
    the next step. Samples keep the order in which they first appear, steps ascend. Without `tile`, consecutive
    `micro_batch_size` pairs; with tile (S, T), the pairs of S consecutive samples at T consecutive of the steps
    that occur, smaller at the edges and where samples were trained at different steps.
    """
    samples = {s: rank for rank, s in enumerate(dict.fromkeys(pairs["sample"]))}
    steps = {t: rank for rank, t in enumerate(sorted(set(pairs["step"])))}
    sample_rank = [samples[s] for s in pairs["sample"]]
    step_rank = [steps[t] for t in pairs["step"]]
    sizes = (micro_batch_size,) if tile is None else tile
    if min(sizes) < 1:
        raise InputError(f"micro-batches of {' x '.join(map(str, sizes))} pairs hold nothing: give sizes of at least 1")

    def place(row: int) -> tuple[int, int]:
        pair = (sample_rank[row], step_rank[row])
        return pair if order == "sample_major" else pair[::-1]

    rows = sorted(range(len(sample_rank)), key=place)
    if tile is None:
        return [rows[i : i + micro_batch_size] for i in range(0, len(rows), micro_batch_size)]
    outer, inner = tile if order == "sample_major" else tile[::-1]
    tiles: dict[tuple[int, int], list[int]] = {}
    for row in rows:
        major, minor = place(row)
        tiles.setdefault((major // outer, minor // inner), []).append(row)
    return [tiles[corner] for corner in sorted(tiles)]


def _trained_steps(sample: Sample, num_steps: int) -> Iterable[int]:
    if sample.sde_step_indices is None:
        return range(num_steps)
    outside = [s for s in sample.sde_step_indices if not 0 <= s < num_steps]
    if outside or not sample.sde_step_indices:
        found = f"has {outside[0]}" if outside else "has no step"
        raise StageError(
            f"sample {sample.index} {found} among its SDE steps, which lie in 0..{num_steps - 1}: fix the step strategy"
        )
    return sample.sde_step_indices
