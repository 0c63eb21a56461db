"""Logging of real commands: wandb offline, TensorBoard, functions of one's own, a kill in between, an evaluation beside."""

import json
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).parent))

from commands import Place

from miles_core.observe.log_wandb import ENTRY
from miles_core.observe.metrics import metrics_of
from miles_core.observe.metrics_file import metrics_of_run
from miles_core.observe.wandb_file import RunFile

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SECRET = "s3cretT0KEN"
MEAN, EVAL = "rollout/reward/raw_mean", "eval/words/reward/raw_mean"
OWN = """
import json, pathlib

def noted(args, line):
    with open(pathlib.Path(args.code_path, "noted"), "a") as file:
        file.write(json.dumps(line) + "\\n")

def rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    assert samples[0].generated_output.shape == (3, args.diffusion_height, args.diffusion_width)
    noted(args, [rollout_id, len(samples), sum(s.reward for s in samples) / len(samples), samples[0].prompt])
    if rollout_id == 1 and not pathlib.Path(args.code_path, "mended").exists():
        raise ValueError("not yet")
    return rollout_id == 0

def evaluation(rollout_id, args, data, extra_metrics):
    noted(args, ["evaluation", rollout_id, data["words"]["rewards"]])
    return False
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "logs.py").write_text(OWN)
    (folder / "words.txt").write_text("a tall tree\n")
    return folder


@pytest.fixture(scope="module")
def words(project: Path) -> list[str]:
    return [
        *("tiny", "--run-id", "logged", "--num-rollout", "2", "--code-path", str(project)),
        *("--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "1"),
        *("--use-wandb", "--wandb-mode", "offline", "--wandb-project", "mine", "--wandb-log-num-images", "2"),
        *("--use-tensorboard", "--rm-url", f"http://user:{SECRET}@host/score?token={SECRET}"),
        *(
            "--eval-interval",
            "2",
            "--eval-prompt-data",
            "words",
            str(project / "words.txt"),
            "--diffusion-eval-num-steps",
            "2",
        ),
        *("--custom-rollout-log-function-path", "logs.rollout"),
        *("--custom-eval-rollout-log-function-path", "logs.evaluation"),
    ]


@pytest.fixture(scope="module")
def said(place: Place, words: list[str], project: Path) -> list[str]:
    """What three commands said: killed between handing the first iteration over and noting it, ended by the user's function, and
    done."""
    killed = place.start("train", *words, MILES_FAULT="logging:sent:6:kill9")
    first, _ = killed.communicate(timeout=500)
    assert killed.returncode == -9, first
    before = place.digests("logged", 1)
    second = place.miles("train", *words, code=1)
    assert place.digests("logged", 1) == before
    (project / "mended").touch()
    committed = place.digests("logged", 2)
    third = place.miles("train", *words)
    assert place.digests("logged", 2) == committed
    said = [first, second, third]
    assert [line for text in said for line in text.splitlines() if "takes no metrics" in line] == []
    return said


def noted(project: Path) -> list[Any]:
    return [json.loads(line) for line in (project / "noted").read_text().splitlines()]


def rows(place: Place) -> list[dict[str, Any]]:
    paths = sorted(Path(place.artifacts, "logged").glob("wandb/offline-run-*/run-*.wandb"))
    assert len({path.name for path in paths}) == 1
    return [row for path in paths for row in RunFile(path).new_rows() if ENTRY in row]


def reward(place: Place, iteration: int) -> float:
    return metrics_of(place.on_line("logged", iteration, "rewards"))[MEAN]


def test_an_own_function_takes_over(place: Place, said: list[str], project: Path) -> None:
    """It is called with what was committed; truth leaves out the default; one that raises is named, and called again by the next
    command, which makes nothing again."""
    assert "--custom-rollout-log-function-path logs.rollout failed in iteration 1: ValueError: not yet" in said[1]
    assert "iteration 1: reused" in said[2] and "2 reused" in said[2]
    lines = noted(project)
    assert [line[0] for line in lines] == ["evaluation", 0, 1, 1, "evaluation"]
    assert [line[1] for line in lines if line[0] == "evaluation"] == [-1, 1]
    assert lines[1][1] == 8 and lines[1][2] == pytest.approx(reward(place, 0)) and lines[1][3]
    told = [line for text in said for line in text.splitlines() if f"{MEAN}=" in line]
    assert len(told) == 1 and f"{MEAN}={reward(place, 1):.4g}" in told[0] and told[0] in said[2]
    assert sum(text.count("train/loss=") for text in said) == 2
    assert sum(text.count(f"{EVAL}=") for text in said) == 2


def test_wandb_and_tensorboard_have_each_iteration_once(place: Place, said: list[str]) -> None:
    """One wandb run over three commands, of which one was killed between handing over and noting."""
    found = rows(place)
    assert [(row["iteration"], row.get(MEAN)) for row in found] == [
        (-1, None),
        (0, None),
        (1, pytest.approx(reward(place, 1))),
        (1, None),
    ]
    assert all("train/loss" in row for row in found[1:3]) and [EVAL in row for row in found] == [
        True,
        False,
        False,
        True,
    ]
    images = "rollout_media/sample_images"
    assert len(found[2][f"{images}/captions"]) == 2 and "reward" in found[2][f"{images}/captions"][0]
    folder = Path(place.artifacts, "logged", "tensorboard")
    board = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    board.Reload()
    assert [s.step for s in board.Scalars("train/loss")] == [0, 1]
    assert [s.step for s in board.Scalars(EVAL)] == [-1, 1] and [s.step for s in board.Images(images)] == [1]
    files = [path for path in Path(place.artifacts, "logged", "wandb").rglob("*") if path.is_file()]
    assert files and [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_metrics_parquet_is_what_the_store_says(place: Place, said: list[str]) -> None:
    path = f"{place.artifacts}/logged/metrics.parquet"
    sql = "SELECT run, iteration, metric, value, stage, attempt FROM {} ORDER BY ALL"
    there = duckdb.sql(sql.format(f"'{path}'")).fetchall()
    expected = metrics_of_run(place.store("logged")).select(["run", "iteration", "metric", "value", "stage", "attempt"])
    assert there == sorted(tuple(row.values()) for row in expected.to_pylist())
    assert {row[2] for row in there} >= {MEAN, "train/loss", "train/kl_loss", "train/log_prob_mean_abs_diff"}
    assert {row[2] for row in there} >= {"train/grad_norm", "perf/rollout_time", "perf/train_time", EVAL}
    out = place.miles("query", "SELECT count(*) AS n FROM metrics", "--run", "logged", "--output", "csv")
    assert out.splitlines()[1] == str(len(there))


def test_an_evaluation_beside_the_line_is_in_the_same_wandb_run(place: Place, said: list[str], project: Path) -> None:
    before = len(rows(place))
    place.miles("evaluate", "logged", "0")
    found = rows(place)
    assert len(found) == before + 1 and found[-1]["iteration"] == 0 and EVAL in found[-1]
    assert noted(project)[-1][:2] == ["evaluation", 0]
