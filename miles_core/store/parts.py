"""Parquet parts and files beside them: written once, checked by length and SHA-256 before use."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from miles_core.store.digest import ROW_DIGEST, content_digest, row_digests, tensor_digests, with_row_digests
from miles_core.store.files import DamagedError, Files
from miles_core.store.tombstone import pruned_part


@dataclass(frozen=True)
class Part:
    """A file of a stage. `path` is relative to the artifact root; `rows` is 0 for what is no table of rows;
    `content` names the digest of what the file holds, whatever its bytes."""

    path: str
    rows: int
    bytes: int
    sha256: str
    content: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def file_part(path: str, data: bytes) -> Part:
    """The part of a file beside the rows: safetensors by their tensors, anything else by its bytes."""
    sha = hashlib.sha256(data).hexdigest()
    tensors = path.endswith(".safetensors")
    return Part(path, 0, len(data), sha, content_digest([], tensor_digests(data).items()) if tensors else sha)


def encode_table(table: pa.Table) -> memoryview:
    """Parquet bytes of a table; see parquet_options."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, **parquet_options(table))
    return memoryview(sink.getvalue())


def parquet_options(table: pa.Table) -> dict[str, Any]:
    """One row group, zstd for text and numbers; noise and pictures as they are, without statistics."""
    incompressible = {f.name for f in table.schema if _noise(f.type)}
    leaves = _leaves(table.schema)
    plain = [leaf for leaf in leaves if leaf.split(".")[0] not in incompressible]
    return {
        "row_group_size": max(1, table.num_rows),
        "compression": {leaf: "ZSTD" if leaf in plain else "NONE" for leaf in leaves},
        "use_dictionary": plain,
        "write_statistics": plain,
        "store_schema": True,
        "write_page_checksum": True,
    }


def write_table(files: Files, path: str, table: pa.Table) -> Part:
    """Write a part under a new name, row digests filled in. Raises FileExistsError where the name is taken."""
    table = with_row_digests(table)
    data = encode_table(table)
    # Writing waits for the disk or the server, hashing for the processor.
    with ThreadPoolExecutor(1) as beside:
        hashing = beside.submit(lambda: hashlib.sha256(data).hexdigest())
        _create(files, path, data)
    rows = table.column(ROW_DIGEST).to_pylist()
    return Part(path, table.num_rows, len(data), hashing.result(), content_digest(rows))


def write_file(files: Files, path: str, data: bytes) -> Part:
    """Write a file beside the rows: safetensors by their tensors, anything else by its bytes."""
    _create(files, path, data)
    return file_part(path, data)


def remake_file(files: Files, path: str, data: bytes) -> Part:
    """Write a file beside the rows of an unfinished attempt, also over one that is not this content."""
    part = file_part(path, data)
    if not files.create(path, data) and files.read(path) != data:
        files.replace(path, data)
    return part


def remake_table(files: Files, path: str, table: pa.Table) -> Part:
    """Write a table beside the rows of an unfinished attempt; one that is there and whole is kept."""
    try:
        return write_table(files, path, table)
    except FileExistsError:
        part = inspect_table(files, path)
    if part is None:
        files.replace(path, encode_table(with_row_digests(table)))
        part = inspect_table(files, path)
    if part is None:
        raise DamagedError(f"{files.url(path)} does not hold what was just written to it")
    return part


def read_bytes(files: Files, part: Part) -> bytes:
    """A part's bytes, checked. Raises DamagedError that names the file, PrunedError for one that was pruned."""
    try:
        data = files.read(part.path)
    except FileNotFoundError:
        raise pruned_part(files, part.path) or DamagedError(f"{files.url(part.path)} is missing") from None
    if len(data) != part.bytes:
        raise DamagedError(f"{files.url(part.path)} has {len(data)} bytes, its manifest says {part.bytes}")
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise DamagedError(f"{files.url(part.path)} does not have the SHA-256 that its manifest says")
    return data


def read_table(files: Files, part: Part, columns: list[str] | None = None) -> pa.Table:
    """A part's rows, checked. Raises DamagedError that names the file, PrunedError for one that was pruned."""
    return pq.read_table(pa.BufferReader(read_bytes(files, part)), columns=columns)


def inspect_table(files: Files, path: str) -> Part | None:
    """The part that an earlier attempt left under this path; None where it is not whole."""
    data = files.read(path)
    # Whatever an altered file makes of the reader: it is not whole.
    try:
        table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
        recorded = table.column(ROW_DIGEST).to_pylist()
        computed = row_digests(table)
    except Exception:
        return None
    if computed != recorded:
        return None
    return Part(path, table.num_rows, len(data), hashlib.sha256(data).hexdigest(), content_digest(recorded))


def _create(files: Files, path: str, data: bytes | memoryview) -> None:
    if not files.create(path, data):
        raise FileExistsError(f"{files.url(path)} exists already and is never overwritten")


def _noise(kind: pa.DataType) -> bool:
    if pa.types.is_binary(kind):
        return True
    if pa.types.is_struct(kind):
        return any(_noise(kind.field(i).type) for i in range(kind.num_fields))
    return pa.types.is_fixed_size_list(kind) and kind.list_size > 64


def _leaves(schema: pa.Schema) -> list[str]:
    parquet = pq.ParquetFile(_empty(schema)).schema
    return [parquet.column(i).path for i in range(len(parquet))]


def _empty(schema: pa.Schema) -> pa.BufferReader:
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    return pa.BufferReader(sink.getvalue())
