"""Advantages against references written with plain Python floats."""

import math
import statistics
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from miles_core.algorithms.advantages import normalize, post_process_rewards
from miles_core.data.sample import Sample
from miles_core.errors import StageError

EPS = 1e-4
REWARDS = [0.1, 0.9, 0.4, 0.3, 0.7, 0.7, 1.0, -2.0, 0.25]
GROUPS = [7, 7, 7, 3, 3, 3, 9, 9, 9]


def run(rewards=REWARDS, groups=GROUPS, *, use_std=True, global_mean=False, global_std=False):
    return normalize(rewards, groups, use_std=use_std, global_mean=global_mean, global_std=global_std)


def arguments(**changes) -> SimpleNamespace:
    defaults = {
        "n_samples_per_prompt": 3,
        "disable_grpo_std_normalization": False,
        "globalize_reward_mean": False,
        "globalize_reward_std": False,
    }
    return SimpleNamespace(**defaults | changes)


def samples(rewards=REWARDS, groups=GROUPS, prompt="same text") -> list[Sample]:
    return [
        Sample(group_index=g, index=i, prompt=prompt, seed=i, reward=r)
        for i, (r, g) in enumerate(zip(rewards, groups, strict=True))
    ]


@pytest.mark.parametrize("use_std", [True, False])
@pytest.mark.parametrize("global_mean", [True, False])
@pytest.mark.parametrize("global_std", [True, False])
def test_every_combination_matches_the_formula(use_std: bool, global_mean: bool, global_std: bool) -> None:
    result = run(use_std=use_std, global_mean=global_mean, global_std=global_std)
    for i, (reward, group) in enumerate(zip(REWARDS, GROUPS, strict=True)):
        own = [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group]
        mean = statistics.fmean(REWARDS if global_mean else own)
        std = statistics.pstdev(REWARDS if global_std else own)
        expected = (reward - mean) / (std + EPS) if use_std else reward - mean
        assert result.advantage[i] == pytest.approx(expected, rel=1e-12)
        assert result.group_mean[i] == pytest.approx(statistics.fmean(own), rel=1e-12)
        assert result.group_std[i] == pytest.approx(statistics.pstdev(own), rel=1e-12)
    assert result.advantage.dtype == np.float64
    assert not result.zero_std.any()


def test_std_is_the_populations() -> None:
    result = run([0.0, 1.0], [0, 0])
    assert result.group_std.tolist() == [0.5, 0.5]
    assert result.advantage.tolist() == [-0.5 / 0.5001, 0.5 / 0.5001]


def test_rows_may_arrive_in_any_order_and_keep_their_bits() -> None:
    draw = np.random.default_rng(0)
    rewards, groups = draw.normal(size=96), np.repeat(np.arange(6), 16)
    straight = run(rewards, groups)
    order = draw.permutation(96)
    shuffled = run(rewards[order], groups[order])
    assert order.tolist() != sorted(order)
    for name in ("advantage", "group_mean", "group_std", "zero_std"):
        assert np.array_equal(getattr(shuffled, name), getattr(straight, name)[order]), name


def test_groups_may_have_unequal_sizes() -> None:
    result = run([1.0, 2.0, 3.0, 10.0, 20.0], [0, 0, 0, 1, 1], use_std=False)
    assert result.advantage.tolist() == [-1, 0, 1, -5, 5]


def test_pitfall_21_groups_have_explicit_ids_and_equal_prompts_do_not_merge() -> None:
    raw, advantages = post_process_rewards(
        arguments(disable_grpo_std_normalization=True, n_samples_per_prompt=2),
        samples([0.0, 1.0, 10.0, 20.0], [0, 0, 1, 1], prompt="the same words"),
    )
    assert raw == [0.0, 1.0, 10.0, 20.0]
    assert advantages == [-0.5, 0.5, -5.0, 5.0]


def test_pitfall_39_equal_rewards_are_counted_as_zero_std_and_teach_nothing() -> None:
    rewards = [0.1, 0.1, 0.1, 0.1, 0.1, math.nextafter(0.1, 1), 0.2, 0.3, 0.4]
    result = run(rewards, GROUPS)
    assert sum([0.1] * 3) / 3 != 0.1
    assert result.zero_std.tolist() == [True] * 3 + [False] * 6
    assert result.advantage[:3].tolist() == [0, 0, 0] and result.group_std[:3].tolist() == [0, 0, 0]
    assert len({g for g, zero in zip(GROUPS, result.zero_std, strict=True) if zero}) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_pitfall_40_non_finite_rewards_name_their_positions(bad: float) -> None:
    rewards = [*REWARDS]
    rewards[2] = rewards[7] = bad
    with pytest.raises(StageError, match=r"positions \[2, 7\] \(2 of 9\)"):
        run(rewards)


def test_pitfall_40_a_group_of_one_has_advantage_zero_under_its_own_mean() -> None:
    result = run([5.0, 0.0, 1.0], [4, 5, 5])
    assert result.advantage[0] == 0 and result.zero_std.tolist() == [True, False, False]
    assert np.isfinite(result.advantage).all() and result.advantage[2] > 0


def test_pitfall_40_a_group_of_one_is_not_divided_by_its_zero_std() -> None:
    result = run([5.0, 0.0, 1.0], [4, 5, 5], global_mean=True)
    assert result.advantage[0] == 3.0
    assert result.advantage[1] == pytest.approx(-2 / (0.5 + EPS))
    whole = run([5.0, 0.0, 1.0], [4, 5, 5], global_mean=True, global_std=True)
    assert whole.advantage[0] == pytest.approx(3 / (statistics.pstdev([5, 0, 1]) + EPS))


def test_one_sample_a_prompt_turns_the_std_off() -> None:
    lone = samples([1.0, 4.0, 4.0], [0, 1, 2])
    for std in (False, True):
        args = arguments(n_samples_per_prompt=1, globalize_reward_std=std)
        assert post_process_rewards(args, lone)[1] == [0, 0, 0]
        args.globalize_reward_mean = True
        assert post_process_rewards(args, lone)[1] == [-2, 1, 1]


@pytest.mark.parametrize(
    ("flag", "keyword"),
    [
        ("disable_grpo_std_normalization", {"use_std": False}),
        ("globalize_reward_mean", {"global_mean": True}),
        ("globalize_reward_std", {"global_std": True}),
    ],
)
def test_each_flag_changes_the_advantages(flag: str, keyword: dict[str, bool]) -> None:
    raw, advantages = post_process_rewards(arguments(**{flag: True}), samples())
    assert raw == REWARDS
    assert advantages == run(**keyword).advantage.tolist()
    assert advantages != post_process_rewards(arguments(), samples())[1]


@pytest.mark.parametrize("reward", [None, {"ocr": 1.0}])
def test_a_sample_without_a_number_is_named(reward) -> None:
    scored = samples()
    scored[4].reward = reward
    with pytest.raises(StageError, match="sample 4 has"):
        post_process_rewards(arguments(), scored)


@pytest.mark.parametrize(("rewards", "groups"), [([], []), ([1.0], [0, 0])])
def test_lengths_that_do_not_fit_are_refused(rewards: list[float], groups: list[int]) -> None:
    with pytest.raises(StageError, match="one reward and one group index a sample"):
        run(rewards, groups)


def test_removed_samples_still_count_in_mean_and_std() -> None:
    scored = samples()
    before = post_process_rewards(arguments(), scored)
    scored[0].remove_sample = True
    assert post_process_rewards(arguments(), scored) == before


def test_it_needs_no_torch() -> None:
    code = "import sys; import miles_core.algorithms.train_pairs, miles_core.algorithms.filters; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
