"""What the guard knows of an iteration: the figures that its stages committed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_core.observe.pictures import open_frames
from miles_core.observe.rows import read_part, spread_order
from miles_core.observe.spectrum import grid_energy
from miles_core.store.files import Files
from miles_core.store.manifest import Manifest

# Enough for a steady spectrum, few enough to cost no second: 0.2 s of processor time for images of 512².
IMAGES, _PARTS = 16, 4
GRID = "grid_energy"


@dataclass(frozen=True)
class HeldOut:
    """An evaluation set's rewards: mean, standard deviation over samples (ddof 0), number of samples."""

    mean: float
    std: float
    samples: int


@dataclass(frozen=True)
class Health:
    """An iteration's figures; None where its stages did not report them (made by an older version, no reference).

    reward_std: over the samples, ddof 0. zero_std: groups without spread, of `groups`. kl: to the reference, before the
    factor beta; grad_norm: before clipping; both means over the optimizer steps. held_out: by evaluation set, of the
    policy that this iteration's update made. grid: energy by period in pixels (`spectrum.grid_energy`). setting: another
    number from the iteration on from which a fork has another reward or makes its images otherwise.
    """

    iteration: int
    reward_mean: float
    reward_std: float | None = None
    groups: int = 0
    zero_std: int = 0
    kl: float | None = None
    grad_norm: float | None = None
    held_out: Mapping[str, HeldOut] = field(default_factory=dict)
    grid: Mapping[int, float] = field(default_factory=dict)
    setting: int = 0


def health_of(
    rewards: Manifest, advantages: Manifest, update: Manifest, evaluation: Manifest | None, setting: int = 0
) -> Health:
    """The figures of an iteration, from the summaries of its stages."""
    r, a, u = rewards.summary, advantages.summary, update.summary
    sets = evaluation.summary.get("sets", {}) if evaluation else {}
    return Health(
        rewards.iteration,
        r["reward_mean"],
        r.get("reward_std"),
        a.get("groups", 0),
        a.get("zero_std_groups", 0),
        u.get("kl_loss"),
        u.get("grad_norm"),
        {n: HeldOut(s["reward_mean"], s["reward_std"], s["samples"]) for n, s in sets.items() if "reward_std" in s},
        {int(period): energy for period, energy in r.get(GRID, {}).items()},
        setting,
    )


def comparable(one: Manifest, other: Manifest) -> bool:
    """Whether two rollouts, or two rewards, were made with the same options and inputs, as far as both know them; another
    seed is no other way to make them."""
    pairs = ((one.affecting_config, other.affecting_config), (one.inputs, other.inputs))
    return all(a[n] == b[n] for a, b in pairs for n in a.keys() & b.keys() if n != "rollout_seed")


def grid_of(files: Files, rollout: Manifest) -> dict[str, Any]:
    """Grid energy by period of a rollout's images, as its rewards' summary holds it: of up to IMAGES images of the first
    one's size, from a few parts spread over the prompts; nothing where none can be read. Raises DamagedError."""
    parts = [rollout.data[i] for i in sorted(spread_order(len(rollout.data))[:_PARTS])]
    each = math.ceil(IMAGES / len(parts)) if parts else 0
    images = []
    for part in parts:
        rows = list(read_part(files, rollout.iteration, part, {}))
        pictures = (open_frames(row.frames[:1]) for row in rows[:each])
        images += [np.asarray(picture) for picture in pictures if picture]
    found = grid_energy([image for image in images[:IMAGES] if image.shape == images[0].shape])
    return {GRID: {str(period): energy for period, energy in found.items()}} if found else {}
