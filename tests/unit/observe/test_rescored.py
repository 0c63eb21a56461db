"""How far two scorers agree, on numbers worked out by hand and over a synthetic run."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from miles_core.observe.rescored import (
    Rescored,
    agreement,
    disagreement_sheet,
    disagreements,
    rescored,
    spearman,
    table,
)
from miles_core.store.files import Files

sys.path.insert(0, str(Path(__file__).parents[2]))

from synthetic_run import SyntheticRun, reward_of


def scores(before: list[float], after: list[float], groups: list[int], iteration: int = 0) -> Rescored:
    indices = list(range(10, 10 + len(before)))
    return Rescored(iteration, indices, groups, np.array(before), np.array(after), ("a", "b"))


def test_rank_correlation_is_spearmans() -> None:
    """Values of Spearman's example (Wikipedia, rank correlation of IQ and hours of TV): -29/165; ties share a rank."""
    iq = np.array([106, 100, 86, 101, 99, 103, 97, 113, 112, 110.0])
    hours = np.array([7, 27, 2, 50, 28, 29, 20, 12, 6, 17.0])
    assert spearman(iq, hours) == pytest.approx(-29 / 165)
    assert spearman(np.array([1, 1, 2.0]), np.array([5, 5, 9.0])) == pytest.approx(1)
    assert spearman(np.array([1, 2, 2, 3.0]), np.array([1, 2, 3, 4.0])) == pytest.approx(4.5 / np.sqrt(4.5 * 5))
    assert spearman(np.array([1, 1.0]), np.array([1, 2.0])) is None and spearman(np.ones(1), np.ones(1)) is None


def test_groups_whose_best_sample_changes() -> None:
    told = agreement([scores([1, 2, 3, 9, 9, 1], [3, 2, 1, 9, 0, 1], [0, 0, 0, 1, 1, 1])])
    assert (told.groups, told.best_changed, told.samples) == (2, 1, 6)
    assert told.before == pytest.approx(25 / 6) and told.after == pytest.approx(16 / 6)
    assert told.within_groups == pytest.approx((-1 + spearman(np.array([9, 9, 1.0]), np.array([9, 0, 1.0]))) / 2)


def test_groups_of_several_iterations_stay_apart() -> None:
    """Group 0 of iteration 0 and group 0 of iteration 1 are two, also where a scorer turns the order round."""
    same, turned = scores([1, 2], [1, 2], [0, 0], 0), scores([5, 6], [6, 5], [0, 0], 1)
    told = agreement([same, turned])
    assert (told.iteration, told.groups, told.best_changed) == (None, 2, 1)
    assert told.within_groups == 0
    assert agreement([turned]).iteration == 1


def test_a_scorer_that_sees_no_difference_has_no_correlation() -> None:
    told = agreement([scores([1, 2, 3, 4], [7, 7, 7, 7], [0, 0, 1, 1])])
    assert told.rank_correlation is None and told.within_groups is None and told.best_changed == 0
    assert "–" in table([scores([1, 2], [7, 7], [0, 0])])[1]


def test_the_furthest_apart_come_first() -> None:
    far = disagreements([scores([1, 2, 3, 4, 5], [5, 2, 3, 4, 1], [0] * 5)], 3)
    assert [one.sample_index for one in far] == [10, 14, 11]
    assert (far[0].rank_before, far[0].rank_after, far[0].of, far[0].distance) == (5, 1, 5, 0.8)


class TestRun:
    @pytest.fixture
    def run(self, tmp_path: Path) -> SyntheticRun:
        made = SyntheticRun(Files(str(tmp_path)), "r", groups=3, samples_per_group=4)
        for iteration in range(2):
            made.iterate(iteration)
        return made

    def test_rewards_are_joined_by_sample(self, run: SyntheticRun) -> None:
        before = run.line["rewards"]
        after = run.make("rewards", 1, on_line=False, rm_type="ocr", reward=lambda i, g: -reward_of(i, g))
        found = rescored(run.store.files, before, after)
        assert found.scorers == ("jpeg_compressibility-1", "ocr-1") and len(found.indices) == 12
        assert np.array_equal(found.before, -found.after)
        told = agreement([found])
        assert told.rank_correlation == pytest.approx(-1) and told.iteration == 1
        # The group whose rewards are all one keeps its best.
        assert (told.groups, told.best_changed) == (3, 2)
        again = rescored(run.store.files, before, before)
        assert agreement([again]).rank_correlation == pytest.approx(1) and agreement([again]).best_changed == 0

    def test_rewards_of_other_samples_are_refused(self, run: SyntheticRun) -> None:
        first = run.store.committed("rewards", 0)[0]
        with pytest.raises(ValueError, match="rewards of other samples"):
            rescored(run.store.files, first, run.line["rewards"])

    def test_the_sheet_shows_the_images_that_were_chosen(self, run: SyntheticRun) -> None:
        before, rollout = run.line["rewards"], run.line["rollout"]
        after = run.make("rewards", 1, on_line=False, rm_type="ocr", reward=lambda i, g: -reward_of(i, g))
        far = disagreements([rescored(run.store.files, before, after)], 4)
        drawn = disagreement_sheet(run.store.files, {1: rollout}, far)
        assert drawn is not None
        picture = Image.open(io.BytesIO(drawn.data))
        assert picture.width > 4 * 300
        two = disagreement_sheet(run.store.files, {1: rollout}, far[:2])
        assert two is not None and Image.open(io.BytesIO(two.data)).width < picture.width
        assert disagreement_sheet(run.store.files, {1: rollout}, []) is None
