"""What the guard makes of a configuration; see consumers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from consumers import Place

from miles_core.config import RunConfig
from miles_core.observe.guard import Finding
from miles_core.observe.health import Health, HeldOut
from miles_core.pipeline.guard import action_of, findings_of

NEWEST = 7


def _ill(iteration: int) -> Health:
    """Well up to iteration 5, then all that can be wrong at once; the training reward rises before."""
    ill, spread = iteration > 5, 0.1
    held = {"held-out": HeldOut(0.5 - 0.05 * iteration, spread, 256)}
    mean = 0.2 if iteration == NEWEST else 0.3 + 0.05 * iteration
    return Health(
        iteration,
        mean,
        spread,
        64,
        64 if ill else 0,
        0.5 if ill else 0.01,
        1000.0 if iteration == NEWEST else 1.0,
        held,
        {8: 9.0 if ill else 2.0},
    )


def _gamed(iteration: int) -> Health:
    return Health(
        iteration, 0.3 + 0.05 * iteration, 0.1, 64, held_out={"held-out": HeldOut(0.5 - 0.05 * iteration, 0.1, 256)}
    )


def _findings(c: RunConfig, made: Callable[[int], Health]) -> list[Finding]:
    history = SimpleNamespace(healths=lambda first, last: [made(i) for i in range(first, last + 1)])
    return findings_of(cast(Any, history), c, [NEWEST])[NEWEST]


def finds(check: str) -> Callable[[RunConfig, Place], bool]:
    """Whether the check finds something in a run that is ill, or gamed."""
    made = _gamed if check == "heldout" else _ill
    return lambda c, place: check in {finding.check for finding in _findings(c, made)}


def action(c: RunConfig, place: Place) -> str:
    return action_of(c, _findings(c, _ill))
