"""An adapter's two spellings: diffusers' file (names under `transformer.`) and PEFT's names for a push.

Both are safetensors with the same tensors, and equal tensors give equal bytes: the header is written here with
sorted names, because the safetensors library writes several metadata keys in random order.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch

from miles_core.errors import StageError

_PREFIX = "transformer."
_LORA_METADATA = "lora_adapter_metadata"
_TRAINER_METADATA = "miles"
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class AdapterInfo:
    """What an adapter file says of itself. `global_step` counts the optimizer steps that made it: 0 is the seeded
    adapter of policy/init, which alone may be trained on without a checkpoint."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    global_step: int


def to_safetensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file's content; the same tensors and metadata give the same bytes."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(sorted((metadata or {}).items()))} if metadata else {}
    chunks, offset = [], 0
    for name in order:
        tensor = tensors[name].detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        chunks.append(data)
        offset += len(data)
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + b"".join(chunks)


def from_safetensors(data: bytes) -> dict[str, torch.Tensor]:
    """Tensors by name, on the CPU. Raises StageError for bytes that are no safetensors file."""
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as fault:
        raise StageError(f"an adapter or checkpoint file is no safetensors file: {fault}") from None


def safetensors_metadata(data: bytes) -> dict[str, str]:
    """The free metadata of a safetensors file's header. Raises StageError for bytes that are none."""
    try:
        (size,) = struct.unpack("<Q", data[:8])
        return dict(json.loads(data[8 : 8 + size]).get("__metadata__", {}))
    except (ValueError, struct.error):
        raise StageError("an adapter or checkpoint file is no safetensors file") from None


def to_push(adapter_file: bytes) -> bytes:
    """PEFT-named safetensors (`transformer_blocks.0.attn.to_q.lora_A.weight`) of a diffusers adapter file.

    Raises StageError for an empty file and for a tensor that does not belong to the transformer.
    """
    return to_safetensors(adapter_tensors(adapter_file))


def adapter_tensors(adapter_file: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a diffusers adapter file by PEFT name. Raises StageError as `to_push` does."""
    tensors = from_safetensors(adapter_file)
    foreign = sorted(name for name in tensors if not name.startswith(_PREFIX))
    if foreign:
        raise StageError(f"the adapter holds {foreign[0]!r}, which is no weight of the transformer")
    if not tensors:
        raise StageError("the adapter holds no tensor, so that it would change nothing")
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def to_diffusers(push: bytes, *, rank: int, alpha: int, target_modules: Sequence[str], global_step: int = 0) -> bytes:
    """A file that diffusers' load_lora_weights takes, with rank and alpha in its metadata, of PEFT-named tensors."""
    tensors = {_PREFIX + name: tensor for name, tensor in from_safetensors(push).items()}
    lora = {
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted(target_modules),
        "rank_pattern": {},
        "alpha_pattern": {},
        "lora_bias": False,
        "use_dora": False,
    }
    metadata = {
        "format": "pt",
        _LORA_METADATA: json.dumps({_PREFIX + key: value for key, value in lora.items()}, sort_keys=True),
        _TRAINER_METADATA: json.dumps({"global_step": global_step}),
    }
    return to_safetensors(tensors, metadata)


def adapter_info(adapter_file: bytes) -> AdapterInfo:
    """Rank, alpha, targets and training state that the file's metadata names. Raises StageError without them."""
    try:
        metadata = safetensors_metadata(adapter_file)
        lora = json.loads(metadata[_LORA_METADATA])
        return AdapterInfo(
            rank=lora[_PREFIX + "r"],
            alpha=lora[_PREFIX + "lora_alpha"],
            target_modules=tuple(lora[_PREFIX + "target_modules"]),
            global_step=json.loads(metadata[_TRAINER_METADATA])["global_step"],
        )
    except (KeyError, ValueError, struct.error):
        raise StageError(
            "the adapter file does not name its rank, alpha and optimizer step: it was not written here"
        ) from None
