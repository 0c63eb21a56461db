"""Made-up histories of runs that learn, with the noise that few groups, small evaluation sets and other prompts each time
make; and what goes wrong in them."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from miles_core.observe.health import Health, HeldOut

EVERY = 4
Random = np.random.Generator


def healthy(seed: int, iterations: int = 50) -> list[Health]:
    """A run that learns or has learned: rewards as numbers or as right and wrong, 4 to 48 groups of 4 to 24."""
    random = np.random.default_rng(seed)
    groups, samples = int(random.choice([4, 8, 16, 32, 48])), int(random.choice([4, 8, 16, 24]))
    rewards = random.choice([_numbers, _right_or_wrong])(random, iterations, groups, samples)
    norms = random.lognormal(np.linspace(0, random.normal(0, 0.5), iterations), random.uniform(0.1, 1.0))
    grids = {
        p: random.lognormal(np.linspace(0.6, random.normal(0.6, 0.1), iterations), random.uniform(0.02, 0.2))
        for p in (8, 16)
    }
    prompts = int(random.choice([16, 64, 256]))
    found = []
    for i, own in enumerate(rewards):
        evaluated = {}
        if i % EVERY == EVERY - 1:
            # The set and its seeds are the same each time: what is left of chance is less than for fresh samples.
            noise = 0.7 * own.std() / np.sqrt(prompts)
            evaluated = {"held-out": HeldOut(_level(rewards, i) + random.normal(0, noise), float(own.std()), prompts)}
        zero = int((own.std(axis=1) == 0).sum())
        grid = {p: float(energy[i]) for p, energy in grids.items()}
        figures = (float(own.mean()), float(own.std()), groups, zero, float(random.lognormal(-6, 0.3)), float(norms[i]))
        found.append(Health(i, *figures, evaluated, grid))
    return found


def _numbers(random: Random, iterations: int, groups: int, samples: int) -> np.ndarray:
    """(iterations, groups, samples): anything from all to none of the spread lies between groups."""
    between = random.uniform(0, 1)
    rise = random.uniform(0, 4) * (1 - np.exp(-np.arange(iterations) / random.uniform(5, 60)))
    of_groups = np.sqrt(between) * random.standard_normal((iterations, groups, 1))
    own = np.sqrt(1 - between) * random.standard_normal((iterations, groups, samples))
    return (rise[:, None, None] + of_groups + own) * 10.0 ** random.integers(-4, 3)


def _right_or_wrong(random: Random, iterations: int, groups: int, samples: int) -> np.ndarray:
    """(iterations, groups, samples) of 0 and 1: each prompt has a chance of its own, which grows."""
    start, end = sorted(random.uniform(0.05, 0.85, 2))
    mean = start + (end - start) * (1 - np.exp(-np.arange(iterations) / random.uniform(5, 60)))
    firm = random.uniform(1, 10)
    chances = random.beta(firm * mean[:, None] * np.ones(groups), firm * (1 - mean[:, None]) * np.ones(groups))
    return (random.random((iterations, groups, samples)) < chances[:, :, None]).astype(float)


def _level(rewards: np.ndarray, iteration: int) -> float:
    """What the policy is worth, without this iteration's luck."""
    return float(rewards[max(0, iteration - 5) : iteration + 6].mean())


def after(history: list[Health], start: int, change: Callable[[Health, int], Health]) -> list[Health]:
    """The history with iterations from `start` on changed; the function is told how many have passed."""
    return [h if h.iteration < start else change(h, h.iteration - start) for h in history]


def collapsed(h: Health, passed: int) -> Health:
    """The reward falls to what it was worth at the worst, within three iterations."""
    return replace(h, reward_mean=h.reward_mean - 3 * (h.reward_std or 0) * min(1, (passed + 1) / 3))
