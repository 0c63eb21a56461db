"""A run's actors on a real Ray head: fenced by epochs, left to the next command, ended when nobody comes."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.ray_driver import driver, environment

pytestmark = pytest.mark.integration

LEAVE = """
w = workers(1, rollout_parser_num_workers=2, actor_idle_minutes=float(sys.argv[1]))
parsers = w.parsers()
statuses = w.ray.get([p.status() for p in parsers])
tell("pids", *[s.pid for s in statuses])
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def home(tmp_path: Path):
    yield tmp_path
    subprocess.run([Path(sys.executable).parent / "miles", "down"], env=environment(tmp_path), check=True)


def pids_of(lines: list[list[str]]) -> list[int]:
    return [int(word) for line in lines if line[0] == "pids" for word in line[1:]]


def wait(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert condition()


def test_idle_actors_of_a_killed_command_are_taken_over_and_refuse_its_epoch(home: Path) -> None:
    left = pids_of(driver(home, LEAVE, "30", returncode=-9))
    assert all(psutil.pid_exists(pid) for pid in left)
    take_over = """
with workers(2, rollout_parser_num_workers=2, actor_idle_minutes=30.0) as w:
    parsers = w.parsers()
    tell("pids", *[s.pid for s in w.ray.get([p.status() for p in parsers])])
    for call in (parsers[0].handle.work.remote(1, "write"), parsers[0].handle.status.remote(1)):
        try:
            w.get([call], "a call of the old epoch")
        except Exception as fault:
            tell(type(fault).__name__, fault)
"""
    lines = driver(home, take_over)
    assert pids_of(lines) == left
    refused = [" ".join(line) for line in lines if line[0] == "StaleEpoch"]
    assert len(refused) == 2
    assert all("parser-0 belongs to epoch 2 and refuses epoch 1" in line for line in refused)
    wait(lambda: not any(psutil.pid_exists(pid) for pid in left))


def test_actors_made_from_other_things_are_not_taken_over(home: Path) -> None:
    left = pids_of(driver(home, LEAVE, "30", returncode=-9))
    other = """
with workers(2, rollout_parser_num_workers=2, lr=0.5) as w:
    tell("pids", *[s.pid for s in w.ray.get([p.status() for p in w.parsers()])])
"""
    new = pids_of(driver(home, other))
    assert len(new) == 2
    assert not set(new) & set(left)


def test_a_busy_or_silent_actor_is_ended_before_anything_else(home: Path) -> None:
    left = pids_of(driver(home, LEAVE, "30", returncode=-9))
    psutil.Process(left[0]).suspend()
    connect = """
import psutil
with workers(2, rollout_parser_num_workers=2, actor_idle_minutes=30.0) as w:
    w.connect()
    tell("alive", psutil.pid_exists(int(sys.argv[1])), psutil.pid_exists(int(sys.argv[2])), sorted(w._left))
"""
    lines = driver(home, connect, *map(str, left))
    assert ["alive", "False", "True", "['parser-1']"] in lines


def test_nobodys_actors_and_head_end_themselves(home: Path) -> None:
    left = pids_of(driver(home, LEAVE, "0.5", returncode=-9))
    head = psutil.Process(left[0]).parent()
    assert head is not None and head.is_running()
    wait(lambda: not any(psutil.pid_exists(pid) for pid in left))
    wait(lambda: not head.is_running())
    wait(lambda: not list((home / "state").glob("ray-*.json")))
