"""The trainer's process group, and work that succeeds on all ranks or fails on all."""

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from miles_core.errors import StageError

T = TypeVar("T")


def start_process_group(
    *, rank: int, world_size: int, master_address: str, master_port: int, device: str, timeout_minutes: float
) -> torch.device:
    """Join the group (gloo, beside it nccl on cuda) and return this rank's device. Raises StageError."""
    if dist.is_initialized():
        raise StageError("this process already belongs to a process group: stop its trainer first")
    backend = "gloo"
    here = torch.device("cpu")
    if device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        here = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(here)
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{master_address}:{master_port}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(minutes=timeout_minutes),
        )
    except (RuntimeError, ValueError) as fault:
        raise StageError(
            f"trainer rank {rank} of {world_size} could not join the process group at "
            f"{master_address}:{master_port}: {fault}"
        ) from fault
    return here


def together(what: str, work: Callable[[], T]) -> T:
    """Run `work` on every rank and return this rank's result.

    Where one rank fails, all of them raise StageError that names what was done, the rank and the cause, so that
    none waits in a later collective. `work` itself must hold no collective.
    """
    try:
        result = work()
    except Exception as fault:
        raise StageError(_failure(what, str(fault) or type(fault).__name__)) from fault
    if message := _failure(what, None):
        raise StageError(message)
    return result


def _failure(what: str, cause: str | None) -> str:
    """The first rank's failure as a sentence; empty where all succeeded. `cause` is this rank's."""
    causes = gather(cause)
    return next((f"{what} failed on trainer rank {rank}: {c}" for rank, c in enumerate(causes) if c is not None), "")


def gather(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank. For what is small: it travels pickled."""
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def slice_of(count: int, rank: int, world_size: int) -> slice:
    """This rank's contiguous share of `count` items."""
    return slice(count * rank // world_size, count * (rank + 1) // world_size)
