"""A LoRA push: the adapter as one flat buffer with its table, and what proves that it arrived."""

import base64
import hashlib
import pickle
import re
import types
from collections.abc import Mapping
from typing import Any

import torch

from miles_core.errors import StageError

_TOLD = re.compile(r"Updated (\d+) LoRA layers .*\(skipped (\d+) unknown layers\)")


def body_of(tensors: Mapping[str, torch.Tensor], *, module: str, lora_alpha: int, lora_rank: int) -> dict[str, Any]:
    """The JSON of /update_weights_from_tensor, the tensors inline (PEFT names without `base_model.model.`)."""
    parts, table, offset = [], [], 0
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        entry = {"name": name, "shape": tuple(tensor.shape), "dtype": str(tensor.dtype), "numel": flat.numel()}
        table.append(types.SimpleNamespace(**entry, start_idx=offset, end_idx=offset + flat.numel()))
        parts.append(flat)
        offset += flat.numel()
    bucket = {"flattened_tensor": torch.cat(parts), "metadata": table}
    return {
        "serialized_named_tensors": [base64.b64encode(pickle.dumps({module: bucket}, protocol=4)).decode()],
        "load_format": "flattened_bucket",
        "target_modules": [module],
        "weight_update_mode": "lora_merge",
        "lora_alpha": lora_alpha,
        "lora_rank": lora_rank,
    }


def layers_updated(message: str, wanted: int) -> int:
    """How many layers took a pair, by the server's own words. Raises StageError where it left one out: it calls that a
    success."""
    told = _TOLD.search(message)
    if told is None:
        raise StageError(f"the engine's answer to the push is not understood: {message}")
    updated, skipped = int(told[1]), int(told[2])
    if skipped or updated != wanted:
        raise StageError(f"of {wanted} pushed LoRA layers the engine took {updated} and skipped {skipped}: {message}")
    return updated


def live_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """What the server's own check of its live parameters is to find: SHA-256 of dtype, shape and bytes by its name."""
    return {name.removesuffix(".weight"): _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    tensor = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(str(tensor.dtype).encode())
    digest.update(repr(tuple(tensor.shape)).encode())
    digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
