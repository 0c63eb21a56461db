"""Notes of Ray heads: what is ended, what is left to the next command, whatever a note holds."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles_core.errors import StageError
from miles_core.runtime import heads
from miles_core.runtime.heads import (
    Head,
    adopt_head,
    end_left_heads,
    environment_digest,
    identity,
    leave_head,
    notes,
    read_note,
    start_head,
    write_note,
)
from miles_core.store.process import machine

GONE = (2**22 + 1, 0.0)


@pytest.fixture
def sleeper(tmp_path: Path):
    """A process that works in the head's folder."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", f"--temp-dir={tmp_path / 'head'}"])
    yield process
    process.kill()
    process.wait()


def head(tmp_path: Path, **changes: object) -> Path:
    note = tmp_path / "state" / "ray-x.json"
    made = Head(
        str(tmp_path / "head"), "token", "run-1", 60.0, machine(), environment_digest(), GONE, None, "127.0.0.1:1"
    )
    write_note(note, replace(made, **changes))  # type: ignore[arg-type]
    return note


def me() -> tuple[int, float]:
    return identity(os.getpid())


def test_a_head_whose_owner_is_gone_is_ended_with_all_that_works_in_its_folder(tmp_path: Path, sleeper) -> None:
    note = head(tmp_path)
    assert end_left_heads(tmp_path / "state") == 1
    assert not psutil.pid_exists(sleeper.pid)
    assert not note.exists()


def test_a_head_whose_owner_lives_is_left_alone(tmp_path: Path, sleeper) -> None:
    note = head(tmp_path, owner=me())
    assert end_left_heads(tmp_path / "state") == 0
    assert sleeper.poll() is None
    assert note.exists()


def test_a_head_that_is_kept_for_the_next_command_of_its_run_is_left_alone(tmp_path: Path, sleeper) -> None:
    note = head(tmp_path, keeper=identity(sleeper.pid))
    assert end_left_heads(tmp_path / "state", unkept_only=True) == 0
    assert end_left_heads(tmp_path / "state", "another-run") == 0
    assert note.exists()
    assert end_left_heads(tmp_path / "state", "run-1") == 1
    assert not note.exists()


def test_the_next_command_of_the_run_takes_it_over_once(tmp_path: Path, sleeper) -> None:
    note = head(tmp_path, keeper=identity(sleeper.pid))
    assert adopt_head(tmp_path / "state", "another-run") is None
    taken = adopt_head(tmp_path / "state", "run-1")
    assert taken is not None
    assert taken[0] == note and read_note(note).owner == me()  # type: ignore[union-attr]
    assert adopt_head(tmp_path / "state", "run-1") is None
    leave_head(note)
    assert read_note(note).owner is None  # type: ignore[union-attr]
    assert adopt_head(tmp_path / "state", "run-1") is not None


@pytest.mark.parametrize("changes", [{"keeper": GONE}, {"keeper": None}, {"address": ""}, {"run": ""}])
def test_a_head_that_is_not_whole_or_belongs_to_nobody_is_not_taken_over(
    tmp_path: Path, sleeper, changes: dict
) -> None:
    head(tmp_path, **({"keeper": identity(sleeper.pid)} | changes))
    assert adopt_head(tmp_path / "state", "run-1") is None
    assert adopt_head(tmp_path / "state", "") is None


@pytest.mark.parametrize("changes", [{"machine": "another"}, {"environment": "other keys"}])
def test_another_machines_head_or_one_with_other_credentials_is_not_taken_over(
    tmp_path: Path, sleeper, changes: dict
) -> None:
    """A folder may be shared by machines and containers, and a renewed token reaches no process that runs."""
    head(tmp_path, **({"keeper": identity(sleeper.pid)} | changes))
    assert adopt_head(tmp_path / "state", "run-1") is None


def test_another_machines_head_is_never_ended_from_here(tmp_path: Path, sleeper) -> None:
    note = head(tmp_path, machine="another")
    assert end_left_heads(tmp_path / "state") == 0
    assert sleeper.poll() is None and note.exists()


def test_the_credentials_are_in_the_note_as_a_digest_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment_digest()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    assert environment_digest() != before
    assert "very-secret" not in head(tmp_path).read_text()


def test_a_note_is_for_its_user_alone(tmp_path: Path) -> None:
    assert head(tmp_path).stat().st_mode & 0o077 == 0


def test_a_zombie_keeps_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    who = identity(process.pid)
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    note = head(tmp_path, keeper=who)
    assert not read_note(note).kept  # type: ignore[union-attr]
    process.wait()


@pytest.mark.parametrize("content", ["", "{", "null", "[]", "{}", '{"owner": []}', '{"owner": [], "folder": "x"}'])
def test_a_note_that_is_none_is_dropped(tmp_path: Path, content: str) -> None:
    (tmp_path / "ray-1.json").write_text(content)
    assert list(notes(tmp_path)) == []
    assert end_left_heads(tmp_path) == 0
    assert not (tmp_path / "ray-1.json").exists()


KEEPER = """
import pathlib, sys, time
from dataclasses import replace
from miles_core.runtime.heads import read_note, write_note
tries = pathlib.Path({tries!r})
tries.write_text(tries.read_text() + "x")
note = pathlib.Path(sys.argv[1])
if len(tries.read_text()) < {good}:
    import shutil
    shutil.rmtree(read_note(note).folder)
    sys.exit("port 6379 is taken")
write_note(note, replace(read_note(note), address="127.0.0.1:1"))
# One that ends is tried again.
time.sleep(3)
"""


@pytest.mark.parametrize("good", [1, 3, 4])
def test_a_head_that_ends_at_its_start_is_tried_again_and_its_words_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: int
) -> None:
    tries = tmp_path / "tries"
    tries.write_text("")
    code = KEEPER.format(tries=str(tries), good=good)
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", code, command[-1]], **options)

    monkeypatch.setattr(heads.subprocess, "Popen", popen)
    if good > heads.STARTS:
        with pytest.raises(StageError, match="ended at its start, 3 times: port 6379 is taken"):
            start_head(tmp_path / "state", "token", "run", 60.0)
        assert not list((tmp_path / "state").glob("ray-*"))
    else:
        note, found = start_head(tmp_path / "state", "token", "run", 60.0)
        assert found.address == "127.0.0.1:1" and list((tmp_path / "state").glob("ray-*")) == [note]
    assert len(tries.read_text()) == min(good, heads.STARTS)
