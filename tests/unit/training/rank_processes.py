"""Trainer ranks in processes of their own, over gloo: started, called and stopped as the runtime's actors are."""

import dataclasses
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from trained_rollouts import free_port

from miles_core.config import RunConfig
from miles_core.store.files import Files
from miles_core.training.trainer import TrainerRank

LIMIT = 240.0


@dataclasses.dataclass(frozen=True)
class Fault:
    """What one rank does when it comes to a place for the first time: die, hang, or raise."""

    rank: int
    at: str
    kind: str


class FaultyRank(TrainerRank):
    """A trainer rank with a fault at a place."""

    fault: Fault | None = None

    def _at(self, verb: str, doing: str = "", **counts: tuple[int, int]) -> None:
        super()._at(verb, doing, **counts)
        fault = self.fault
        if fault is None or self.rank != fault.rank or self.at != fault.at:
            return
        if fault.kind == "die":
            os._exit(9)
        if fault.kind == "hang":
            time.sleep(LIMIT)
        raise MemoryError("no room for the activations")


class RankProcesses:
    """`count` processes, of which a trainer takes the first few; several trainers come one after the other."""

    def __init__(self, count: int, model: Path, root: str) -> None:
        self._model, self._root, self._world = model, root, 0
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        self._lost: set[int] = set()
        self._hangs: set[int] = set()
        for rank in range(count):
            self._spawn(rank)

    def start(
        self, world: int, config: RunConfig, fault: Fault | None = None, absent: tuple[int, ...] = ()
    ) -> list[Any]:
        """Start a trainer of `world` ranks in the place of the last; what each said. `absent` ranks do not come."""
        for rank in sorted(self._lost):
            self._processes[rank].kill()
            self._processes[rank].join()
            self._spawn(rank)
        self._lost.clear()
        self._hangs = {fault.rank} if fault is not None and fault.kind == "hang" else set()
        self._world, port = world, free_port()
        for rank in range(world):
            if rank not in absent:
                self._ends[rank].send(("start", (config, str(self._model), rank, world, port, fault)))
        return self._answers(absent)

    def call(self, verb: str, *arguments: Any) -> list[Any]:
        """Each rank's result or error as text, in rank order; None of one that died or did not answer."""
        for rank in range(self._world):
            self._ends[rank].send((verb, arguments))
        return self._answers()

    def update(self, inputs: Any, out: str) -> Any:
        """An update that must succeed, the same on every rank."""
        found = self.call("update", inputs, out)
        assert not isinstance(found[0], str), found[0]
        assert all(result == found[0] for result in found)
        return found[0]

    def _spawn(self, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._root), daemon=True)
        process.start()
        theirs.close()
        self._ends[rank : rank + 1] = [ours]
        self._processes[rank : rank + 1] = [process]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _answers(self, absent: tuple[int, ...] = ()) -> list[Any]:
        """In the order of ranks; a rank that hangs is waited for no longer than the others."""
        found: list[Any] = [None] * self._world
        waiting = {rank for rank in range(self._world) if rank not in absent}
        deadline, failed = time.monotonic() + LIMIT, False
        while waiting - (self._hangs if failed else set()) and time.monotonic() < deadline:
            for rank in list(waiting):
                if self._ends[rank].poll(0.05):
                    waiting.remove(rank)
                    try:
                        found[rank] = self._ends[rank].recv()
                    except EOFError:
                        self._lost.add(rank)
                        continue
                    failed = failed or isinstance(found[rank], str)
        self._lost |= waiting
        return found


def _serve(end: Connection, root: str) -> None:
    torch.set_num_threads(1)
    one: TrainerRank | None = None
    while True:
        verb, arguments = end.recv()
        try:
            if verb == "start":
                if one is not None:
                    one.stop()
                config, model, rank, world, port, fault = arguments
                one = FaultyRank(config, model, "sd3", rank=rank, world_size=world, master_port=port, device="cpu")
                one.fault = fault
                answer = one.start()
            elif verb == "random_state":
                answer = torch.get_rng_state()
            elif verb == "mesh":
                assert one is not None
                answer = tuple(cast(Any, next(iter(one._parameters.values()))).device_mesh.shape)
            else:
                assert one is not None
                files = () if verb == "policy" else (Files(root),)
                answer = getattr(one, verb)(*files, *arguments)
        except Exception as fault:
            answer = f"{type(fault).__name__}: {fault}"
        end.send(answer)
