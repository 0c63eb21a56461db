import pytest
import torch

from miles_core.errors import StageError
from miles_core.weights.probe_spec import probe_tolerance
from miles_core.weights.verify import check_probe, relative_distance

TOLERANCE = probe_tolerance("fp32")


@pytest.fixture
def outputs():
    generator = torch.Generator().manual_seed(0)
    before, move = (torch.randn(1, 16, 8, 8, generator=generator) for _ in range(2))
    return before, before + 1e-2 * move, move


def test_relative_distance_is_the_norm_of_the_difference_over_the_norm():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 4.0])
    assert relative_distance(a, b) == pytest.approx(0.75)
    assert relative_distance(b, a) == pytest.approx(0.6)
    assert relative_distance(a, a) == 0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.tensor([float("nan")]), torch.ones(1)),
        (torch.ones(1), torch.tensor([float("inf")])),
        (torch.ones(1), torch.zeros(1)),
    ],
)
def test_what_cannot_be_compared_is_infinitely_far(a, b):
    assert relative_distance(a, b) == float("inf")


def test_engine_that_follows_passes(outputs):
    before, after, _ = outputs
    result = check_probe(before, after * (1 + 1e-7), before, after, TOLERANCE)
    assert 0 < result.diff < 1e-6
    assert result.moved == pytest.approx(1e-2, rel=0.2)


def test_engine_that_stayed_behind_is_refused(outputs):
    """A sync that failed silently (pitfall 11)."""
    before, after, _ = outputs
    with pytest.raises(StageError, match="does not compute with the new policy"):
        check_probe(before, before, before, after, TOLERANCE)


def test_engine_that_stayed_behind_an_update_smaller_than_the_tolerance_is_refused(outputs):
    """Every sync shipped the frozen base, which looked like staleness (pitfall 37)."""
    before, _, move = outputs
    after = before + 5e-6 * move
    assert TOLERANCE > relative_distance(after, before) > 1e-6
    with pytest.raises(StageError, match="did not reach the engine"):
        check_probe(before, before, before, after, TOLERANCE)
    assert check_probe(before, after, before, after, TOLERANCE).moved > 1e-6


def test_update_that_moves_nothing_passes(outputs):
    before, _, _ = outputs
    assert check_probe(before, before, before, before, TOLERANCE).moved == 0


def test_output_that_is_not_finite_is_refused(outputs):
    before, after, _ = outputs
    with pytest.raises(StageError):
        check_probe(before, torch.full_like(after, float("nan")), before, after, TOLERANCE)
