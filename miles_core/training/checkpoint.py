"""The resumable state of training as safetensors: weights, Adam moments, step counts, RNG of every rank.

Written and read by torch's distributed checkpoint through its safetensors storage (no pickle from disk), one shard
file a rank, so that it loads at another world size. Content is a function of the training alone.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from miles_core.errors import StageError
from miles_core.store.digest import canonical_json, tensor_digests
from miles_core.weights.packing import from_safetensors, to_safetensors
from miles_core.weights.raw import file_metadata

FOLDER = "checkpoint"
STATE_FILE = "trainer_state.json"
RNG_FILE = "rng.safetensors"
_SCHEMA_VERSION = 1
_SHARD = "shard-"
_SHARDING, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
_STEP_STRIDE = 1_000_003


def init_adam_state(optimizer: torch.optim.AdamW) -> None:
    """Zero moments and step counts for every parameter, also in place of earlier ones.

    Without them a parameter that never had a gradient has no state, and a checkpoint other keys than the next.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def state_tensors(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """Views of all that the checkpoint holds, by name: `model.<name>`, `exp_avg.<name>`, `exp_avg_sq.<name>` (all
    fp32) and `step.<name>` (1,)."""
    state: dict[str, torch.Tensor] = {}
    for name, parameter in parameters.items():
        adam = optimizer.state[parameter]
        state[f"model.{name}"] = parameter.detach()
        state[f"exp_avg.{name}"] = adam["exp_avg"]
        state[f"exp_avg_sq.{name}"] = adam["exp_avg_sq"]
        state[f"step.{name}"] = adam["step"].view(1)
    return state


def save_shard(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """This rank's shard files by name, none where other ranks hold all that it does; the same state gives the same
    bytes. A collective. Raises StageError."""
    with tempfile.TemporaryDirectory() as folder, _stage_error("written"):
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
        return {path.name: _canonical(path.read_bytes()) for path in Path(folder).glob(f"{_SHARD}*.safetensors")}


def load_shards(state: dict[str, torch.Tensor], files: Mapping[str, bytes]) -> None:
    """Fill `state` in place from all shard files of a checkpoint. A collective.

    Raises StageError where the checkpoint lacks a tensor or a piece of one, has one more, or one of another shape.
    """
    found = {name for data in files.values() for name in tensor_digests(data)}
    missing, foreign = sorted(set(state) - found), sorted(found - set(state))
    if missing or foreign:
        raise StageError(
            f"the checkpoint has other tensors than this run trains: {len(missing)} missing {missing[:2]}, "
            f"{len(foreign)} unknown {foreign[:2]}"
        )
    _check_pieces(state, files)
    with tempfile.TemporaryDirectory() as folder, _stage_error("loaded"):
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))


def shard_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The shard files among a checkpoint's. Raises StageError where one that the state file lists is absent."""
    listed = read_state(files)["shards"]
    absent = [name for name in listed if name not in files]
    if absent:
        raise StageError(f"the checkpoint lacks {absent[0]}")
    return {name: files[name] for name in listed}


def encode_state(*, global_step: int, policy_digest: str, lora_rank: int, lora_alpha: int, shards: list[str]) -> bytes:
    """trainer_state.json: what is neither tensor nor RNG. `global_step` optimizer steps were done."""
    return canonical_json(
        {
            "schema_version": _SCHEMA_VERSION,
            "global_step": global_step,
            "policy_digest": policy_digest,
            "lora_rank": lora_rank,
            "lora_alpha": lora_alpha,
            "shards": sorted(shards),
        }
    )


def read_state(files: Mapping[str, bytes]) -> dict[str, Any]:
    """trainer_state.json of a checkpoint. Raises StageError where it is absent or of another version."""
    if STATE_FILE not in files:
        raise StageError(f"the checkpoint lacks {STATE_FILE}")
    state = json.loads(files[STATE_FILE])
    if state["schema_version"] != _SCHEMA_VERSION:
        raise StageError(
            f"the checkpoint has schema version {state['schema_version']}, this code reads {_SCHEMA_VERSION}"
        )
    return dict(state)


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """This rank's random state by `rank<r>.<cpu|cuda>`, uint8."""
    rank = dist.get_rank()
    state = {f"rank{rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state[f"rank{rank}.cuda"] = torch.cuda.get_rng_state(device)
    return state


def encode_rng(states: list[dict[str, torch.Tensor]]) -> bytes:
    """rng.safetensors of all ranks' states."""
    return to_safetensors({name: tensor for state in states for name, tensor in state.items()})


def restore_rng(files: Mapping[str, bytes], device: torch.device, *, seed: int, global_step: int) -> None:
    """Set this rank's random state to its own; a rank that the checkpoint did not have is seeded for `global_step`.

    Raises StageError where the file is absent or lacks a rank between others.
    """
    if RNG_FILE not in files:
        raise StageError(f"the checkpoint lacks {RNG_FILE}")
    states, rank = from_safetensors(files[RNG_FILE]), dist.get_rank()
    count = sum(name.endswith(".cpu") for name in states)
    absent = [r for r in range(max(count, 1)) if f"rank{r}.cpu" not in states]
    if absent:
        raise StageError(f"the checkpoint's {RNG_FILE} lacks the random state of rank {absent[0]}")
    seed_rng(seed, global_step)
    if f"rank{rank}.cpu" in states:
        torch.set_rng_state(states[f"rank{rank}.cpu"])
    if device.type == "cuda" and f"rank{rank}.cuda" in states:
        torch.cuda.set_rng_state(states[f"rank{rank}.cuda"], device)


def seed_rng(seed: int, global_step: int) -> None:
    """A random state of its own for every rank; one that joins later does not repeat what was drawn at the start."""
    torch.manual_seed(seed + dist.get_rank() + _STEP_STRIDE * global_step)


def _check_pieces(state: Mapping[str, torch.Tensor], files: Mapping[str, bytes]) -> None:
    """Raises StageError unless every tensor is there once in full: the reader would leave a gap as it was."""
    elements, places = dict.fromkeys(state, 0), {name: set[tuple[int, ...]]() for name in state}
    for file, data in files.items():
        offsets = json.loads(file_metadata(data)[_SHARDING])
        for name, tensor in sorted(from_safetensors(data).items()):
            place = tuple(offsets[name][_OFFSETS])
            if not tensor.numel():
                continue
            if place in places[name]:
                raise StageError(f"the checkpoint holds {name} twice at {list(place)}, the second time in {file}")
            places[name].add(place)
            elements[name] += tensor.numel()
    for name, tensor in state.items():
        if elements[name] != tensor.numel():
            raise StageError(f"the checkpoint holds {elements[name]} of the {tensor.numel()} elements of {name}")


@contextmanager
def _stage_error(done: str) -> Iterator[None]:
    """A fault of torch's distributed checkpoint, which is no Exception, as StageError."""
    try:
        yield
    except CheckpointException as fault:
        rank, (cause, _) = next(iter(fault.failures.items()))
        raise StageError(f"the checkpoint could not be {done} on trainer rank {rank}: {cause}") from fault


def _canonical(data: bytes) -> bytes:
    """A shard file in one order: the storage writer's is another in every process."""
    metadata = {
        name: canonical_json(json.loads(value)).decode() if value.startswith("{") else value
        for name, value in file_metadata(data).items()
    }
    return to_safetensors(from_safetensors(data), metadata)
