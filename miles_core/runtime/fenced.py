"""The base of a run's actors, and the driver's side of one: every call carries the epoch of who makes it.

An actor outlives its command where that is killed. The next command raises the actor's epoch, and takes it over only
if it is idle and clean; whatever an older epoch still asks of it is refused. Nobody's actor ends itself.
"""

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import psutil
import ray

from miles_core.errors import StageError
from miles_core.runtime.faults import arm_actor


class StaleEpoch(StageError):
    """An older command asked something of an actor that a newer one has taken over."""


@dataclass(frozen=True)
class Terms:
    """What an actor is made with. `identity` says what it was made from: another command with the same identity may
    take it over. idle_seconds: it ends itself when nobody has renewed it for so long; 0: never."""

    name: str
    epoch: int
    identity: str
    idle_seconds: float
    faults: dict[str, str]


@dataclass(frozen=True)
class Status:
    """An actor as it stands. `busy` names the call at work; `dirty` says that one that changes it began and did not
    end well."""

    identity: str
    epoch: int
    busy: str
    dirty: bool
    pid: int
    at: str


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """While modules and models are loaded: what they make is there to stay, so that no garbage is looked for among it,
    then or later (a seventh of a trainer's import time)."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class FencedActor:
    """Calls go through `work`; `changes` names the verbs that leave the actor dirty where they fail."""

    changes: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._epoch, self._busy, self._dirty = terms.epoch, "", False
        self._renewed = time.monotonic()
        self._standing = threading.Lock()
        arm_actor(terms.name, terms.faults)
        one_thread()
        if terms.idle_seconds:
            threading.Thread(target=self._end_when_idle, name="idle", daemon=True).start()

    def work(self, epoch: int, verb: str, *arguments: Any, **options: Any) -> Any:
        """Do what the newest command asks. Raises StaleEpoch for an older one."""
        with self._standing:
            self._accept(epoch)
            self._busy, self._dirty = verb, self._dirty or verb in self.changes
        try:
            result = getattr(self, verb)(*arguments, **options)
            self._dirty = self._dirty and verb not in self.changes
            return result
        finally:
            self._busy = ""

    @ray.method(concurrency_group="watch")
    def enter(self, epoch: int, faults: dict[str, str]) -> Status:
        """A new command takes over: older epochs are refused from here on. The actor as it stands."""
        arm_actor(self._terms.name, faults)
        return self.status(epoch)

    @ray.method(concurrency_group="watch")
    def status(self, epoch: int) -> Status:
        with self._standing:
            self._accept(epoch)
            return Status(self._terms.identity, self._epoch, self._busy, self._dirty, os.getpid(), self.at())

    @ray.method(concurrency_group="watch")
    def end(self, epoch: int) -> None:
        """End this process, whatever it is at, for a command that is not an older one."""
        self._accept(epoch)
        os._exit(0)

    def at(self) -> str:
        """Where in its work the actor is, in words."""
        return self._busy or "idle"

    def _accept(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise StaleEpoch(f"{self._terms.name} belongs to epoch {self._epoch} and refuses epoch {epoch}")
        self._epoch, self._renewed = epoch, time.monotonic()

    def _end_when_idle(self) -> None:
        while time.monotonic() - self._renewed < self._terms.idle_seconds:
            time.sleep(min(5.0, self._terms.idle_seconds / 4))
        with contextlib.suppress(Exception):
            ray.kill(ray.get_runtime_context().current_actor)
        # A call at work keeps Ray from ending it politely.
        os._exit(0)


class Actor:
    """The driver's handle of a FencedActor."""

    def __init__(self, name: str, handle: Any, epoch: int) -> None:
        self.name, self.handle, self.epoch = name, handle, epoch

    def call(self, verb: str, *arguments: Any, returns: int = 1, **options: Any) -> Any:
        """A reference to the result; `returns` of them as a list where there are several."""
        return self.handle.work.options(num_returns=returns).remote(self.epoch, verb, *arguments, **options)

    def status(self) -> Any:
        """A reference to the actor's status, answered while it works."""
        return self.handle.status.remote(self.epoch)

    def enter(self, faults: dict[str, str]) -> Any:
        """A reference to the status of the actor as it is taken over."""
        return self.handle.enter.remote(self.epoch, faults)

    def end(self, patience: float = 10.0) -> None:
        """End the actor for good and wait until its process is gone. Raises StaleEpoch where a newer command has it."""
        self._ask_to_end(patience / 2)
        pid = _pid_here(self.handle)
        with contextlib.suppress(Exception):
            ray.kill(self.handle)
        if pid is not None:
            # Ray asks a process to end itself, which one that is stopped does not.
            with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
                process = psutil.Process(pid)
                process.kill()
                process.wait(patience)
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            try:
                ray.get(self.status(), timeout=1.0)
            except ray.exceptions.RayActorError:
                return
            except (ray.exceptions.GetTimeoutError, StaleEpoch):
                continue
            time.sleep(0.05)

    def _ask_to_end(self, patience: float) -> None:
        try:
            ray.get(self.handle.end.remote(self.epoch), timeout=patience)
        except ray.exceptions.RayTaskError as fault:
            if isinstance(fault.cause, StaleEpoch):
                raise fault.cause from None
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return


def _pid_here(handle: Any) -> int | None:
    """The actor's process where it runs on this node, as Ray's own table has it: the actor may not answer."""
    row = ray._private.state.actors(handle._actor_id.hex())
    here = ray.get_runtime_context().get_node_id()
    lives = bool(row) and row["State"] == "ALIVE" and row["Address"]["NodeID"] == here
    return int(row["Pid"]) if lives and row["Pid"] else None


def one_thread() -> None:
    """One compute thread a process on the CPU: the same bits on any machine, and more processes beat more threads."""
    import torch

    torch.set_num_threads(1)
