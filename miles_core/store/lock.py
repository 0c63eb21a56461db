"""Who may move a run's line: a lease in the store, renewed while its holder lives, taken over when it is out.

Every holder has an epoch of its own, larger than all before it. What an older epoch still tries is refused: by the
run's record, by the actors, and by `check`.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from miles_core.errors import InputError, StageError, StoreError
from miles_core.store.files import Files
from miles_core.store.process import machine, start_of

LEASE_SECONDS = 30.0


class LockLost(StageError):
    """Another command took the run over; nothing more of this one reaches the run's line."""


@dataclass(frozen=True)
class Holder:
    """A process that holds a run's lock. `machine` tells process spaces apart, `started` processes of one number."""

    host: str
    machine: str
    pid: int
    started: float

    @staticmethod
    def this_process() -> "Holder":
        return Holder(socket.gethostname(), machine(), os.getpid(), start_of(os.getpid()) or 0.0)

    def lives_here(self) -> bool | None:
        """Whether the process lives; None where it belongs to another machine."""
        return start_of(self.pid) == self.started if self.machine == machine() else None


@dataclass(frozen=True)
class Held:
    """What lock.json says. `beat` changes with every renewal."""

    epoch: int
    holder: Holder
    beat: str
    lease_seconds: float
    released: bool = False
    stop_requested: bool = False

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()


def read_lock(files: Files, run: str) -> Held | None:
    """The run's lock as it stands; None where nobody ever took it."""
    try:
        return _held(files.read(_path(run)))
    except FileNotFoundError:
        return None


def request_stop(files: Files, run: str, epoch: int) -> None:
    """Ask the holder of this epoch, wherever it runs, to end: it sees this at its next renewal."""

    def change(data: bytes | None) -> bytes | None:
        held = _held(data) if data else None
        if held is None or held.released or held.epoch != epoch:
            return None
        return _with(held, stop_requested=True).to_bytes()

    files.edit(_path(run), change)


class RunLock:
    """The lock of one run, held by this process between `take` and `release`."""

    def __init__(self, files: Files, run: str, *, lease_seconds: float = LEASE_SECONDS) -> None:
        self.files, self.run, self.lease_seconds = files, run, lease_seconds
        self.epoch, self._above = 0, 0
        self._ended = threading.Event()
        self._keeper: threading.Thread | None = None

    def take(self, say: Callable[[str], None] = lambda text: None, *, above: int = 0) -> int:
        """Take the lock and return its epoch, which is larger than `above` and than every one before.

        A holder of this machine is asked for by its process number; one of another machine is watched for as long
        as its lease. Raises InputError where it lives.
        """
        self._above = above
        seen, since, told = "", time.monotonic(), False
        while True:
            standing = self._try()
            if standing is None:
                return self.epoch
            if standing.holder.lives_here() or (seen and standing.beat != seen):
                raise InputError(_refusal(self.run, standing.holder))
            if not told:
                say(f"waiting up to {standing.lease_seconds:.0f} s to see whether {_name(standing.holder)} still lives")
                told = True
            seen = standing.beat
            if time.monotonic() - since >= standing.lease_seconds:
                self._try(dead=standing)
                if self.epoch:
                    return self.epoch
            time.sleep(min(1.0, standing.lease_seconds / 10))

    def keep(self, on_beat: Callable[[], None], on_lost: Callable[[str], None]) -> None:
        """Renew in the background until release: `on_beat` at every renewal, `on_lost` once with why it ended, which
        a StageError of `on_beat` is, too."""

        def run() -> None:
            while not self._ended.wait(self.lease_seconds / 3):
                try:
                    stop = self._renew()
                except LockLost as fault:
                    on_lost(str(fault))
                    return
                except (OSError, StoreError):
                    # The store may be out for a while; `check` decides before anything is committed.
                    stop = False
                if stop:
                    on_lost(f"run {self.run} was asked to stop")
                    return
                try:
                    on_beat()
                except StageError as fault:
                    on_lost(str(fault))
                    return

        self._keeper = threading.Thread(target=run, name="run-lock", daemon=True)
        self._keeper.start()

    def check(self) -> None:
        """Raises LockLost where another command took the run over."""
        held = read_lock(self.files, self.run)
        if held is None or held.epoch != self.epoch:
            raise LockLost(_lost(self.run, held))

    def rest(self) -> None:
        """End the renewal, and a call of `on_beat` that is at work."""
        self._ended.set()
        if self._keeper is not None and self._keeper is not threading.current_thread():
            self._keeper.join()

    def release(self) -> None:
        """Give the lock back, if it is still held."""
        self.rest()

        def change(data: bytes | None) -> bytes | None:
            held = _held(data) if data else None
            return _with(held, released=True).to_bytes() if held and held.epoch == self.epoch else None

        # Where the store is out the lease runs out, and a dead holder of this machine is known as one.
        with contextlib.suppress(StoreError):
            self.files.edit(_path(self.run), change)

    def _try(self, dead: Held | None = None) -> Held | None:
        """Take the lock where it is free, its holder known dead, or it is still exactly `dead`; else who holds it."""
        standing: list[Held | None] = [None]
        mine = Held(0, Holder.this_process(), secrets.token_hex(8), self.lease_seconds)

        def change(data: bytes | None) -> bytes | None:
            held = _held(data) if data else None
            standing[0] = None
            if held and not held.released and held != dead and held.holder.lives_here() is not False:
                standing[0] = held
                return None
            taken = _with(mine, epoch=max(self._above, held.epoch if held else 0) + 1)
            self.epoch = taken.epoch
            return taken.to_bytes()

        self.files.edit(_path(self.run), change)
        if standing[0] is not None:
            self.epoch = 0
        return standing[0]

    def _renew(self) -> bool:
        """Move the beat; whether a stop was asked for. Raises LockLost."""
        found: list[Held | None] = [None]

        def change(data: bytes | None) -> bytes | None:
            found[0] = held = _held(data) if data else None
            if held is None or held.epoch != self.epoch:
                return None
            return _with(held, beat=secrets.token_hex(8)).to_bytes()

        self.files.edit(_path(self.run), change)
        held = found[0]
        if held is None or held.epoch != self.epoch:
            raise LockLost(_lost(self.run, held))
        return held.stop_requested


def _path(run: str) -> str:
    return f"{run}/lock.json"


def _held(data: bytes) -> Held | None:
    """None for a file that is no lock: what cannot be read keeps nobody out."""
    try:
        body: dict[str, Any] = json.loads(data)
        return Held(**{**body, "holder": Holder(**body["holder"])})
    except (ValueError, KeyError, TypeError):
        return None


def _with(held: Held, **changes: Any) -> Held:
    return Held(**{**vars(held), **changes})


def _name(holder: Holder) -> str:
    return f"process {holder.pid} on {holder.host}"


def _refusal(run: str, holder: Holder) -> str:
    return (
        f"run {run} is being trained by {_name(holder)}: wait for it, end it with `miles stop {run}`, or give another "
        "--run-id"
    )


def _lost(run: str, held: Held | None) -> str:
    by = f"by {_name(held.holder)}" if held else "and its lock is gone"
    return f"run {run} was taken over {by}; nothing more of this command is committed"
