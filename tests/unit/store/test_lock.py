"""One command at a time moves a run's line; a dead one's place is taken, and what it still tries is refused."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from roots import Root

from miles_core.errors import InputError, StoreError
from miles_core.store.files import Files
from miles_core.store.lock import Held, Holder, LockLost, RunLock, read_lock, request_stop
from miles_core.store.process import start_of

LEASE = 0.6


@pytest.fixture
def files(root: Root) -> Files:
    return root.files


def lock(files: Files) -> RunLock:
    return RunLock(files, "run", lease_seconds=LEASE)


def write(files: Files, held: Held) -> None:
    files.replace("run/lock.json", held.to_bytes())


def foreign(files: Files, **changes: object) -> Held:
    """The lock as a process of another machine holds it."""
    elsewhere = Holder("other-host", "another machine", 1, 0.0)
    held = replace(Held(7, elsewhere, "beat", LEASE), **changes)  # type: ignore[arg-type]
    write(files, held)
    return held


def take_and_wait(root: str) -> None:
    RunLock(Files(root), "run", lease_seconds=LEASE).take()
    print("taken", flush=True)
    time.sleep(60)


def holder_process(root: str) -> subprocess.Popen:
    folders = [str(Path(__file__).parents[n]) for n in (0, 2)]
    code = f"import sys; sys.path[:0] = {folders!r}; import test_lock; test_lock.take_and_wait({root!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"taken\n"
    return process


def test_epochs_grow_from_holder_to_holder(files: Files) -> None:
    first = lock(files)
    assert first.take() == 1
    first.release()
    second = lock(files)
    assert second.take() == 2
    second.check()
    with pytest.raises(LockLost, match="taken over by process"):
        first.check()


def test_an_epoch_is_above_the_records_where_the_lock_was_lost(files: Files) -> None:
    assert lock(files).take(above=41) == 42


def test_a_process_that_lives_is_named_and_kept(files: Files) -> None:
    process = holder_process(files.root)
    with pytest.raises(InputError, match=rf"run run is being trained by process {process.pid} on .*miles stop run"):
        lock(files).take()
    assert read_lock(files, "run").epoch == 1  # type: ignore[union-attr]
    process.kill()
    process.wait()


def test_the_place_of_a_killed_process_is_taken_at_once(files: Files) -> None:
    process = holder_process(files.root)
    process.send_signal(signal.SIGKILL)
    process.wait()
    started = time.monotonic()
    assert RunLock(files, "run", lease_seconds=3600).take() == 2
    assert time.monotonic() - started < 5


def test_a_process_number_that_was_given_out_again_is_not_the_holder(files: Files) -> None:
    mine = Holder.this_process()
    write(files, Held(3, replace(mine, started=mine.started - 100), "beat", 3600))
    assert lock(files).take() == 4


def test_another_machines_lease_is_waited_for(files: Files) -> None:
    foreign(files)
    said: list[str] = []
    started = time.monotonic()
    assert lock(files).take(said.append) == 8
    assert LEASE <= time.monotonic() - started < 20 * LEASE
    assert len(said) == 1 and "process 1 on other-host" in said[0]


def test_another_machines_holder_that_renews_keeps_its_place(files: Files) -> None:
    foreign(files)
    renewal = threading.Timer(LEASE / 3, lambda: foreign(files, beat="the next one"))
    renewal.start()
    with pytest.raises(InputError, match="process 1 on other-host"):
        lock(files).take()
    renewal.join()
    assert read_lock(files, "run").epoch == 7  # type: ignore[union-attr]


def test_who_loses_the_race_for_a_dead_lease_sees_the_winner(files: Files) -> None:
    dead = foreign(files)
    winner = lock(files)
    winner.take()
    loser = lock(files)
    assert loser._try(dead=dead) is not None
    assert loser.epoch == 0
    winner.check()


def test_a_holder_renews_and_learns_that_it_lost(files: Files) -> None:
    held = lock(files)
    held.take()
    beats: list[int] = []
    lost: list[str] = []
    held.keep(on_beat=lambda: beats.append(1), on_lost=lost.append)
    first = read_lock(files, "run").beat  # type: ignore[union-attr]
    wait(lambda: len(beats) >= 2)
    assert read_lock(files, "run").beat != first  # type: ignore[union-attr]
    assert lost == []
    foreign(files, epoch=9)
    wait(lambda: lost)
    assert "taken over by process 1 on other-host" in lost[0]
    with pytest.raises(LockLost):
        held.check()
    held.release()
    assert not read_lock(files, "run").released, "another's lock is not given back"  # type: ignore[union-attr]


def test_a_holder_is_asked_to_stop(files: Files) -> None:
    held = lock(files)
    held.take()
    lost: list[str] = []
    held.keep(on_beat=lambda: None, on_lost=lost.append)
    request_stop(files, "run", 1)
    wait(lambda: lost)
    assert lost == ["run run was asked to stop"]
    held.release()
    assert read_lock(files, "run").released  # type: ignore[union-attr]


def test_a_stop_is_for_the_holder_that_was_seen(files: Files) -> None:
    held = lock(files)
    held.take()
    request_stop(files, "run", 7)
    assert not read_lock(files, "run").stop_requested  # type: ignore[union-attr]


def test_the_processes_go_on_being_renewed_while_the_store_is_out(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = lock(files)
    held.take()
    beats: list[int] = []

    def out(*_: object) -> None:
        raise StoreError("no answer")

    monkeypatch.setattr(RunLock, "_renew", out)
    held.keep(on_beat=lambda: beats.append(1), on_lost=lambda why: None)
    wait(lambda: len(beats) >= 2)
    held.release()


def test_a_process_is_known_by_a_start_that_no_clock_moves() -> None:
    ticks = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]
    assert start_of(os.getpid()) == float(ticks)
    assert start_of(2**22 + 1) is None


@pytest.mark.parametrize("content", [b"", b"{", b"null", b"[]", b'{"epoch": 3}'])
def test_a_lock_that_cannot_be_read_keeps_nobody_out(files: Files, content: bytes) -> None:
    files.replace("run/lock.json", content)
    assert lock(files).take() == 1
    assert json.loads(files.read("run/lock.json"))["holder"]["pid"] == os.getpid()


def test_a_zombie_is_dead(files: Files) -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    started = start_of(process.pid)
    assert started is not None
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    write(files, Held(1, replace(Holder.this_process(), pid=process.pid, started=started), "beat", 3600))
    assert lock(files).take() == 2
    process.wait()


def wait(condition: object, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.01)
    assert condition()  # type: ignore[operator]
