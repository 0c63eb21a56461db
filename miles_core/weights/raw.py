"""A safetensors file as bytes: named tensors without a tensor library, so that a process that only moves and names
them does not load one. Equal tensors give equal bytes: names are sorted here, because the safetensors library writes
several metadata keys in random order.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_core.errors import StageError

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1}
_NOT_ONE = "an adapter or checkpoint file is no safetensors file"


@dataclass(frozen=True)
class Raw:
    """A tensor: safetensors' name of its dtype (F32, BF16 …), its shape, its bytes in C order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def encode(tensors: Mapping[str, Raw], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file's content; the same tensors and metadata give the same bytes."""
    order = sorted(tensors, key=lambda name: (-_BYTES[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(sorted((metadata or {}).items()))} if metadata else {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + len(tensor.data)
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    return b"".join((struct.pack("<Q", len(head)), head, *(tensors[name].data for name in order)))


def decode(data: bytes) -> dict[str, Raw]:
    """The tensors of a safetensors file, by name; their bytes are views of `data`. Raises StageError for other bytes."""
    header, body = _parts(data)
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = Raw(entry["dtype"], tuple(entry["shape"]), body[begin:end])
        if entry["dtype"] not in _BYTES or len(found[name].data) != found[name].numel * _BYTES[entry["dtype"]]:
            raise StageError(f"{_NOT_ONE}: {name} has not the bytes of its {entry['dtype']} {entry['shape']}")
    return found


def file_metadata(data: bytes) -> dict[str, str]:
    """The free metadata of a safetensors file's header. Raises StageError for bytes that are none."""
    return dict(_parts(data)[0].get("__metadata__", {}))


def _parts(data: bytes) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(data)
    try:
        (size,) = struct.unpack("<Q", view[:8])
        return dict(json.loads(bytes(view[8 : 8 + size]))), view[8 + size :]
    except (ValueError, TypeError, struct.error):
        raise StageError(_NOT_ONE) from None
