"""Ray heads that a killed command left: found by their folder, whatever is noted of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from miles_core.runtime.cluster import end_left_heads


def process(folder: Path) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"--temp-dir={folder}"])


def note(state: Path, folder: Path, owner: list[float]) -> Path:
    state.mkdir(exist_ok=True)
    record = state / "ray-x.json"
    record.write_text(json.dumps({"owner": owner, "folder": str(folder)}))
    return record


def test_a_head_whose_owner_is_gone_is_ended(tmp_path: Path) -> None:
    left = process(tmp_path / "head")
    record = note(tmp_path / "state", tmp_path / "head", [2**22 + 1, 0.0])
    assert end_left_heads(tmp_path / "state") == 1
    assert not psutil.pid_exists(left.pid)
    assert not record.exists()


def test_a_head_whose_owner_lives_is_left_alone(tmp_path: Path) -> None:
    mine = process(tmp_path / "head")
    record = note(tmp_path / "state", tmp_path / "head", [os.getpid(), psutil.Process().create_time()])
    assert end_left_heads(tmp_path / "state") == 0
    assert mine.poll() is None
    assert record.exists()
    mine.kill()
    mine.wait()


@pytest.mark.parametrize("content", ["", "{", "null", "[]", "{}", '{"owner": []}', '{"owner": [], "folder": "x"}'])
def test_a_note_that_is_none_is_dropped(tmp_path: Path, content: str) -> None:
    (tmp_path / "ray-1.json").write_text(content)
    assert end_left_heads(tmp_path) == 0
    assert not (tmp_path / "ray-1.json").exists()
