"""A full and a read-only disk: one sentence, no half-written file under its final name, no manifest, and the same work
goes on once there is room."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from roots import FolderRoot

from miles_core.errors import StageError, StoreError
from miles_core.store.files import Files
from miles_core.store.manifest import Manifest
from miles_core.store.parts import write_file
from miles_core.store.run_store import RunStore

SIZE = 256 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FolderRoot]:
    """A small disk of its own, with one file on it."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting a small disk is not permitted here: {done.stderr.decode().strip()}")
    root = FolderRoot(tmp_path)
    root.files.create("r/there.json", b"1")
    try:
        yield root
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def fill(root: FolderRoot) -> None:
    """Take all the room that is left."""
    with (root.folder / "filler").open("wb", buffering=0) as file:
        file.write(bytes(SIZE))
        with pytest.raises(OSError, match="No space left"):
            file.write(b"1")


def make_read_only(root: FolderRoot) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(root.folder)], check=True)


def make_writable(root: FolderRoot) -> None:
    subprocess.run(["mount", "-o", "remount,rw", str(root.folder)], check=True)


LARGE = bytes(16 * 1024)
WRITES: dict[str, Callable[[Files], Any]] = {
    "create": lambda files: files.create("r/new.json", LARGE),
    "create in a new folder": lambda files: files.create("r/folder/new.json", LARGE),
    "replace": lambda files: files.replace("r/there.json", LARGE),
    "edit": lambda files: files.edit("r/there.json", lambda data: LARGE),
    "edit of what is not there": lambda files: files.edit("r/new.json", lambda data: LARGE),
}


def refused(work: Callable[[Files], Any], files: Files) -> str:
    with pytest.raises(StoreError) as caught:
        work(files)
    assert isinstance(caught.value, StageError)
    assert "\n" not in str(caught.value) and str(caught.value).endswith("run the same command again to resume")
    return str(caught.value)


def visible(root: FolderRoot) -> dict[str, bytes]:
    return {name: root.get(name) for name in root.names() if ".lock-" not in name and name != "filler"}


@pytest.mark.parametrize("write", WRITES)
def test_on_a_full_disk_a_write_leaves_what_was_there(write: str, disk: FolderRoot) -> None:
    before = visible(disk)
    fill(disk)
    sentence = refused(WRITES[write], disk.files)
    assert f"no space left on {disk.folder}" in sentence and "free some" in sentence
    assert visible(disk) == before == {"r/there.json": b"1"}
    disk.remove("filler")
    WRITES[write](disk.files)
    assert LARGE in visible(disk).values()


@pytest.mark.parametrize("write", WRITES)
def test_on_a_read_only_disk_a_write_leaves_what_was_there(write: str, disk: FolderRoot) -> None:
    before = visible(disk)
    make_read_only(disk)
    sentence = refused(WRITES[write], disk.files)
    assert str(disk.folder) in sentence and "Read-only" in sentence and "make" in sentence
    assert disk.files.read("r/there.json") == b"1"
    assert visible(disk) == before
    make_writable(disk)
    WRITES[write](disk.files)
    assert LARGE in visible(disk).values()


def work(files: Files) -> Manifest:
    """A stage of forty parts, as a resumed rollout makes it: what is there already is kept."""
    store = RunStore(files, "r")
    attempt = store.open_attempt("rollout", 0, "f" * 64, {}, resumable=True)
    there = files.list(attempt.path("data"))
    parts = [
        write_file(files, attempt.path(f"data/{number:02d}.bin"), bytes([number]) * 4096)
        for number in range(40)
        if f"{number:02d}.bin" not in there
    ]
    return store.commit(
        attempt,
        parts=parts,
        upstream={},
        affecting_config={},
        inputs={},
        versions={},
        started_at=0.0,
        summary={},
        flow_run_id=None,
    )


@pytest.mark.parametrize("room", [-1, 0, 12, 39, 40])
def test_a_stage_that_met_a_full_disk_is_resumable(room: int, disk: FolderRoot) -> None:
    """The disk fills up when the stage begins, in its parts, and at its manifest."""
    (disk.folder / "taken").write_bytes(bytes(SIZE - (room + 2) * 4096))
    sentence = refused(work, disk.files)
    assert "no space left" in sentence
    names = [name for name in disk.names() if "stage=rollout" in name]
    assert not any(name.endswith("manifest.json") or ".tmp-" in name for name in names)
    parts = [name for name in names if "/data/" in name]
    assert len(parts) == max(room, 0)
    assert all(disk.get(name) == bytes([number]) * 4096 for number, name in enumerate(parts))
    assert RunStore(disk.files, "r").committed("rollout", 0) == []
    disk.remove("taken")
    made = work(disk.files)
    assert made.attempt == "f" * 12
    assert len(made.parts) == 40 - len(parts)


def test_a_run_record_is_whole_after_a_full_disk(disk: FolderRoot) -> None:
    store = RunStore(disk.files, "r")
    store.create_record({"recipe": "tiny", "config": {}, "meaning": {}})
    before = disk.get("r/run.json")
    fill(disk)
    refused(lambda files: store.update_record(lambda record: record | {"config": {"long": "x" * 8192}}), disk.files)
    assert disk.get("r/run.json") == before
    disk.remove("filler")
    store.update_record(lambda record: record | {"config": {"long": "x"}})
    record = store.record()
    assert record is not None and record["config"] == {"long": "x"}
