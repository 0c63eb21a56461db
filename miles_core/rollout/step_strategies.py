"""Which denoising steps of a sample are SDE steps and so are trained on.

A stock strategy depends on `seed` alone, never on the sample. The caller takes it from step_seed once an iteration, so
that all samples of an iteration share their steps; steps that differ within an iteration make training diverge.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from miles_core.config.checks import OWN, strategy_name
from miles_core.errors import InputError
from miles_core.user_code import own_function

if TYPE_CHECKING:
    from miles_core.data.sample import Sample

Strategy = Callable[[Any, "Sample", int, int], tuple[list[int] | None, list[int] | None]]
"""(args, sample, num_steps, seed) -> (sde_step_indices, None for all; return_step_indices, None today)."""


def every_step(args: Any, sample: Sample, num_steps: int, seed: int) -> tuple[None, None]:
    """All steps of the schedule: --diffusion-num-sde-steps 0."""
    return None, None


def sde_window(args: Any, sample: Sample, num_steps: int, seed: int) -> tuple[list[int], None]:
    """A random window of diffusion_num_sde_steps consecutive steps.

    It lies in diffusion_sde_window_range (first, end), end exclusive, by default the whole schedule; each place is
    as likely. Raises InputError where it does not fit.
    """
    first, end = args.diffusion_sde_window_range or (0, num_steps)
    count = args.diffusion_num_sde_steps
    if not 0 <= first < end <= num_steps or not 1 <= count <= end - first:
        raise InputError(
            f"--diffusion-num-sde-steps {count} in the window range {first},{end} of {num_steps} steps does not fit: "
            "lower it or widen the range"
        )
    # random() is the one draw whose sequence Python promises to keep across versions.
    start = first + int(random.Random(seed).random() * (end - first - count + 1))
    return list(range(start, start + count)), None


def epoch_global_random_choice(args: Any, sample: Sample, num_steps: int, seed: int) -> tuple[list[int], None]:
    """A random subset of diffusion_num_sde_steps of diffusion_sde_candidate_steps, ascending.

    Candidates are by default the whole schedule; each subset is as likely. Raises InputError where there are too
    few, or one lies outside of the schedule.
    """
    candidates = sorted(set(args.diffusion_sde_candidate_steps or range(num_steps)))
    count = args.diffusion_num_sde_steps
    if not 1 <= count <= len(candidates) or candidates[0] < 0 or candidates[-1] >= num_steps:
        raise InputError(
            f"--diffusion-num-sde-steps {count} of the candidate steps {candidates} cannot be drawn from "
            f"{num_steps} steps: lower it or change --diffusion-sde-candidate-steps"
        )
    draw = random.Random(seed)
    ranked = sorted((draw.random(), step) for step in candidates)
    return sorted(step for _, step in ranked[:count]), None


def step_seed(rollout_seed: int, iteration: int) -> int:
    """Seed of the steps of one iteration, 0 <= seed < 2^63: a hash, so that neighbours are unrelated."""
    digest = hashlib.sha256(f"sde steps {rollout_seed} {iteration}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def select_strategy(args: Any) -> Strategy:
    """The strategy of --diffusion-step-strategy-path: a stock one by its short name, sde_window where it is unset, or the
    user's own, found in args.code_path.

    --diffusion-num-sde-steps 0 means every step to the stock ones. Raises InputError for a name that is none of both.
    """
    name = strategy_name(args.diffusion_step_strategy_path)
    if name == OWN:
        return cast(Strategy, own_function("diffusion_step_strategy_path", args))
    if args.diffusion_num_sde_steps == 0:
        return every_step
    if name == "sde_window":
        return sde_window
    if name == "epoch_global_random_choice":
        return epoch_global_random_choice
    raise InputError(
        f"--diffusion-step-strategy-path {args.diffusion_step_strategy_path}: choose sde_window or "
        "epoch_global_random_choice"
    )
