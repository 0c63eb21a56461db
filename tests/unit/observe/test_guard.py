"""What the guard finds: collapse and hacking soon, and nothing in runs that are well."""

import math
import statistics
from dataclasses import replace
from functools import cache

import pytest
from histories import after, collapsed, healthy

from miles_core.observe.guard import CHECKS, Finding, judge
from miles_core.observe.health import Health, HeldOut

# The defaults of the options; a KL bound has none.
LIMITS = {"reward-drop": 1.0, "kl": 0.1, "grad-norm": 10.0, "zero-std-share": 0.9, "heldout": 4, "grid": 2.0}
RUNS = 1000


def first_finding(history: list[Health], check: str, start: int = 0) -> Finding | None:
    """Of a check, at an iteration from `start` on."""
    ends = range(start + 1, len(history) + 1)
    found = (f for end in ends for f in judge(history[:end], {check: LIMITS[check]}))
    return next(found, None)


def plain(count: int, **figures: float) -> list[Health]:
    """Iterations without noise."""
    return [replace(Health(i, 0.5, 0.1, 8, 0, 0.01, 1.0, {}, {8: 1.8, 16: 1.9}), **figures) for i in range(count)]


@cache
def healthy_runs() -> list[list[Health]]:
    return [healthy(seed) for seed in range(RUNS)]


def test_of_a_thousand_noisy_and_healthy_runs_at_most_one_in_a_hundred_is_found_fault_with() -> None:
    """50 iterations each, so that it is one alarm in 5000 looks or fewer."""
    alarmed = [
        seed
        for seed, history in enumerate(healthy_runs())
        if any(judge(history[:end], LIMITS) for end in range(1, len(history) + 1))
    ]
    assert len(alarmed) <= RUNS / 100, alarmed


def test_a_collapse_of_the_reward_is_found_within_five_iterations() -> None:
    """Sudden collapse near the top (pitfall 27): by three standard deviations, in 95 of 100 runs whatever their noise."""
    late = []
    for history in healthy_runs()[:200]:
        found = first_finding(after(history, 30, collapsed), "reward-drop", 30)
        late.append(math.inf if found is None else found.iteration - 30)
    assert statistics.quantiles(late, n=20)[-1] <= 5
    assert statistics.median(late) <= 3


def test_a_collapse_from_the_third_iteration_on_is_found_at_once() -> None:
    """(pitfall 27)"""
    history = plain(3)
    history[2] = replace(history[2], reward_mean=0.1)
    (found,) = judge(history, {"reward-drop": 1.0})
    assert (found.check, found.iteration) == ("reward-drop", 2)
    assert found.value == pytest.approx(4.0) and "0.1 lies 4.0 standard deviations below the 0.5" in found.told
    # Iteration 1 was still good: its policy is that of update 0, and update 1 made the one that failed.
    assert found.healthy == 0
    assert judge(history[:2], {"reward-drop": 1.0}) == []


def test_a_slow_fall_is_found_by_the_newest_three_together() -> None:
    """With 4 groups chance alone makes more than a standard deviation of one iteration."""
    history = [replace(h, groups=4, reward_mean=0.5 - 0.17 * (h.iteration >= 10)) for h in plain(14)]
    found = first_finding(history, "reward-drop")
    assert found and found.iteration == 12 and "of iterations 10 to 12" in found.told
    assert found.healthy == 8


def test_a_run_that_stays_low_is_healthy_where_it_was_before_the_fall() -> None:
    history = [replace(h, reward_mean=0.5 - 0.4 * (h.iteration >= 6)) for h in plain(12)]
    (found,) = judge(history, {"reward-drop": 1.0})
    assert (found.iteration, found.healthy) == (11, 4)


def test_rewards_of_another_scorer_are_not_compared() -> None:
    """A fork has those of its parent before it."""
    other = [replace(h, reward_mean=0.5 - 9 * (h.iteration >= 5), setting=int(h.iteration >= 5)) for h in plain(9)]
    assert first_finding(other, "reward-drop") is None
    other[8] = replace(other[8], reward_mean=-12)
    found = first_finding(other, "reward-drop")
    assert found and (found.iteration, found.healthy) == (8, 6)


def test_a_rising_reward_and_one_without_spread_are_no_drop() -> None:
    rising = [replace(h, reward_mean=0.1 * h.iteration) for h in plain(10)]
    constant = [replace(h, reward_mean=1.0, reward_std=0.0) for h in plain(10)]
    unknown = [replace(h, reward_mean=-h.iteration, reward_std=None) for h in plain(10)]
    assert [first_finding(history, "reward-drop") for history in (rising, constant, unknown)] == [None] * 3


def test_kl_above_its_bound_is_found_and_without_a_reference_nothing() -> None:
    """(pitfall 27)"""
    history = [replace(h, kl=0.03 * h.iteration) for h in plain(6)]
    found = first_finding(history, "kl")
    assert found and (found.iteration, found.value, found.healthy) == (4, pytest.approx(0.12), 2)
    assert first_finding([replace(h, kl=None) for h in history], "kl") is None
    assert first_finding(plain(1, kl=0.2), "kl") is not None


def test_a_gradient_far_above_the_usual_or_not_finite_is_found() -> None:
    """(pitfall 27)"""
    for value, expected in ((11.0, 25), (math.inf, 25), (math.nan, 25), (9.0, None)):
        history = after(plain(28), 25, lambda h, passed, v=value: replace(h, grad_norm=h.grad_norm if passed else v))
        found = first_finding(history, "grad-norm")
        assert (found.iteration if found else None) == expected, value
        assert found is None or found.healthy == 24
    # After few iterations nobody knows how much it moves from one to the next; after an adapter's first it grows.
    for value, expected in ((11.0, None), (110.0, 3)):
        history = after(plain(5), 3, lambda h, passed, v=value: replace(h, grad_norm=v))
        found = first_finding(history, "grad-norm")
        assert (found.iteration if found else None) == expected, value
    # Iterations without a gradient (all rewards alike) are no measure.
    started = [replace(h, grad_norm=0.0 if h.iteration < 4 else 3.0) for h in plain(8)]
    assert first_finding(started, "grad-norm") is None
    assert first_finding(plain(1, grad_norm=math.nan), "grad-norm") is not None


def test_groups_without_spread_are_found_once_they_are_many() -> None:
    """(pitfall 27)"""
    history = [replace(h, zero_std=8 if h.iteration >= 4 else 1) for h in plain(12)]
    found = first_finding(history, "zero-std-share")
    assert found and (found.iteration, found.value) == (6, 1.0)
    assert first_finding([replace(h, zero_std=7) for h in plain(12)], "zero-std-share") is None
    # All groups of two iterations may be alike by chance where there are few.
    assert first_finding([replace(h, groups=4, zero_std=4) for h in plain(5)], "zero-std-share") is None


def gamed(set_falls: float, training_rises: float, count: int = 24) -> list[Health]:
    """From iteration 8 on; an evaluation of 64 samples every fourth iteration, means by standard deviation."""
    history = []
    for h in plain(count):
        passed = max(0, h.iteration - 7)
        held = {"held-out": HeldOut(0.5 - 0.1 * set_falls * passed, 0.1, 64)} if h.iteration % 4 == 3 else {}
        history.append(replace(h, reward_mean=0.5 + 0.1 * training_rises * passed, held_out=held))
    return history


def test_a_held_out_reward_that_falls_while_training_rises_is_found() -> None:
    """(pitfall 27)"""
    found = first_finding(gamed(0.1, 0.2), "heldout")
    # Evaluations 3, 7, 11 and 15: the first two are as good as each other.
    assert found and found.iteration == 15 and found.healthy in (3, 7)
    assert "evaluation held-out falls" in found.told
    for falls, rises in ((0.1, -0.2), (-0.1, 0.2), (0.1, 0.0), (0.001, 0.2)):
        assert first_finding(gamed(falls, rises), "heldout") is None, (falls, rises)


def test_held_out_is_found_in_noise() -> None:
    """A standard deviation lost over the window while training gains one and a half, in nine of ten runs of noise."""
    missed = 0
    for history in healthy_runs()[:100]:
        std = history[0].reward_std or 1.0

        def change(h: Health, passed: int, std: float = std) -> Health:
            held = {name: replace(o, mean=o.mean - 0.08 * std * passed, samples=256) for name, o in h.held_out.items()}
            return replace(h, reward_mean=h.reward_mean + 0.12 * std * passed, held_out=held)

        missed += first_finding(after(history, 20, change), "heldout", 20) is None
    assert missed <= 10


def test_a_grid_that_grows_is_found_by_the_mean_of_iterations() -> None:
    """Grid artefacts on the images while the reward rises (pitfall 28)."""
    history = after(plain(10), 5, lambda h, passed: replace(h, grid={8: 1.8, 16: 6.0}))
    found = first_finding(history, "grid")
    # Iterations 4 to 6: two of them are enough, and that of iteration 4 may be one of those that made it.
    assert found and (found.iteration, found.healthy) == (6, 2) and "a grid of 16 pixels" in found.told
    once = after(plain(10), 5, lambda h, passed: h if passed else replace(h, grid={8: 6.0, 16: 1.9}))
    assert first_finding(once, "grid") is None
    assert first_finding([replace(h, grid={}) for h in history], "grid") is None
    assert first_finding([replace(h, grid={8: 9.0, 16: 9.0}) for h in plain(10)], "grid") is None


@pytest.mark.parametrize("check", CHECKS)
def test_a_limit_of_nothing_turns_a_check_off(check: str) -> None:
    ill = after(gamed(0.1, 0.2), 20, lambda h, passed: replace(h, kl=9.0, grad_norm=99.0, zero_std=8, grid={8: 99.0}))
    ill = [replace(h, reward_mean=-9.0 if h.iteration >= 24 else h.reward_mean) for h in [*ill, *plain(28)[24:]]]
    assert first_finding(ill, check) is not None
    for limits in ({}, {check: 0}):
        assert all(judge(ill[:end], limits) == [] for end in range(1, len(ill) + 1))
    assert judge([], LIMITS) == []


def test_every_sentence_says_what_to_do() -> None:
    ill = after(
        plain(9), 6, lambda h, passed: replace(h, reward_mean=-9, kl=9.0, grad_norm=99.0, zero_std=8, grid={8: 99.0})
    )
    told = {f.check: f.told for end in range(7, 10) for f in judge(ill[:end], LIMITS)}
    told |= {f.check: f.told for f in [first_finding(gamed(0.1, 0.2), "heldout")] if f}
    assert told.keys() == CHECKS.keys()
    assert [check for check, sentence in told.items() if "go back" not in sentence and "look at" not in sentence] == []
