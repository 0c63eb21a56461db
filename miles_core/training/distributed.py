"""The trainer's process group, and work that succeeds on all ranks or fails on all."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from miles_core.errors import StageError

T = TypeVar("T")


def open_store(*, rank: int, world_size: int, master_address: str, master_port: int, seconds: float) -> dist.TCPStore:
    """The ranks' key-value store, held by rank 0. Raises StageError where rank 0 does not answer within `seconds`."""
    if dist.is_initialized():
        raise StageError("this process already belongs to a process group: stop its trainer first")
    try:
        return dist.TCPStore(
            master_address,
            master_port,
            world_size,
            is_master=rank == 0,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as fault:
        raise StageError(
            f"trainer rank {rank} of {world_size} found no rank 0 at {master_address}:{master_port} within "
            f"{seconds / 60:.2g} minutes: {_first_line(fault)}"
        ) from fault


def start_process_group(store: dist.Store, *, rank: int, world_size: int, device: str, seconds: float) -> torch.device:
    """Join the group (gloo, beside it nccl on cuda), whose collectives last `seconds` at most; returns this rank's
    device. Raises StageError."""
    backend = "gloo"
    here = torch.device("cpu")
    if device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        here = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(here)
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=seconds)
        )
    except (RuntimeError, ValueError) as fault:
        raise StageError(
            f"trainer rank {rank} of {world_size} could not join the process group: {_first_line(fault)}"
        ) from fault
    return here


def rank_mesh(device: torch.device, replicas: int, seconds: float) -> DeviceMesh:
    """The mesh that FSDP2 shards over: all ranks, or `replicas` x the rest, where each row holds a whole model and
    gradients are summed over the columns too. `replicas` divides the world size. A collective.

    torch gives a mesh's own groups 30 minutes whatever the world's time-out is, so the grid's are made here.
    """
    world = dist.get_world_size()
    if replicas == 1:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("dp",))
    grid = torch.arange(world).view(replicas, world // replicas)
    groups: list[Any] = [
        dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timedelta(seconds=seconds))[0]
        for ranks in (grid.T, grid)
    ]
    return DeviceMesh.from_group(groups, device.type, mesh=grid, mesh_dim_names=("dp_replicate", "dp_shard"))


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


def slice_of(count: int, rank: int, world_size: int, mode: str) -> slice:
    """This rank's share of `count` items: a run of neighbours (contiguous), or every world_size-th (stride)."""
    if mode == "stride":
        return slice(rank, count, world_size)
    return slice(count * rank // world_size, count * (rank + 1) // world_size)


def _first_line(fault: Exception) -> str:
    return str(fault).strip().splitlines()[0]
