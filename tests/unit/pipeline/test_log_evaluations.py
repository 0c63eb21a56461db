"""Evaluations are logged as iterations are: those of training, and those beside the line, whoever trains meanwhile."""

import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from synthetic_run import SyntheticRun, picture
from test_log import OFFLINE, board, configured, log_all, noted, wandb_rows

from miles_core.errors import StageError
from miles_core.observe.metrics import mean_and_std
from miles_core.pipeline.log import RunLog
from miles_core.pipeline.stage import Step
from miles_core.store.files import Files
from miles_core.store.lock import RunLock
from miles_core.store.manifest import Manifest
from miles_core.store.parts import Part
from miles_core.store.run_store import Attempt, RunStore
from miles_core.store.schemas import evaluation_schema

NAME = "eval/held-out/reward/raw_mean"
OWN = """
import json, pathlib

def evaluated(rollout_id, args, data, extra_metrics):
    samples = data["held-out"]["samples"]
    line = [rollout_id, data["held-out"]["rewards"], samples[1].prompt, list(samples[1].generated_output.shape), extra_metrics]
    with open(pathlib.Path(args.code_path, "noted"), "a") as file:
        file.write(json.dumps(line) + "\\n")
    if pathlib.Path(args.code_path, "broken").exists():
        raise ValueError("no")
    return rollout_id >= 0
"""


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "MILES_FAULT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MILES_HOME", str(tmp_path / "home"))
    (tmp_path / "own_eval.py").write_text(OWN)


@pytest.fixture
def made(tmp_path: Path) -> SyntheticRun:
    """Two iterations, evaluated before training and after the second."""
    made = SyntheticRun(Files(str(tmp_path / "runs")), "r")
    made.iterate(0)
    evaluated(made, -1, [0.1, 0.3])
    made.iterate(1)
    evaluated(made, 1, [0.5, 0.7])
    made.draw_line()
    return made


def evaluated(run: SyntheticRun, iteration: int, rewards: list[float], **options: Any) -> Manifest:
    """Commit an evaluation with these rewards."""

    def rows(attempt: Attempt, upstream: Mapping[str, Manifest]) -> tuple[list[Part], dict[str, Any]]:
        given = [_row(number, reward) for number, reward in enumerate(rewards)]
        mean, std = mean_and_std(rewards)
        figures = {"samples": 2, "reward_mean": mean, "reward_std": std, "reward_min": 0.0, "reward_max": 1.0}
        return [run._write(attempt, "data/0.parquet", given, evaluation_schema([]))], {"sets": {"held-out": figures}}

    policy = run.line["policy" if iteration < 0 else "update"]
    return run.put("evaluation", iteration, {"policy": policy}, rows, changes={"mark": rewards}, **options)


def _row(number: int, reward: float) -> dict[str, Any]:
    texts = {"eval_set": "held-out", "prompt": f"prompt {number}", "engine": "e0", "policy_digest": "0" * 64}
    numbers = dict.fromkeys(("seed", "num_outputs", "height", "width", "num_steps", "policy_version", "tries"), 1)
    said = {
        "rm_type": "x",
        "rm_version": "1",
        "worker": "w",
        "recognized": None,
        "target": None,
        "negative_prompt": None,
    }
    times = {"started_at": datetime.now(UTC), "generate_seconds": 1.0, "score_seconds": 1.0, "guidance_scale": 1.0}
    image = {"image": {"bytes": picture(number, 0, 16), "path": None}}
    return {
        "sample_index": number,
        "prompt_index": number,
        "reward": reward,
        **texts,
        **numbers,
        **said,
        **times,
        **image,
    }


def aside(store: RunStore, config: Any, manifest: Manifest, say: Callable[[str], None] = print) -> None:
    """What `miles evaluate` does once it is committed."""
    with RunLog(config, store, say) as log:
        log.evaluation(
            Step(config, cast(Any, None), store, cast(Any, None), manifest.iteration, moves_line=False), manifest
        )


def points(rows: list[dict[str, Any]]) -> list[tuple[int, float | None]]:
    return [(row["iteration"], row.get(NAME)) for row in rows]


def test_those_of_training_stand_at_their_iterations(
    made: SyntheticRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(tmp_path, **OFFLINE, use_tensorboard=True)
    for _ in range(2):
        log_all(made.store, config)
    assert points(wandb_rows(tmp_path / "runs/r")) == [(-1, 0.2), (0, None), (1, None), (1, 0.6)]
    assert [(s.step, round(s.value, 5)) for s in board(tmp_path / "runs/r/tensorboard").Scalars(NAME)] == [
        (-1, 0.2),
        (1, 0.6),
    ]
    assert capsys.readouterr().out.count(f"{NAME}=") == 2


def test_one_beside_the_line_goes_into_the_same_wandb_run(made: SyntheticRun, tmp_path: Path) -> None:
    config = configured(tmp_path, **OFFLINE)
    log_all(made.store, config)
    beside = evaluated(made, 0, [0.0, 1.0], on_line=False)
    for _ in range(2):
        aside(made.store, config, beside)
    assert points(wandb_rows(tmp_path / "runs/r"))[-2:] == [(1, 0.6), (0, 0.5)]
    assert len({path.name for path in (tmp_path / "runs/r").glob("wandb/*/run-*.wandb")}) == 1


def test_while_the_run_is_trained_it_is_left_to_that_command(
    made: SyntheticRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """wandb loses rows where two processes write one run."""
    config = configured(tmp_path, **OFFLINE)
    log_all(made.store, config, 1)
    lock = RunLock(made.store.files, "r")
    lock.take(print)
    try:
        beside = evaluated(made, 0, [0.0, 1.0], on_line=False)
        capsys.readouterr()
        opened = list((tmp_path / "runs/r/wandb").iterdir())
        aside(made.store, config, beside)
        assert list((tmp_path / "runs/r/wandb").iterdir()) == opened
        assert f"{NAME}=0.5" in capsys.readouterr().out
        assert points(wandb_rows(tmp_path / "runs/r")) == [(-1, 0.2), (0, None)]
        log_all(made.store, config, 2)
    finally:
        lock.release()
    log_all(made.store, config, 2)
    assert points(wandb_rows(tmp_path / "runs/r")) == [(-1, 0.2), (0, None), (0, 0.5), (1, None), (1, 0.6)]
    assert f"{NAME}=0.5" not in capsys.readouterr().out


def test_an_own_function_has_rewards_and_samples_by_set(
    made: SyntheticRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(tmp_path, custom_eval_rollout_log_function_path="own_eval.evaluated", **OFFLINE)
    log_all(made.store, config)
    rows = noted(tmp_path)
    assert [row[:4] for row in rows] == [
        [-1, [0.1, 0.3], "prompt 1", [3, 16, 16]],
        [1, [0.5, 0.7], "prompt 1", [3, 16, 16]],
    ]
    assert all(list(row[4]) == ["perf/eval_time"] for row in rows)
    assert capsys.readouterr().out.count(f"{NAME}=") == 1
    assert points(wandb_rows(tmp_path / "runs/r")) == [(-1, 0.2), (0, None), (1, None)]


def test_one_that_fails_is_named_with_its_place(made: SyntheticRun, tmp_path: Path) -> None:
    config = configured(tmp_path, custom_eval_rollout_log_function_path="own_eval.evaluated")
    (tmp_path / "broken").touch()
    with pytest.raises(StageError, match=r"--custom-eval-rollout-log-function-path .* before training: ValueError"):
        log_all(made.store, config)
    (tmp_path / "broken").unlink()
    log_all(made.store, config)
    assert [row[0] for row in noted(tmp_path)] == [-1, -1, 1]
