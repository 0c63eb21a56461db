"""Evaluation in the loop and by its own command: real Prefect, Ray, engine, scorers and trainer; a tiny random model."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from commands import Place

from miles_core.store.parts import read_table

pytestmark = pytest.mark.integration

OPTIONS = (
    *("--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "1"),
    *("--diffusion-num-steps", "4", "--diffusion-sde-window-range", "0,3", "--micro-batch-size", "4"),
)
# Requests of 4 and 2 samples, a scorer that training has not, and another number of steps.
SETS = {
    "held-out": {"input": "a tall tree", "metadata": {"rm_type": "jpeg_incompressibility"}},
    "walls": {"input": "a low wall"},
}
SAMPLES = 6
FAILURE = "evaluation:landed:2:error"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("home"))
    for name, prompt in SETS.items():
        (made.home / f"{name}.jsonl").write_text(json.dumps(prompt))
    yield made
    made.miles("down")


def evaluating(place: Place) -> tuple[str, ...]:
    return (
        *("--run-id", "watched", *OPTIONS, "--eval-interval", "1"),
        *("--eval-prompt-data", *(word for name in SETS for word in (name, str(place.home / f"{name}.jsonl")))),
        *("--n-samples-per-eval-prompt", str(SAMPLES), "--diffusion-eval-num-steps", "3"),
    )


@pytest.fixture(scope="module")
def plain(place: Place) -> dict[str, str]:
    """Digests of a run without evaluation."""
    place.miles("train", "tiny", "--run-id", "plain", *OPTIONS)
    return place.digests("plain", 2)


@pytest.fixture(scope="module")
def watched(place: Place) -> str:
    """The output of the same run with evaluation, the first of which failed half-way."""
    return place.miles("train", "tiny", *evaluating(place), MILES_FAULT=FAILURE)


def parts_of(place: Place, iteration: int) -> dict[Path, int]:
    """The evaluation's parts in all attempts, and when they were written."""
    folder = Path(place.artifacts, place.store("watched").stage_folder("evaluation", iteration))
    return {path: path.stat().st_mtime_ns for path in folder.glob("*/data/*.parquet")}


def digest(place: Place, iteration: int) -> str:
    return place.on_line("watched", iteration, "evaluation").content_digest


def test_training_has_the_bits_of_one_without_evaluation(place: Place, plain: dict[str, str], watched: str) -> None:
    assert place.digests("watched", 2) == plain
    assert all(place.on_line("watched", i, "update").summary["grad_norm"] > 0 for i in range(2))
    for iteration in range(2):
        mine, other = place.checkpoint("watched", iteration), place.checkpoint("plain", iteration)
        assert len(mine) > 3 * 15
        assert mine == other


def test_a_failed_evaluation_is_told_and_training_goes_on(place: Place, watched: str) -> None:
    assert watched.count("training goes on") == 1
    assert f"evaluation before training failed: {FAILURE.removesuffix(':2:error')}" in watched
    assert "Traceback" not in watched
    assert place.store("watched").on_line("evaluation", -1) is None
    assert len(re.findall(r"^  evaluation +computed +[\d.]+ s +12 rows", watched, re.MULTILINE)) == 2
    assert watched.count("eval/held-out/reward/raw_mean=") == 2


def test_an_evaluation_is_of_the_policy_that_its_iteration_made(place: Place, watched: str) -> None:
    for iteration in range(2):
        made = place.on_line("watched", iteration, "evaluation")
        policy = place.on_line("watched", iteration, "update").summary["policy_digest"]
        rows = [row for part in made.data for row in read_table(place.store("watched").files, part).to_pylist()]
        assert [row["sample_index"] for row in rows] == list(range(2 * SAMPLES))
        assert [row["num_outputs"] for row in rows] == [4, 4, 4, 4, 2, 2] * 2
        assert {(row["policy_digest"], row["policy_version"]) for row in rows} == {(policy, iteration)}
        assert [row["rm_type"] for row in rows] == ["jpeg_incompressibility"] * 6 + ["jpeg_compressibility"] * 6
    assert digest(place, 0) != digest(place, 1)


def test_the_same_command_makes_up_what_is_missing_and_keeps_its_parts(place: Place, watched: str) -> None:
    """And starts no trainer for it."""
    before, line = parts_of(place, -1), place.digests("watched", 2)
    assert len(before) >= 2
    output = place.miles("train", "tiny", *evaluating(place))
    assert len(re.findall(r"^  evaluation +computed", output, re.MULTILINE)) == 1
    assert "starting the trainer" not in output
    after = parts_of(place, -1)
    assert before.items() <= after.items() and len(after) == 4
    assert place.digests("watched", 2) == line
    assert len({digest(place, i) for i in (-1, 0, 1)}) == 3
    again = place.miles("train", "tiny", *evaluating(place))
    assert again.count(": reused") == 2 and "computed " not in again


def test_the_command_makes_what_the_loop_made_and_leaves_the_line(place: Place, watched: str) -> None:
    """Also where an engine and a scorer die."""
    root = Path(place.artifacts, "watched")
    before = {name: (root / name).read_bytes() for name in ("run.json", "lock.json") if (root / name).exists()}
    assert "run.json" in before
    output = place.miles("evaluate", "watched", "0")
    assert re.search(r"^  evaluation reused", output, re.MULTILINE)
    faults = "evaluation:score:1:kill9,rollout:generate:3:kill9"
    output = place.miles("evaluate", "watched", "0", "--force", MILES_FAULT=faults)
    assert "asked for again" in output and "starting the trainer" not in output
    made = place.store("watched").committed("evaluation", 0)
    assert [m.content_digest for m in made] == [digest(place, 0)] * 2
    assert {name: (root / name).read_bytes() for name in before} == before


def test_a_failed_evaluation_ends_the_command_where_that_is_asked(place: Place, watched: str) -> None:
    options = ("--diffusion-eval-num-steps", "2", "--stop-on-eval-failure")
    output = place.miles("train", "tiny", *evaluating(place), *options, code=1, MILES_FAULT="evaluation:start:1:error")
    assert "miles: evaluation:start failed" in output and "training goes on" not in output
