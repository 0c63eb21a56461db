"""What was scored while a rollout was made is what the rewards are committed against."""

from dataclasses import replace

import pytest
from tiny_run import TinyRun

from miles_core.errors import StageError
from miles_core.pipeline.rewards import Scoring


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
