"""Reruns over a range, forced remakes and a fork from the command line: real Prefect, Ray, engine, scorers, trainer."""

import re
import shlex
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from commands import Place

from miles_core.store.stages import ITERATION_STAGES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
SMALL = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "1"]
OTHER = ["--rm-type", "jpeg_incompressibility"]


@pytest.fixture(scope="module")
def trained(place: Place) -> str:
    return place.miles("train", "tiny", "--num-rollout", "2", *SMALL)


def held(place: Place) -> dict[str, bytes]:
    """Every file of the run but the notes of its forks."""
    root = place.home / "artifacts" / "tiny"
    return {str(p): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.parent.name != "forks"}


@pytest.fixture(scope="module")
def scored(place: Place, trained: str) -> str:
    """Both iterations scored by another reward, beside the line."""
    return place.miles("rerun", "latest", "0:50", "rewards", *OTHER)


def test_a_range_is_one_run_that_starts_its_processes_once_and_then_skips_what_is_good(
    place: Place, trained: str, scored: str
) -> None:
    assert scored.count("starting Ray") == scored.count("starting the scorers") == 1
    for number in range(2):
        rollout, rewards = (place.on_line("tiny", number, stage).attempt for stage in ("rollout", "rewards"))  # type: ignore[arg-type]
        assert f"iteration {number} ({number + 1} of 2)" in scored
        assert f"read rollout {rollout} (on the line)" in scored
        assert (
            f"advantages on the line was made from rewards {rewards}: `miles fork tiny {number} --from-attempt"
            in scored
        )
    assert len(re.findall("rewards +computed", scored)) == 2
    again = place.miles("rerun", "tiny", "latest:2", "rewards", *OTHER)
    assert len(re.findall("rewards +reused", again)) == 2 and "starting" not in again
    assert "there is nothing to do" in place.miles("rerun", "tiny", "unscored", "rewards", *OTHER)
    assert "there is nothing to do" in place.miles("rerun", "tiny", "failed", "update")


def test_rescoring_compares_with_the_rewards_of_training(place: Place, trained: str, scored: str) -> None:
    """The one reward is the size in kB, the other -kB/500: the order is turned round."""
    sheet, before = place.home / "sheet.png", held(place)
    output = place.miles("rescore", "latest", "--output", str(sheet), *OTHER)
    assert len(re.findall("rewards +reused", output)) == 2 and "starting the scorers" not in output
    assert "before: jpeg-" in output and "after: jpeg-" in output
    for name, groups in (("0", 2), ("1", 2), ("all", 4)):
        assert re.search(rf"^ +{name} +\d+ +-0\.\S+ +[\d.]+ +-1\.000 +-1\.000 +{groups} of {groups}$", output, re.M)
    assert sheet.read_bytes()[1:4] == b"PNG" and held(place) == before
    one = place.miles("rescore", "tiny", "--iterations", "1", "--sheet", "0", *OTHER)
    assert " all " not in one and "disagree" not in one
    assert "rescore with what?" in place.miles("rescore", "tiny", code=2)
    assert "--lr affects update, not rewards" in place.miles("rescore", "tiny", "--lr", "0.5", code=2)


def test_forced_remakes_are_identical(place: Place, trained: str) -> None:
    output = place.miles("rerun", "tiny", "0:2", "rewards", "--force")
    assert len(re.findall(r"compared with \w+: identical", output)) == 2
    output = place.miles("rerun", "tiny", "1", "rollout", "--force")
    rollout = place.on_line("tiny", 1, "rollout")
    assert f"compared with {rollout.attempt}: identical" in output
    assert [m.attempt for m in place.store("tiny").committed("rollout", 1)] == [rollout.attempt, f"{rollout.attempt}.2"]


def test_an_iteration_that_cannot_be_made_keeps_no_other_back(place: Place, trained: str) -> None:
    rewards = place.home / "artifacts/tiny" / place.on_line("tiny", 0, "rewards").folder.removeprefix("tiny/")
    part = next((rewards / "data").iterdir())
    content = part.read_bytes()
    part.unlink()
    try:
        output = place.miles("rerun", "tiny", "0:2", "advantages", "--globalize-reward-mean", code=1)
    finally:
        part.write_bytes(content)
    assert "  failed: run tiny: rewards of iteration 0 is damaged" in output and "Traceback" not in output
    assert output.rstrip().splitlines()[-1].startswith("miles: advantages failed in 1 of 2 iterations")
    assert len(place.store("tiny").committed("advantages", 1)) == 2
    output = place.miles("rerun", "tiny", "0:2", "advantages", "--globalize-reward-mean")
    assert len(re.findall("advantages +computed", output)) == len(re.findall("advantages +reused", output)) == 1


def test_a_fork_trains_on_from_an_attempt_and_its_parent_stays(place: Place, scored: str) -> None:
    before = held(place)
    attempts = re.findall(r"--from-attempt (\w+)", scored)
    output = place.miles("fork", "tiny", "1", "--from-attempt", attempts[1], "--run-id", "other")
    assert "it keeps iteration 0, and of iteration 1 prompts, rollout, rewards" in output
    command = shlex.split(output.splitlines()[-1])
    assert command[:5] == ["miles", "train", "tiny", "--run-id", "other"]
    output = place.miles(*command[1:])
    assert "iteration 0: reused" in output
    for stage in ITERATION_STAGES:
        word = "reused" if stage in ("prompts", "rollout", "rewards") else "computed"
        assert re.search(rf"{stage} +{word}", output), output
    child, parent = (place.on_line(run, 1, "update") for run in ("other", "tiny"))
    assert child.content_digest != parent.content_digest
    assert child.upstream["rollout"].run == "tiny" and child.upstream["policy"].run == "tiny"
    assert held(place) == before
    assert "a fork of tiny at iteration 1" in place.miles("show", "other")
    assert "exists already" in place.miles("fork", "tiny", "1", "--run-id", "other", code=2)
