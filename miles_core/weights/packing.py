"""Tensors to and from a safetensors file's bytes."""

from collections.abc import Mapping

import safetensors.torch
import torch

from miles_core.errors import StageError
from miles_core.weights import raw
from miles_core.weights.adapter_file import to_push
from miles_core.weights.raw import Raw

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


def to_safetensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file's content; the same tensors and metadata give the same bytes."""
    return raw.encode({name: _raw(tensor) for name, tensor in tensors.items()}, metadata)


def _raw(tensor: torch.Tensor) -> Raw:
    held = tensor.detach().cpu().contiguous()
    return Raw(_NAMES[held.dtype], tuple(held.shape), held.reshape(-1).view(torch.uint8).numpy().tobytes())


def from_safetensors(data: bytes) -> dict[str, torch.Tensor]:
    """Tensors by name, on the CPU. Raises StageError for bytes that are no safetensors file."""
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as fault:
        raise StageError(f"an adapter or checkpoint file is no safetensors file: {fault}") from None


def adapter_tensors(adapter_file: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a diffusers adapter file by PEFT name. Raises StageError as `to_push` does."""
    return from_safetensors(to_push(adapter_file))
