from collections import Counter
from math import comb
from types import SimpleNamespace

import pytest

from miles_core.data.sample import Sample
from miles_core.errors import InputError
from miles_core.rollout.step_strategies import (
    epoch_global_random_choice,
    every_step,
    sde_window,
    select_strategy,
    step_seed,
)


def arguments(**changes) -> SimpleNamespace:
    defaults = {
        "diffusion_step_strategy_path": None,
        "diffusion_num_sde_steps": 3,
        "diffusion_sde_window_range": None,
        "diffusion_sde_candidate_steps": None,
    }
    return SimpleNamespace(**defaults | changes)


def sample(index: int = 0) -> Sample:
    return Sample(group_index=index // 4, index=index, prompt=f"prompt {index}", seed=1000 + index)


@pytest.mark.parametrize("strategy", [sde_window, epoch_global_random_choice])
def test_pitfall_9_all_samples_of_an_iteration_share_their_steps(strategy) -> None:
    def chosen(iteration: int) -> set[tuple[int, ...]]:
        seed = step_seed(42, iteration)
        return {tuple(strategy(arguments(), sample(i), 10, seed)[0]) for i in range(64)}

    per_iteration = [chosen(iteration) for iteration in range(30)]
    assert all(len(steps) == 1 for steps in per_iteration)
    assert len(set.union(*per_iteration)) > 4


def test_windows_are_contiguous_inside_the_range_and_reach_every_place() -> None:
    args = arguments(diffusion_sde_window_range=(2, 8))
    draws = [sde_window(args, sample(), 10, step_seed(1, i)) for i in range(400)]
    assert all(returned is None for _, returned in draws)
    assert all(steps == list(range(steps[0], steps[0] + 3)) for steps, _ in draws)
    starts = Counter(steps[0] for steps, _ in draws)
    assert set(starts) == {2, 3, 4, 5} and min(starts.values()) > 60


def test_the_window_range_is_by_default_the_whole_schedule() -> None:
    starts = {sde_window(arguments(), sample(), 6, step_seed(1, i))[0][0] for i in range(200)}
    assert starts == {0, 1, 2, 3}


def test_a_full_window_is_every_step() -> None:
    args = arguments(diffusion_num_sde_steps=10, diffusion_sde_window_range=(0, 10))
    assert sde_window(args, sample(), 10, 5) == (list(range(10)), None)


def test_choices_are_sorted_subsets_of_the_candidates_and_reach_every_subset() -> None:
    candidates = (7, 1, 4, 2, 8)
    args = arguments(diffusion_sde_candidate_steps=candidates)
    draws = [epoch_global_random_choice(args, sample(), 10, step_seed(1, i)) for i in range(600)]
    assert all(returned is None and steps == sorted(set(steps)) and len(steps) == 3 for steps, returned in draws)
    counts = Counter(tuple(steps) for steps, _ in draws)
    assert set().union(*counts) == set(candidates)
    assert len(counts) == comb(5, 3) and min(counts.values()) > 30


def test_candidates_are_by_default_the_whole_schedule() -> None:
    args = arguments(diffusion_num_sde_steps=2)
    seen = {s for i in range(100) for s in epoch_global_random_choice(args, sample(), 5, step_seed(1, i))[0]}
    assert seen == {0, 1, 2, 3, 4}


def test_every_step_names_none() -> None:
    assert every_step(arguments(), sample(), 10, 3) == (None, None)


def test_step_seeds_differ_by_iteration_and_by_run_and_stay_the_same_for_ever() -> None:
    seeds = {step_seed(run, iteration) for run in range(20) for iteration in range(200)}
    assert len(seeds) == 4000 and all(0 <= s < 2**63 for s in seeds)
    assert step_seed(42, 0) == 2878617034035469116
    assert [sde_window(arguments(), sample(), 10, step_seed(42, i))[0][0] for i in range(8)] == [3, 0, 6, 0, 4, 0, 4, 7]


@pytest.mark.parametrize(
    ("path", "count", "expected"),
    [
        (None, 0, every_step),
        (None, 2, sde_window),
        ("sde_window", 2, sde_window),
        ("miles/rollout/step_strategy_hub.sde_window", 2, sde_window),
        ("miles.rollout.step_strategy_hub.epoch_global_random_choice", 2, epoch_global_random_choice),
    ],
)
def test_the_strategy_is_chosen_by_its_short_name(path, count, expected) -> None:
    args = arguments(diffusion_step_strategy_path=path, diffusion_num_sde_steps=count)
    assert select_strategy(args) is expected


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(InputError, match="choose sde_window or epoch_global_random_choice"):
        select_strategy(arguments(diffusion_step_strategy_path="random"))


@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        (sde_window, {"diffusion_num_sde_steps": 11}),
        (sde_window, {"diffusion_sde_window_range": (4, 6)}),
        (sde_window, {"diffusion_sde_window_range": (4, 11)}),
        (epoch_global_random_choice, {"diffusion_num_sde_steps": 11}),
        (epoch_global_random_choice, {"diffusion_sde_candidate_steps": (1, 2)}),
        (epoch_global_random_choice, {"diffusion_sde_candidate_steps": (1, 2, 10)}),
    ],
)
def test_steps_that_do_not_fit_the_schedule_are_refused(strategy, changes) -> None:
    with pytest.raises(InputError, match="--diffusion-num-sde-steps"):
        strategy(arguments(**changes), sample(), 10, 0)
