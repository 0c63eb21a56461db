"""The resumable state of training as safetensors: weights, Adam moments, step counts, RNG of every rank.

Written and read by torch's distributed checkpoint through its safetensors storage (no pickle from disk), one shard
file a rank, so that it loads at another world size. Content is a function of the training alone.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from miles_core.errors import StageError
from miles_core.store.digest import canonical_json, tensor_digests
from miles_core.weights.packing import from_safetensors, safetensors_metadata, to_safetensors

FOLDER = "checkpoint"
STATE_FILE = "trainer_state.json"
RNG_FILE = "rng.safetensors"
_SCHEMA_VERSION = 1
_SHARD = "shard-"


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
    """This rank's shard files by name; the same state gives the same bytes. A collective."""
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
        return {path.name: _canonical(path.read_bytes()) for path in Path(folder).glob(f"{_SHARD}*.safetensors")}


def load_shards(state: dict[str, torch.Tensor], files: Mapping[str, bytes]) -> None:
    """Fill `state` in place from all shard files of a checkpoint. A collective.

    Raises StageError where the checkpoint lacks a tensor, has one more, or one of another shape.
    """
    found = {name for data in files.values() for name in tensor_digests(data)}
    missing, foreign = sorted(set(state) - found), sorted(found - set(state))
    if missing or foreign:
        raise StageError(
            f"the checkpoint has other tensors than this run trains: {len(missing)} missing {missing[:2]}, "
            f"{len(foreign)} unknown {foreign[:2]}"
        )
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        try:
            dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
        except Exception as fault:
            raise StageError(f"the checkpoint could not be loaded: {fault}") from fault


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


def restore_rng(files: Mapping[str, bytes], device: torch.device, seed: int) -> None:
    """Set this rank's random state; a rank that the checkpoint did not have draws from `seed` + rank.

    Raises StageError where the file is absent.
    """
    if RNG_FILE not in files:
        raise StageError(f"the checkpoint lacks {RNG_FILE}")
    states, rank = from_safetensors(files[RNG_FILE]), dist.get_rank()
    seed_rng(seed)
    if f"rank{rank}.cpu" in states:
        torch.set_rng_state(states[f"rank{rank}.cpu"])
    if device.type == "cuda" and f"rank{rank}.cuda" in states:
        torch.cuda.set_rng_state(states[f"rank{rank}.cuda"], device)


def seed_rng(seed: int) -> None:
    """A random state of its own for every rank."""
    torch.manual_seed(seed + dist.get_rank())


def _canonical(data: bytes) -> bytes:
    """A shard file in one order: the storage writer's is another in every process."""
    metadata = {
        name: canonical_json(json.loads(value)).decode() if value.startswith("{") else value
        for name, value in safetensors_metadata(data).items()
    }
    return to_safetensors(from_safetensors(data), metadata)
