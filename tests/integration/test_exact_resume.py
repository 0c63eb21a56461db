"""Killed anywhere and given again, a run ends with the bits of one that was never disturbed."""

import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from commands import Place

from miles_core.store.parts import read_table
from miles_core.store.stages import ITERATION_STAGES

pytestmark = pytest.mark.integration

ITERATIONS, ENGINES, RANKS, SAMPLES, MICROGROUPS = 3, 2, 2, 16, 8
# An engine has one request at work and one behind it.
IN_FLIGHT = 2 * ENGINES
OPTIONS = [
    "--num-rollout",
    str(ITERATIONS),
    "--rollout-num-engines",
    str(ENGINES),
    "--actor-num-gpus-per-node",
    str(RANKS),
    *("--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--rollout-microgroup-size", "2"),
    *("--keep-full-checkpoints", "0"),
    *("--diffusion-num-steps", "4", "--num-steps-per-rollout", "2", "--micro-batch-size", "4"),
]
# Each in the second iteration: rollout and rewards pass 8 microgroups an iteration, two ranks two steps.
KILLS = {
    "the flow, prompts committed": "prompts:end:2:kill9",
    "the flow inside rollout": "rollout:landed:11:kill9",
    "the flow, rollout committed, not on the line": "rollout:after_commit:2:kill9",
    "the flow inside rewards": "rewards:landed:11:kill9",
    "the flow, rewards committed": "rewards:end:2:kill9",
    "the flow, advantages committed": "advantages:end:2:kill9",
    "the flow, all of update made, not committed": "update:before_commit:2:kill9",
    "the flow, update committed, not on the line": "update:after_commit:2:kill9",
    "the flow, sync committed": "sync:end:2:kill9",
    "a trainer in the middle of a step": "update:forward@trainer-1:6:kill9",
}
REPLACED = {
    "an engine": "rollout:generate:11:kill9",
    "a parser while it writes": "rollout:written:11:kill9",
    "a scorer": "rewards:score:11:kill9",
}


@pytest.fixture(scope="module")
def undisturbed(place: Place) -> dict[str, str]:
    """Digests of a run that nothing happened to."""
    train(place, "undisturbed")
    for iteration in range(ITERATIONS):
        assert place.on_line("undisturbed", iteration, "update").summary["grad_norm"] > 0
    digests = place.digests("undisturbed", ITERATIONS)
    assert len(set(digests.values())) == len(digests), "nothing changes from iteration to iteration"
    return digests


def train(place: Place, run: str, code: int = 0, **variables: str) -> str:
    return place.miles("train", "tiny", "--run-id", run, *OPTIONS, code=code, **variables)


def check_whole(place: Place, run: str, undisturbed: dict[str, str]) -> None:
    """The same digests, checkpoint tensors and rows as the undisturbed run's, each row once."""
    assert place.digests(run, ITERATIONS) == undisturbed
    for iteration in range(ITERATIONS):
        mine, other = place.checkpoint(run, iteration), place.checkpoint("undisturbed", iteration)
        assert len(mine) > 3 * 15
        assert mine == other
        for stage in ("prompts", "rollout", "rewards", "advantages"):
            rows = [
                index
                for part in place.on_line(run, iteration, stage).data
                for index in read_table(place.store(run).files, part, ["sample_index"])["sample_index"].to_pylist()
            ]
            assert sorted(rows) == list(range(SAMPLES * iteration, SAMPLES * (iteration + 1)))


def landed(place: Place, run: str) -> int:
    """Microgroups of the second iteration whose part is in the store."""
    folder = Path(place.artifacts) / run / "iteration=000001/stage=rollout"
    return len({path.name.split("-")[0] for path in folder.glob("*/data/*.parquet")})


@pytest.mark.parametrize("what", KILLS)
def test_killed_once(place: Place, undisturbed: dict[str, str], what: str) -> None:
    run = re.sub(r"\W+", "-", what)
    output = train(place, run, code=1 if "trainer" in what else -signal.SIGKILL, MILES_FAULT=KILLS[what])
    if "trainer" in what:
        assert "trainer rank 1: the process died" in output
    before = landed(place, run)
    output = train(place, run)
    assert re.search(r"^  \w+ +computed", output, re.MULTILINE), "the fault came after the end"
    check_whole(place, run, undisturbed)
    made_again = MICROGROUPS - place.on_line(run, 1, "rollout").summary["kept_microgroups"]
    if "inside rollout" in what:
        assert 0 < before < MICROGROUPS
        assert made_again - (MICROGROUPS - before) <= IN_FLIGHT
    if "inside rewards" in what or "rewards committed" in what:
        assert re.search(r"rollout +reused", output) or made_again - (MICROGROUPS - before) <= IN_FLIGHT


@pytest.mark.parametrize("what", REPLACED)
def test_replaced_while_the_iteration_goes_on(place: Place, undisturbed: dict[str, str], what: str) -> None:
    run = re.sub(r"\W+", "-", what)
    train(place, run, MILES_FAULT=REPLACED[what])
    check_whole(place, run, undisturbed)
    folder = Path(place.artifacts) / run / "iteration=000001/stage=rollout"
    parts = len(list(folder.glob("*/data/*.parquet")))
    assert parts - MICROGROUPS <= IN_FLIGHT


def test_a_zombie_trainers_work_never_reaches_the_store(place: Place, undisturbed: dict[str, str]) -> None:
    """The driver is killed -9 in the middle of update and the same command given at once: the old ranks are at work
    still, and end without a trace."""
    process = place.start("train", "tiny", "--run-id", "zombie", *OPTIONS, MILES_FAULT="update:after_step:6:slow=20")
    update = Path(place.artifacts) / "zombie/iteration=000001/stage=update"
    wait(lambda: list(update.glob("*/attempt.json")))
    ranks = {
        child.pid
        for child in psutil.Process(process.pid).children(recursive=True)
        if child.name().startswith("ray::TrainerActor")
    }
    assert len(ranks) == RANKS
    time.sleep(1.0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert all(psutil.pid_exists(pid) for pid in ranks)
    (old,) = update.glob("*")
    assert [path.name for path in old.rglob("*") if path.is_file()] == ["attempt.json"]
    train(place, "zombie")
    assert not any(psutil.pid_exists(pid) for pid in ranks)
    assert [path.name for path in old.rglob("*") if path.is_file()] == ["attempt.json"]
    check_whole(place, "zombie", undisturbed)


def test_a_resume_of_a_resume(place: Place, undisturbed: dict[str, str]) -> None:
    """(pitfall 46)"""
    for fault in ("rollout:landed:3:kill9", "rewards:landed:2:kill9", "update:before_commit:1:kill9"):
        train(place, "again", code=-signal.SIGKILL, MILES_FAULT=fault)
    output = train(place, "again")
    assert "processes of an earlier command are taken over" in output
    check_whole(place, "again", undisturbed)
    assert train(place, "again").count(": reused") == ITERATIONS


def test_the_stages_of_the_table_are_all_there() -> None:
    killed = {fault.split(":")[0] for fault in [*KILLS.values(), *REPLACED.values()]}
    assert set(ITERATION_STAGES) == killed


def wait(condition: Callable[[], object], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()
