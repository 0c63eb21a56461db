"""Content digests: what an artifact holds, whatever file it lies in and whoever wrote it.

A row's digest is SHA-256 over its non-volatile columns; a stage's is SHA-256 over its rows' digests in
sample order and over what stands beside them (tensors, conditioning, the data source's state).
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

ROW_DIGEST = "row_digest"


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical_json(value: Any) -> bytes:
    """Sorted keys, no spaces, shortest floats: the same value gives the same bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def row_digests(table: pa.Table) -> list[str]:
    """SHA-256 (hex) of each row over the columns whose schema does not call them volatile."""
    columns = [
        (field.name, table.column(field.name).combine_chunks())
        for field in table.schema
        if field.name != ROW_DIGEST and (field.metadata or {}).get(b"volatile") != b"true"
    ]
    hashers = [hashlib.sha256() for _ in range(table.num_rows)]
    for name, column in columns:
        array = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        head = f"{name}:{_type_name(array.type)}".encode()
        for i, hasher in enumerate(hashers):
            chunks = _chunks(array, i)
            hasher.update(struct.pack("<QQ", len(head), sum(map(len, chunks))))
            hasher.update(head)
            for chunk in chunks:
                hasher.update(chunk)
    return [h.hexdigest() for h in hashers]


def with_row_digests(table: pa.Table) -> pa.Table:
    """The table with its `row_digest` column filled in (the schema already has the field)."""
    at = table.schema.get_field_index(ROW_DIGEST)
    return table.set_column(at, table.schema.field(at), pa.array(row_digests(table), pa.string()))


def content_digest(rows: Iterable[str], beside: Iterable[tuple[str, str]] = ()) -> str:
    """Digest of a stage: row digests in sample order, then (name, digest) pairs in name order."""
    hasher = hashlib.sha256()
    for digest in rows:
        hasher.update(digest.encode())
    for name, digest in sorted(beside):
        hasher.update(f"\n{name}={digest}".encode())
    return hasher.hexdigest()


def tensor_digests(safetensors: bytes | memoryview) -> dict[str, str]:
    """Digest of each tensor of a safetensors file over name, dtype, shape and bytes.

    Read from the header, not through a tensor library: any dtype, no copy, no torch.
    """
    view = memoryview(safetensors)
    (size,) = struct.unpack("<Q", view[:8])
    header = json.loads(bytes(view[8 : 8 + size]))
    body = view[8 + size :]
    digests = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        hasher = hashlib.sha256(canonical_json([name, entry["dtype"], entry["shape"]]))
        hasher.update(body[begin:end])
        digests[name] = hasher.hexdigest()
    return digests


def _type_name(kind: pa.DataType) -> str:
    if pa.types.is_struct(kind):
        return "struct<" + ",".join(f"{f.name}:{_type_name(f.type)}" for f in kind.fields) + ">"
    if pa.types.is_fixed_size_list(kind):
        return f"list[{kind.list_size}]<{_type_name(kind.value_type)}>"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{_type_name(kind.value_type)}>"
    return str(kind)


def _chunks(array: pa.Array, i: int) -> list[bytes | memoryview]:
    """The bytes that stand for a value, in pieces: a tensor's and a picture's lie where Arrow has them."""
    if not array[i].is_valid:
        return [b"\x00"]
    kind = array.type
    if pa.types.is_struct(kind):
        return [b"\x01", *_joined(_chunks(array.field(j), i) for j in range(kind.num_fields))]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        values = array[i].values
        number = pa.types.is_floating(values.type) or pa.types.is_integer(values.type)
        if number and values.null_count == 0:
            return [b"\x01", np.ascontiguousarray(values.to_numpy(zero_copy_only=False)).view(np.uint8).data]
        return [b"\x01", *_joined(_chunks(values, j) for j in range(len(values)))]
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return [b"\x01", memoryview(array[i].as_buffer())]
    return [b"\x01" + _plain(array[i].as_py(), kind)]


def _joined(values: Iterable[list[bytes | memoryview]]) -> Iterator[bytes | memoryview]:
    for chunks in values:
        yield struct.pack("<Q", sum(map(len, chunks)))
        yield from chunks


def _plain(value: Any, kind: pa.DataType) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bool):
        return bytes([value])
    if isinstance(value, int):
        return value.to_bytes(16, "little", signed=True)
    if isinstance(value, float):
        return struct.pack("<d", value)
    raise TypeError(f"no digest for Arrow type {kind}")
