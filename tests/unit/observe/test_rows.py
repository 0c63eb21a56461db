"""What is read of a run to be looked at: only the line, joined by sample, whatever a sample's pictures are."""

import itertools

import pytest
from made_up import FramesRun, NoiseRun, noise
from roots import Root
from synthetic_run import SyntheticRun, reward_of

from miles_core.observe.rows import Score, on_line, parts_with, ranked, read_part, read_scores, spread_order


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 16, 128])
def test_the_spread_order_is_every_position_once_with_the_ends_and_the_middle_first(count: int) -> None:
    order = spread_order(count)
    assert sorted(order) == list(range(count))
    if count > 2:
        assert order[:3] == [0, count - 1, (count - 1) // 2]


@pytest.mark.parametrize("shown", range(3, 17))
def test_what_is_shown_of_many_leaves_no_wide_gap(shown: int) -> None:
    some = sorted(spread_order(101)[:shown])
    gaps = [b - a for a, b in itertools.pairwise(some)]
    assert max(gaps) <= 2 * min(gaps) + 1


def test_ranked_puts_what_has_no_reward_last() -> None:
    scores = {i: Score(reward, None, {}) for i, reward in {1: 0.5, 2: None, 3: 0.9, 4: 0.5}.items()}
    assert ranked([0, 1, 2, 3, 4], scores) == [3, 1, 4, 0, 2]


def test_only_the_line_is_read(root: Root) -> None:
    run = SyntheticRun(root.files, "r")
    run.iterate(0)
    run.iterate(1)
    beside = run.make("rewards", 1, on_line=False, rm_type="jpeg_incompressibility")
    store = run.draw_line()
    line = on_line(store, "rewards")
    assert list(line) == [0, 1]
    assert beside.attempt not in {manifest.attempt for manifest in line.values()}
    assert list(on_line(store, "rewards", [1, 5])) == [1]


def test_a_row_joins_rollout_rewards_and_advantages(root: Root) -> None:
    run = NoiseRun(root.files, "r", groups=2, samples_per_group=4)
    store = run.whole(1)
    rollout, rewards, advantages = (on_line(store, s)[0] for s in ("rollout", "rewards", "advantages"))
    scores = read_scores(root.files, rewards, advantages)
    rows = [row for part in rollout.data for row in read_part(root.files, 0, part, scores)]
    assert [row.sample_index for row in rows] == list(range(8))
    for row in rows:
        assert row.reward == reward_of(row.sample_index, row.group_index)
        assert row.frames == (noise(row.sample_index),)
        assert row.seed == 1000 + row.sample_index
        mean, std = row.figures["group_mean"], row.figures["group_std"]
        assert row.advantage == pytest.approx((row.reward - mean) / (std + 1e-4))
        assert row.figures["score_jpeg_compressibility"] == row.reward
        assert (row.figures["engine_seconds"], row.figures["scoring_seconds"]) == (1.0 + row.group_index % 5, 0.01)
        assert not {"row_digest", "latents_digest", "log_probs", "prompt", "engine"} & set(row.figures)
    unscored = [row for part in rollout.data for row in read_part(root.files, 0, part, {})]
    assert [(row.reward, row.advantage) for row in unscored] == [(None, None)] * 8


def test_a_reward_that_is_no_number_is_none(root: Root) -> None:
    run = SyntheticRun(root.files, "r")
    for stage in ("prompts", "rollout"):
        run.make(stage, 0)
    rewards = run.make("rewards", 0, reward=lambda sample, group: float("nan") if sample == 3 else 1.0)
    scores = read_scores(root.files, rewards, None)
    assert (scores[3].reward, scores[2].reward) == (None, 1.0)


def test_the_frames_of_a_video_come_in_order_and_may_be_none(root: Root) -> None:
    store = FramesRun(root.files, "r", groups=1, samples_per_group=4).whole(1)
    (part,) = on_line(store, "rollout")[0].data
    frames = [row.frames for row in read_part(root.files, 0, part, {})]
    assert frames == [(noise(0), noise(1), noise(2))] * 2 + [(b"no picture",), ()]


def test_only_the_parts_that_hold_what_is_wanted_are_read(root: Root) -> None:
    store = SyntheticRun(root.files, "r", groups=3, samples_per_group=4)
    store.iterate(0)
    rollout = on_line(store.draw_line(), "rollout")[0]
    found = parts_with(rollout, range(12), {0, 3, 9})
    assert found == [rollout.data[0], rollout.data[2]]
    assert [row.sample_index for p in found for row in read_part(root.files, 0, p, {}, {0, 3, 9})] == [0, 3, 9]
