"""What was scored while a rollout was made is what the rewards are committed against."""

from dataclasses import replace

import pyarrow as pa
import pytest
from tiny_run import TinyRun

from miles_core.errors import StageError
from miles_core.pipeline.rewards import Scoring, summary_of


def test_a_rollout_that_another_command_committed_with_other_samples_is_not_taken_for_the_one_scored(
    run: TinyRun,
) -> None:
    rollout = run.store.on_line("rollout", 0)
    assert rollout is not None and len(rollout.data) > 1
    scoring = object.__new__(Scoring)
    scoring.scored = [part.content for part in reversed(rollout.data)]
    scoring.check(rollout)
    scoring.scored[0] = "f" * 64
    with pytest.raises(StageError, match="committed by another command with other samples"):
        scoring.check(rollout)
    fewer = replace(rollout, parts=tuple(part for part in rollout.parts if part != rollout.data[0]))
    scoring.scored = [part.content for part in rollout.data]
    with pytest.raises(StageError):
        scoring.check(fewer)


def test_the_summary_holds_the_mean_of_each_scorer_over_what_it_scored() -> None:
    table = pa.table({"reward": [0.0, 0.5, 1.0], "score_ocr": [0.0, 0.5, None], "score_jpeg": [None, None, 1.0]})
    assert summary_of(table) == {
        "samples": 3,
        "reward_mean": 0.5,
        "reward_std": pytest.approx((1 / 6) ** 0.5),
        "reward_min": 0.0,
        "reward_max": 1.0,
        "score_means": {"ocr": 0.25, "jpeg": 1.0},
    }
    unscored = pa.table({"reward": [1.0], "score_ocr": pa.array([None], pa.float64())})
    assert summary_of(unscored)["score_means"] == {}
