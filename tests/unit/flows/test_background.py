"""A process that outlives its command: known while it lives, and not when it is a zombie."""

import os
import sys
import time
from pathlib import Path

import pytest

from flows.cli.background import Background


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Background:
    monkeypatch.setenv("MILES_HOME", str(tmp_path))
    return Background("sleeper")


def test_it_is_known_until_it_is_ended(process: Background) -> None:
    assert process.record() is None and not process.end()
    started = process.start(
        [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"], os.environ, a=1
    )
    record = process.record()
    assert record is not None and record["pid"] == started.pid and record["a"] == 1
    while process.log.read_bytes() != b"up\n":
        time.sleep(0.01)
    assert process.end()
    assert process.record() is None


def test_a_killed_one_that_nobody_waited_for_does_not_live(process: Background) -> None:
    started = process.start(["sleep", "60"], os.environ)
    assert process.record() is not None
    os.kill(started.pid, 9)
    end = time.monotonic() + 10
    while process.record() is not None:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert started.poll() is not None
