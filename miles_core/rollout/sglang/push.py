"""A LoRA push: the adapter as one flat buffer with its table, and what proves that it arrived."""

import base64
import hashlib
import io
import pickle
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing.reductions

from miles_core.errors import StageError

_TOLD = re.compile(r"Updated (\d+) LoRA layers .*\(skipped (\d+) unknown layers\)")


@dataclass(frozen=True)
class Bucket:
    """Tensors one after another in one flat buffer of bytes, and the table that says where each lies."""

    flat: torch.Tensor
    table: list[types.SimpleNamespace]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], device: str) -> "Bucket":
        """The tensors (PEFT names without `base_model.model.`) on a device. On `cuda` the buffer has to live until the next
        push: the server opens it by its handle, and its LoRA parameters stay views of it."""
        parts, table, offset = [], [], 0
        for name, tensor in tensors.items():
            flat = tensor.detach().contiguous().flatten().view(torch.uint8)
            entry = {"name": name, "shape": tuple(tensor.shape), "dtype": str(tensor.dtype), "numel": flat.numel()}
            table.append(types.SimpleNamespace(**entry, start_idx=offset, end_idx=offset + flat.numel()))
            parts.append(flat)
            offset += flat.numel()
        return cls(torch.cat(parts).to(device), table)

    def body(self, *, module: str, lora_alpha: int, lora_rank: int) -> dict[str, Any]:
        """The JSON of /update_weights_from_tensor: the bytes inline, or on `cuda` the buffer's CUDA IPC handle."""
        return {
            "serialized_named_tensors": [base64.b64encode(self._serialized(module)).decode()],
            "load_format": "flattened_bucket",
            "target_modules": [module],
            "weight_update_mode": "lora_merge",
            "lora_alpha": lora_alpha,
            "lora_rank": lora_rank,
        }

    def _serialized(self, module: str) -> bytes:
        content = {module: {"flattened_tensor": self.flat, "metadata": self.table}}
        if not self.flat.is_cuda:
            return pickle.dumps(content, protocol=4)
        # The server sees the same devices in the same order, so that the handle's device number is right there.
        torch.cuda.synchronize(self.flat.device)
        buffer = io.BytesIO()
        ForkingPickler(buffer, 4).dump(content)
        return buffer.getvalue()


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
