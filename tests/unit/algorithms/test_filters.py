import itertools
from types import SimpleNamespace

import pytest

from miles_core.algorithms.filters import (
    DynamicFilterOutput,
    Verdict,
    check_reward_nonzero_std,
    first_kept,
    keep_all_groups,
    keep_all_samples,
)
from miles_core.data.sample import Sample


def group() -> list[Sample]:
    return [Sample(group_index=0, index=i, prompt="", seed=i, reward=0.0, remove_sample=i == 1) for i in range(3)]


def test_the_default_keeps_every_group_also_one_that_teaches_nothing() -> None:
    verdict = keep_all_groups(SimpleNamespace(), group(), evaluation=False)
    assert verdict == DynamicFilterOutput(keep=True, reason=None)
    assert verdict != DynamicFilterOutput(keep=False, reason="zero std")


def test_the_default_changes_no_sample() -> None:
    data = [group(), group()]
    keep_all_samples(SimpleNamespace(), data)
    assert data == [group(), group()]
    assert [s.remove_sample for s in data[0]] == [False, True, False]


def test_the_first_kept_groups_by_index_are_used_whenever_they_came() -> None:
    """Whatever engine was fastest: the order of arrival chooses nothing."""
    verdicts = [Verdict(0, False), Verdict(5, True), Verdict(2, True), Verdict(9, True), Verdict(3, True)]
    for order in itertools.permutations(verdicts):
        assert first_kept(order, 2) == ([2, 3], [5, 9])
    assert first_kept(verdicts, 9) == ([2, 3, 5, 9], [])


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"),
    [([0.1] * 3, False, "zero_std_0.1"), ([0.0, 0.0], False, "zero_std_0.0"), ([1.0, 1.0 + 2**-52], True, None)],
)
def test_the_stock_filter_drops_what_has_no_spread(rewards: list[float], keep: bool, reason: str | None) -> None:
    samples = [Sample(group_index=0, index=i, prompt="p", seed=i, reward=r) for i, r in enumerate(rewards)]
    assert check_reward_nonzero_std(None, samples) == DynamicFilterOutput(keep, reason)
