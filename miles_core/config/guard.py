"""The guard's options, and what they come to: which check does what, and what has to be kept for going back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast, get_args

from miles_core.config.base import Group, Names, option

if TYPE_CHECKING:
    from miles_core.config.run_config import RunConfig

Action = Literal["off", "warn", "suspend", "rewind"]
LIMITS = {
    "reward-drop": "guard_reward_drop",
    "kl": "guard_kl",
    "grad-norm": "guard_grad_norm",
    "zero-std-share": "guard_zero_std_share",
    "heldout": "guard_heldout_window",
    "grid": "guard_grid",
}
# The policy in force two iterations before the newest: what an iteration's rewards speak against is the one before it.
_CHECKPOINTS = 3


class GuardGroup(Group):
    """What is watched after each iteration, against collapse and reward hacking, and what is done about it."""

    guard: Action = option(
        "warn",
        "what a check that finds something does: off; warn; suspend the run, resumable in the UI (a command ends with exit "
        "code 1); or rewind: train on in a fork from the last healthy iteration, with another rollout_seed",
    )
    guard_actions: Names | None = option(
        None,
        "checks that do something else, as grid=warn,heldout=suspend; of reward-drop, kl, grad-norm, zero-std-share, heldout, "
        "grid",
    )
    guard_reward_drop: float = option(
        1.0,
        "reward-drop: standard deviations within an iteration that the mean reward may lie below the best of three iterations "
        "in a row; with few groups as many as chance makes. 0: off",
        ge=0,
    )
    guard_kl: float = option(0.0, "kl: most KL to the reference (train/kl_loss). 0: off", ge=0)
    guard_grad_norm: float = option(
        10.0,
        "grad-norm: most times the median of up to 20 iterations before; as many as its noise makes where that is more. 0: off",
        ge=0,
    )
    guard_zero_std_share: float = option(
        0.9,
        "zero-std-share: largest share of groups without spread, over the newest 24 groups or more. 0: off",
        ge=0,
        le=1,
    )
    guard_heldout_window: int = option(
        4,
        "heldout: newest evaluations over which an evaluation's reward may not fall while that of training rises, at least 3. "
        "0: off",
        ge=0,
        le=1_000_000,
    )
    guard_grid: float = option(
        2.0,
        "grid: most times that a grid of 8 or 16 pixels may stand out of the images, against the first three iterations. 0: off",
        ge=0,
    )
    guard_from: int = option(
        0, "first iteration that is judged: what was found before was looked at and passed", ge=0, le=1_000_000
    )
    guard_max_rewinds: int = option(
        1, "forks that are made of a run one after the other; then it is suspended", ge=0, le=99
    )


def actions_of(config: RunConfig) -> dict[str, Action]:
    """What each check does; one whose limit is 0 is off."""
    own = dict(word.partition("=")[::2] for word in config.guard.guard_actions or ())
    found = {name: own.get(name, config.guard.guard) for name in LIMITS}
    return {name: cast(Action, action if limits_of(config)[name] else "off") for name, action in found.items()}


def limits_of(config: RunConfig) -> dict[str, float]:
    """Each check's limit; 0 is off."""
    return {name: float(getattr(config.guard, field)) for name, field in LIMITS.items()}


def checkpoints_kept(config: RunConfig) -> int:
    """Full checkpoints that are kept: keep_full_checkpoints, one more where the guard may have to go back; 0 is all."""
    kept, acts = config.run.keep_full_checkpoints, set(actions_of(config).values())
    return max(kept, _CHECKPOINTS) if kept and acts & {"suspend", "rewind"} else kept


def guard(c: RunConfig) -> None:
    """Raises ValueError for an action of no check, and for a check that has nothing to look at."""
    for word in c.guard.guard_actions or ():
        name, _, action = word.partition("=")
        if name not in LIMITS or action not in get_args(Action):
            raise ValueError(
                f"--guard-actions {word!r}: write CHECK=ACTION, a check of {', '.join(LIMITS)} and an action of "
                f"{', '.join(get_args(Action))}"
            )
    if c.guard.guard_kl and c.ref_mode == "none":
        raise ValueError("--guard-kl needs a reference to have a KL to: give --ref-mode lora_base, or leave it out")
    if c.guard.guard_heldout_window in (1, 2):
        raise ValueError(
            f"--guard-heldout-window {c.guard.guard_heldout_window}: a trend takes at least 3 evaluations, or 0 for none"
        )
