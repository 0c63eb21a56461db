"""Ray heads on this machine: each with a keeper that ends it when no command has used it for a while.

A head is noted in a file of the state folder: who uses it, who keeps it, its folder, address, token and the run it was
started for. A command that was killed leaves its head to the next one of the same run.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
from filelock import FileLock

from miles_core.errors import StageError
from miles_core.store.digest import canonical_json, sha256_hex
from miles_core.store.process import machine, start_of

START_SECONDS = 180
STARTS = 3
Identity = tuple[int, float]


@dataclass(frozen=True)
class Head:
    """A head's note. owner: the command that uses it, None where it was left on purpose. run: "" for one that no
    other command may use. machine: where the process numbers mean something. environment: digest of the variables
    that its processes inherit and results go by. address is empty until it is up."""

    folder: str
    token: str
    run: str
    idle_seconds: float
    machine: str
    environment: str
    owner: Identity | None
    keeper: Identity | None = None
    address: str = ""

    @property
    def used(self) -> bool:
        return self.owner is not None and alive(self.owner)

    @property
    def kept(self) -> bool:
        return self.keeper is not None and alive(self.keeper)


def identity(pid: int) -> Identity:
    """A process's number and start, which together are no other process's."""
    return pid, start_of(pid) or 0.0


def alive(who: Identity) -> bool:
    """Whether that very process lives."""
    return start_of(int(who[0])) == who[1]


def environment_digest() -> str:
    """Of the AWS variables: what a head's processes write goes where its own say."""
    named = sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
    return sha256_hex(canonical_json(named))


def start_head(state: Path, token: str, run: str, idle_seconds: float) -> tuple[Path, Head]:
    """A new head of this process's, up. One that ends at its start is tried again: another process may have taken a port that
    was free a moment before. Raises StageError with its last lines where it does not come up."""
    for _ in range(STARTS):
        note, head, ended, lines = _start_once(state, token, run, idle_seconds)
        if head:
            return note, head
        if not ended:
            raise StageError(f"the Ray head did not start within {START_SECONDS} s: {lines}")
    raise StageError(f"the Ray head ended at its start, {STARTS} times: {lines}")


def _start_once(state: Path, token: str, run: str, idle_seconds: float) -> tuple[Path, Head | None, bool, str]:
    """Its note; the head where it came up, else whether it ended by itself, and the last lines that it wrote."""
    folder = Path(tempfile.mkdtemp(prefix="miles-ray-"))
    note = state / f"{folder.name.removeprefix('miles-')}.json"
    mine = identity(os.getpid())
    write_note(note, Head(str(folder), token, run, idle_seconds, machine(), environment_digest(), mine))
    # The keeper removes the folder at its end; what it wrote can still be read here.
    with (folder / "head.log").open("w+b") as log:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "miles_core.runtime.keeper", str(note)],
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_SECONDS
        try:
            while time.monotonic() < deadline and keeper.poll() is None:
                head = read_note(note)
                if head and head.address:
                    return note, head, False, ""
                time.sleep(0.05)
        except BaseException:
            end_head(note)
            raise
        ended = keeper.poll() is not None
        end_head(note)
        log.seek(0)
        return note, None, ended, " | ".join(log.read().decode(errors="replace").strip().splitlines()[-5:])


def adopt_head(state: Path, run: str) -> tuple[Path, Head] | None:
    """The head that a killed command of this run left, or one that was left on purpose; now this process's."""
    with _notes_lock(state):
        for note, head in notes(state):
            fits = head.run == run and head.run and head.environment == environment_digest()
            if fits and head.kept and head.address and not head.used:
                mine = replace(head, owner=identity(os.getpid()))
                write_note(note, mine)
                return note, mine
    return None


def leave_head(note: Path) -> None:
    """Leave a head to the next command of its run; its keeper ends it when none comes."""
    head = read_note(note)
    if head:
        write_note(note, replace(head, owner=None))


def end_head(note: Path) -> bool:
    """End a head, its keeper and all below; whether anything was there to end."""
    head = read_note(note)
    note.unlink(missing_ok=True)
    if head is None:
        return False
    found = False
    if head.keeper and head.kept:
        found = True
        end_process_group(int(head.keeper[0]))
    for pid in [pid for pid in psutil.pids() if _works_in(pid, head.folder)]:
        found = True
        end_process_group(pid)
    shutil.rmtree(head.folder, ignore_errors=True)
    return found


def end_left_heads(state: Path, run: str | None = None, *, unkept_only: bool = False) -> int:
    """End heads that no command uses: of one run where it is given, else of all; or only those that nobody keeps.

    Returns how many there were.
    """
    ended = 0
    with _notes_lock(state):
        for note, head in notes(state):
            if not head.used and run in (None, head.run) and not (unkept_only and head.kept):
                ended += end_head(note)
    return ended


def notes(state: Path) -> Iterator[tuple[Path, Head]]:
    """All notes of this machine; one that cannot be read is dropped."""
    for note in sorted(state.glob("ray-*.json")):
        head = read_note(note)
        if head is None:
            note.unlink(missing_ok=True)
        elif head.machine == machine():
            yield note, head


def read_note(note: Path) -> Head | None:
    """None where there is none, or where it is no note."""
    try:
        body = json.loads(note.read_text())
        owner, keeper = (None if body[k] is None else (int(body[k][0]), float(body[k][1])) for k in ("owner", "keeper"))
        return Head(**{**body, "owner": owner, "keeper": keeper})
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def write_note(note: Path, head: Head) -> None:
    """Whole or not at all; its token is for this user alone."""
    note.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=note.parent)
    with os.fdopen(handle, "w") as file:
        json.dump(asdict(head), file)
    os.replace(unfinished, note)


def end_process_group(pid: int, patience: float = 10) -> None:
    """End a process and all below it: politely first, then for good."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    _, alive_still = psutil.wait_procs(family, timeout=patience)
    for process in alive_still:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive_still, timeout=patience)


def _notes_lock(state: Path) -> FileLock:
    state.mkdir(parents=True, exist_ok=True)
    return FileLock(state / ".ray.lock")


def _works_in(pid: int, folder: str) -> bool:
    try:
        return pid != os.getpid() and any(
            word.startswith("--") and folder in word for word in psutil.Process(pid).cmdline()
        )
    except psutil.Error:
        return False
