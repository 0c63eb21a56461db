"""Fault points fire at the passage asked for, once, and nowhere else."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from miles_core.errors import InputError
from miles_core.runtime.faults import POINTS, FaultInjected, arm, arm_actor, fault_point, parse_faults


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch):
    """Ask for faults; the environment is put back afterwards."""
    for name in ("MILES_FAULT", "MILES_FAULT_COUNTS", "MILES_FAULT_NAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def given(text: str) -> dict[str, str]:
        monkeypatch.setenv("MILES_FAULT", text)
        monkeypatch.delenv("MILES_FAULT_COUNTS", raising=False)
        return arm()

    return given


def test_without_the_variable_nothing_is_armed(ask) -> None:
    assert ask("") == {}
    fault_point("update:after_step")


def test_the_passage_asked_for_fails_and_no_other(ask) -> None:
    ask("update:after_step:2:error")
    fault_point("update:after_step")
    fault_point("update:write")
    with pytest.raises(FaultInjected, match="update:after_step"):
        fault_point("update:after_step")
    fault_point("update:after_step")


def test_one_actor_is_meant_by_its_name(ask) -> None:
    environment = ask("update:forward@trainer-1:1:error")
    fault_point("update:forward")
    arm_actor("trainer-0", environment)
    fault_point("update:forward")
    arm_actor("trainer-1", environment)
    with pytest.raises(FaultInjected):
        fault_point("update:forward")


def test_an_armed_point_fails_once_and_can_be_armed_again(ask, tmp_path: Path, monkeypatch) -> None:
    ask("rewards:score:armed:error")
    monkeypatch.setenv("MILES_FAULT_COUNTS", str(tmp_path))
    for _ in range(2):
        fault_point("rewards:score")
        (tmp_path / "rewards-score.armed").touch()
        with pytest.raises(FaultInjected):
            fault_point("rewards:score")
        assert (tmp_path / "rewards-score.reached").exists()
    fault_point("rewards:score")


def pass_by(environment: dict[str, str]) -> None:
    arm_actor("engine-0", environment)
    for _ in range(3):
        fault_point("rollout:generate")


def test_passages_are_counted_over_processes_and_kill9_ends_one_of_them(ask) -> None:
    environment = ask("rollout:generate:5:kill9")
    processes = [multiprocessing.Process(target=pass_by, args=(environment,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(p.exitcode for p in processes) == [-signal.SIGKILL, 0, 0]


def test_stop_and_slow_do_what_they_say(ask, tmp_path: Path) -> None:
    environment = ask("sync:push:1:stop")
    code = "from miles_core.runtime.faults import fault_point; fault_point('sync:push')"
    process = subprocess.Popen([sys.executable, "-c", code], env=os.environ | environment)
    deadline = time.monotonic() + 60
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.02)
    assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    process.kill()
    process.wait()
    ask("sync:push:1:slow=0.3")
    started = time.monotonic()
    fault_point("sync:push")
    assert time.monotonic() - started >= 0.3


@pytest.mark.parametrize(
    "text",
    ["update", "update:after_step:0:kill9", "update:after_step:x:kill9", "update:after_step:1:explode", "a:b:1:error"],
)
def test_what_is_no_fault_is_refused(ask, text: str) -> None:
    with pytest.raises(InputError, match="MILES_FAULT"):
        ask(text)


def test_every_point_in_the_sources_is_known_and_every_known_one_is_there() -> None:
    sources = [p.read_text() for p in (Path(__file__).parents[3] / "miles_core").rglob("*.py")]
    inside = {point for point in POINTS if any(f'fault_point("{point}")' in text for text in sources)}
    boundaries = {point for point in POINTS if point.split(":")[1] in ("start", "before_commit", "after_commit", "end")}
    assert inside | boundaries == set(POINTS)
    assert parse_faults(",".join(f"{point}:1:error" for point in POINTS))


def test_held_goes_on_when_it_is_told_to(ask) -> None:
    folder = Path(ask("sync:push:1:held")["MILES_FAULT_COUNTS"])
    threading.Timer(0.3, (folder / "sync-push.go").touch).start()
    started = time.monotonic()
    fault_point("sync:push")
    assert 0.25 < time.monotonic() - started < 30
