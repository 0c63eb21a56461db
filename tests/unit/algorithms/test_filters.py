from types import SimpleNamespace

from miles_core.algorithms.filters import DynamicFilterOutput, keep_all_groups, keep_all_samples
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
