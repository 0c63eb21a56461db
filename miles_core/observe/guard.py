"""Whether a run still learns what is meant: rules over the figures of its iterations, against collapse and reward hacking.

Each rule looks at a history, oldest first and without gaps of interest, and judges its newest iteration. A limit is the
option's, or what chance alone may do with so few groups where that is more.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from miles_core.observe.health import Health

FEWEST = 3
_WINDOW = 3
# In standard errors: chance goes beyond it once in 30,000 looks.
_CHANCE = 4.0
_NORMS = 20
# Standard deviations of the logarithm from iteration to iteration, of tiny:sd3 at 64 x 64 pixels. That of norms stands in for
# as many iterations as the prior says; what is left is no normal distribution, hence more errors.
_NORM_NOISE, _NORM_PRIOR, _NORM_CHANCE = 0.7, 6, 5.0
_GRID_NOISE = 0.2
_GROUPS = 24
_TREND = 3.0
_MATTERS = 0.1

History = Sequence[Health]


@dataclass(frozen=True)
class Finding:
    """What a check found at an iteration. `healthy`: the newest update whose policy it has nothing against, -1 for the
    policy that the run started from. `told`: one sentence, with what to do."""

    check: str
    iteration: int
    value: float
    limit: float
    healthy: int
    told: str


@dataclass(frozen=True)
class _Found:
    value: float
    limit: float
    told: str
    healthy: int | None = None


def judge(history: History, limits: Mapping[str, float]) -> list[Finding]:
    """The findings at the newest iteration, compared with those of its setting alone. limits: by check, those of CHECKS; 0 is
    off, as one that is not there."""
    history = [h for h in history if h.setting == history[-1].setting]
    return [
        Finding(
            name, history[-1].iteration, found.value, found.limit, _healthy(name, history, limit, found), found.told
        )
        for name, check in CHECKS.items()
        if history and (limit := limits.get(name, 0)) and (found := check.rule(history, limit))
    ]


def _healthy(name: str, history: History, limit: float, found: _Found) -> int:
    """An iteration's images, rewards and KL are of the policy before its update, its gradients of the update."""
    check, count = CHECKS[name], len(history) - 1
    while count and check.rule(history[:count], limit):
        count -= 1
    newest = history[count - 1].iteration - check.behind if count else history[0].iteration - 1
    return newest if found.healthy is None else min(newest, found.healthy)


def reward_drop(history: History, deviations: float) -> _Found | None:
    """The mean reward of the newest iteration, or of the newest two or three, lies more than `deviations` standard
    deviations within an iteration below the best mean of up to three iterations in a row before."""
    for newest in range(1, min(_WINDOW, len(history) - FEWEST + 1) + 1):
        if found := _dropped(history[:-newest], history[-newest:], deviations):
            return found
    return None


def _dropped(before: History, newest: History, deviations: float) -> _Found | None:
    first, best = _best(before)
    then, now = _known(before[first : first + _WINDOW]), _known(newest)
    if not then or len(now) < len(newest):
        return None
    usual = statistics.median(std for std, _ in _known(before))
    spread = max(usual, *(math.sqrt(statistics.fmean(std * std for std, _ in some)) for some in (then, now)))
    # Prompts differ: at worst all of the spread lies between groups, and a mean is one over as many numbers as groups.
    chance = _CHANCE * math.sqrt(sum(1 / sum(groups for _, groups in some) for some in (then, now)))
    mean, limit = statistics.fmean(h.reward_mean for h in newest), max(deviations, chance)
    if not spread or (drop := (best - mean) / spread) <= limit:
        return None
    return _Found(
        drop,
        limit,
        f"mean reward {mean:.4g}{_span(newest)} lies {drop:.1f} standard deviations below the {best:.4g}"
        f"{_span(before[first : first + _WINDOW])} (limit {limit:.1f}): look at the images, and go back with a lower --lr or a "
        "higher --diffusion-kl-beta",
        healthy=max(-1, newest[0].iteration - 2),
    )


def _best(before: History) -> tuple[int, float]:
    """Where the up to three iterations in a row with the highest mean reward begin, and that mean."""
    rewards = np.array([h.reward_mean for h in before])
    size = min(_WINDOW, len(rewards))
    means = np.convolve(rewards, np.full(size, 1 / size), "valid")
    first = int(means.argmax())
    return first, float(means[first])


def _known(some: History) -> list[tuple[float, int]]:
    """(standard deviation, groups) of those that have both."""
    return [(h.reward_std, h.groups) for h in some if h.reward_std is not None and h.groups]


def _span(some: History) -> str:
    return f" of iterations {some[0].iteration} to {some[-1].iteration}" if len(some) > 1 else ""


def kl(history: History, bound: float) -> _Found | None:
    """The KL to the reference is above `bound`."""
    value = history[-1].kl
    if value is None or value <= bound:
        return None
    return _Found(
        value,
        bound,
        f"KL to the reference {value:.4g} is above {bound:.4g}: the policy is far from the model it started from; go back "
        "with a higher --diffusion-kl-beta or a lower --lr",
    )


def grad_norm(history: History, factor: float) -> _Found | None:
    """The gradient norm is above `factor` times the median of up to 20 iterations before, or not finite."""
    value = history[-1].grad_norm
    if value is None:
        return None
    if not math.isfinite(value):
        return _Found(value, factor, f"gradient norm is {value}: go back with a lower --lr")
    norms = [h.grad_norm for h in history[:-1] if h.grad_norm and math.isfinite(h.grad_norm)][-_NORMS:]
    if len(norms) < FEWEST - 1:
        return None
    usual, logs = statistics.median(norms), np.log(norms)
    squares = float(((logs - logs.mean()) ** 2).sum()) + _NORM_PRIOR * _NORM_NOISE**2
    noise = math.sqrt(squares / (len(norms) - 1 + _NORM_PRIOR) * (1 + 1 / len(norms)))
    limit = max(factor, math.exp(_NORM_CHANCE * noise))
    if value <= limit * usual:
        return None
    return _Found(
        value / usual,
        limit,
        f"gradient norm {value:.3g} is {value / usual:.1f} times the usual {usual:.3g} (limit {limit:.3g}): look at the rewards "
        "and the ratio of this iteration, and go back with a lower --lr or --clip-grad",
    )


def zero_std_share(history: History, bound: float) -> _Found | None:
    """More than the share `bound` of the groups has no spread, over the newest iterations that hold 24 groups."""
    newest, groups = list[Health](), 0
    for h in reversed(history):
        newest.append(h)
        groups += h.groups
        if groups >= _GROUPS and len(newest) > 1:
            break
    share = sum(h.zero_std for h in newest) / groups if groups else 0.0
    if len(history) < FEWEST or groups < _GROUPS or share <= bound:
        return None
    return _Found(
        share,
        bound,
        f"{share:.0%} of the newest {groups} groups have no spread (limit {bound:.0%}): nothing is learned from them; look at "
        "the images: alike is collapse, all of the best reward is done, else give other prompts or more samples a prompt",
    )


def heldout(history: History, window: float) -> _Found | None:
    """An evaluation's reward falls over the newest `window` evaluations while the reward of training rises: both slopes
    by least squares, further from 0 than three standard errors, and by a tenth of a standard deviation at least."""
    for name in history[-1].held_out:
        evaluated = [h for h in history if name in h.held_out][-max(FEWEST, int(window)) :]
        if len(evaluated) < max(FEWEST, int(window)):
            continue
        trained = [
            h for h in history if h.iteration >= evaluated[0].iteration and h.reward_std is not None and h.groups
        ]
        outs = [h.held_out[name] for h in evaluated]
        fall = _trend([h.iteration for h in evaluated], [(o.mean, o.std, o.samples) for o in outs])
        rise = _trend([h.iteration for h in trained], [(h.reward_mean, h.reward_std or 0.0, h.groups) for h in trained])
        if fall > -1 or rise < 1:
            continue
        best = max(evaluated, key=lambda h: h.held_out[name].mean)
        return _Found(
            outs[-1].mean - best.held_out[name].mean,
            0.0,
            f"the reward of evaluation {name} falls, {best.held_out[name].mean:.4g} at iteration {best.iteration} to "
            f"{outs[-1].mean:.4g}, while that of training rises: the reward is gamed; look at the images, and go back with "
            "another reward beside this one (--rm-types) or a higher --diffusion-kl-beta",
            healthy=best.iteration,
        )
    return None


def _trend(at: Sequence[int], values: Sequence[tuple[float, float, int]]) -> float:
    """A slope in units of what counts as one, by sign: above 1 a rise, below -1 a fall. values: (mean, std, numbers)."""
    if len(at) < 2:
        return 0.0
    x = np.array(at, float) - np.mean(at)
    means, stds, counts = (np.array(column, float) for column in zip(*values, strict=True))
    weights = x / (x @ x)
    slope, error = float(weights @ means), float(np.sqrt(weights**2 @ (stds**2 / counts)))
    least = max(_TREND * error, _MATTERS * float(np.sqrt(np.mean(stds**2))) / (at[-1] - at[0]))
    return slope / least if least else math.copysign(math.inf, slope) if slope else 0.0


def grid(history: History, factor: float) -> _Found | None:
    """A grid of 8 or 16 pixels stands out of the newest three iterations' images `factor` times as much as out of the first
    three's."""
    for period in history[-1].grid:
        known = [h for h in history if h.grid.get(period)]
        if len(known) < FEWEST:
            continue
        newest = min(_WINDOW, len(known) // 2)
        first = min(_WINDOW, len(known) - newest)
        then, now = (
            statistics.fmean(math.log(h.grid[period]) for h in some) for some in (known[:first], known[-newest:])
        )
        limit = max(factor, math.exp(_CHANCE * _GRID_NOISE * math.sqrt(1 / first + 1 / newest)))
        if (times := math.exp(now - then)) > limit:
            return _Found(
                times,
                limit,
                f"a grid of {period} pixels stands out of the images {times:.1f} times as much as at iteration "
                f"{known[0].iteration} (limit {limit:.3g}): look at the images, and go back with a higher --diffusion-kl-beta "
                "or a reward that sees it",
                healthy=max(-1, known[-newest].iteration - 2),
            )
    return None


@dataclass(frozen=True)
class Check:
    """A rule, and how many updates before the iteration that is judged the one lies that it judges."""

    rule: Callable[[History, float], _Found | None]
    behind: int


CHECKS = {
    "reward-drop": Check(reward_drop, 1),
    "kl": Check(kl, 1),
    "grad-norm": Check(grad_norm, 0),
    "zero-std-share": Check(zero_std_share, 1),
    "heldout": Check(heldout, 0),
    "grid": Check(grid, 1),
}
