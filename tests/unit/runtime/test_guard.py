"""A guarded command ends with who wanted it, however that ends, and takes its own children along."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from miles_core.runtime.guard import Guarded

# A command with a child; both in sight by the file that they are told to write their numbers into.
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
open(sys.argv[1] + ".part", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".part", sys.argv[1])
print("up", flush=True)
if sys.argv[2] == "stay":
    time.sleep(300)
"""
WANTER = """
import os, sys, time
from pathlib import Path
from miles_core.runtime.guard import Guarded
held = Guarded([sys.executable, "-c", sys.argv[1], sys.argv[2], "stay"], os.environ, Path(sys.argv[2] + ".log"))
time.sleep(300)
"""


def family(told: Path) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while not told.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [psutil.Process(int(word)) for word in told.read_text().split()]


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=30)
    return not alive


def started(tmp_path: Path, way: str = "stay") -> Guarded:
    command = [sys.executable, "-c", FAMILY, str(tmp_path / "told"), way]
    return Guarded(command, os.environ, tmp_path / "told.log")


def test_it_is_ended_with_all_below_it(tmp_path: Path) -> None:
    held = started(tmp_path)
    there = family(tmp_path / "told")
    assert not held.ended()
    held.end()
    assert held.ended() and gone(there)
    assert (tmp_path / "told.log").read_text() == "up\n"
    held.end()


def test_where_it_ends_itself_its_children_do_not_outlive_it(tmp_path: Path) -> None:
    held = started(tmp_path, "leave")
    assert held.ended(30)
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(int(word)) for word in (tmp_path / "told").read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("stopped", [False, True])
def test_it_does_not_outlive_who_wanted_it(tmp_path: Path, stopped: bool) -> None:
    """Killed -9; also where the command is stopped and hears no signal but that."""
    told = tmp_path / "told"
    with subprocess.Popen([sys.executable, "-c", WANTER, FAMILY, str(told)]) as wanter:
        there = family(told)
        if stopped:
            there[0].send_signal(signal.SIGSTOP)
        wanter.kill()
    assert gone(there)
