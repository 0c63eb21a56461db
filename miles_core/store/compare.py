"""What differs between two attempts of one stage: the first part, column and row, or tensor, with both values."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from miles_core.store.digest import ROW_DIGEST, tensor_digests
from miles_core.store.files import Files
from miles_core.store.manifest import ROW_FOLDERS, Manifest
from miles_core.store.parts import Part, read_bytes
from miles_core.store.tombstone import PrunedError

IDENTICAL = "identical"
# dtypes of safetensors that numpy has; others are shown as bytes.
_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1", "BOOL": "?"}


def compare(files: Files, then: Manifest, now: Manifest) -> str:
    """`identical`, or the first difference in words; volatile columns count for nothing.

    Raises DamagedError where a part cannot be read.
    """
    if then.content_digest == now.content_digest:
        return IDENTICAL
    ours, theirs = _places(now), _places(then)
    for place in sorted(ours | theirs, key=lambda name: (name.split("/")[0] not in ROW_FOLDERS, name)):
        one, other = theirs.get(place), ours.get(place)
        if one is None or other is None:
            return f"{place} is in {'the new' if one is None else 'the earlier'} attempt alone"
        if one.content != other.content:
            try:
                first = f"{place}: {_difference(read_bytes(files, one), read_bytes(files, other), one.path)}"
                return f"{_rows_told(files, theirs, ours, place)}{first}"
            except PrunedError:
                return f"{place} holds something else than the part that was pruned since"
    return "the parts are the same in another order"


def _rows_told(files: Files, then: dict[str, Part], now: dict[str, Part], first: str) -> str:
    """How many rows differ in the folder of the first difference, where its parts stand side by side."""
    folder = first.split("/")[0]
    pairs = [(then[place], part) for place, part in now.items() if place.startswith(f"{folder}/") and place in then]
    if folder not in ROW_FOLDERS or any(one.rows != other.rows for one, other in pairs):
        return ""
    total = sum(part.rows for _, part in pairs)
    changed = [(one, other) for one, other in pairs if one.content != other.content]
    differ = sum(a != b for one, other in changed for a, b in zip(*map(_row_digests(files), (one, other)), strict=True))
    return f"{differ} of {total} rows, first "


def _row_digests(files: Files) -> Callable[[Part], list[bytes]]:
    def read(part: Part) -> list[bytes]:
        table = pq.read_table(pa.BufferReader(read_bytes(files, part)), columns=[ROW_DIGEST])
        found: list[bytes] = table[ROW_DIGEST].to_pylist()
        return found

    return read


def _places(manifest: Manifest) -> dict[str, Part]:
    """Parts by where they stand: rows by their number in sample order, as their names say how often they were tried."""
    found: dict[str, Part] = {}
    for folder in ROW_FOLDERS:
        found |= {f"{folder}/ part {i}": part for i, part in enumerate(manifest.under(f"{folder}/"))}
    rows = {part.path for part in found.values()}
    beside = [part for part in manifest.parts if part.path not in rows]
    return found | {part.path.removeprefix(manifest.folder + "/"): part for part in beside}


def _difference(then: bytes, now: bytes, path: str) -> str:
    if path.endswith(".parquet"):
        return _of_rows(pq.read_table(pa.BufferReader(then)), pq.read_table(pa.BufferReader(now)))
    if path.endswith(".safetensors"):
        return _of_tensors(then, now)
    at = next((i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
    window = slice(max(0, at - 20), at + 20)
    return f"byte {at}: {then[window]!r} → {now[window]!r}"


def _of_rows(then: pa.Table, now: pa.Table) -> str:
    if then.num_rows != now.num_rows:
        return f"{then.num_rows} rows → {now.num_rows} rows"
    columns = [f.name for f in now.schema if f.name != ROW_DIGEST and (f.metadata or {}).get(b"volatile") != b"true"]
    for name in columns:
        if name not in then.column_names or then.schema.field(name).type != now.schema.field(name).type:
            return f"column {name} is of another kind"
    for row in range(now.num_rows):
        if then[ROW_DIGEST][row] == now[ROW_DIGEST][row]:
            continue
        for name in columns:
            one, other = then[name][row].as_py(), now[name][row].as_py()
            if repr(one) != repr(other):
                return f"column {name}, row {row}{_index(then, row)}: {_values(one, other)}"
    lacking = sorted(set(then.column_names) - set(now.column_names))
    return f"column {', '.join(lacking)} is in the earlier attempt alone"


def _index(table: pa.Table, row: int) -> str:
    return f" (sample {table['sample_index'][row].as_py()})" if "sample_index" in table.column_names else ""


def _values(one: Any, other: Any) -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        name = next(key for key in one if one[key] != other.get(key))
        return f"{name} {_values(one[name], other[name])}"
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        at = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if repr(a) != repr(b))
        return f"element {at}: {_values(one[at], other[at])}"
    if isinstance(one, bytes) and isinstance(other, bytes):
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        return f"{len(one)} bytes → {len(other)} bytes, from byte {at} on"
    return f"{one!r} → {other!r}"


def _of_tensors(then: bytes, now: bytes) -> str:
    before, after = tensor_digests(then), tensor_digests(now)
    for name in sorted(before | after):
        if name not in before or name not in after:
            return f"tensor {name} is in {'the new' if name not in before else 'the earlier'} attempt alone"
        if before[name] != after[name]:
            return f"tensor {name}: {_elements(_tensor(then, name), _tensor(now, name))}"
    return "the same tensors"


def _tensor(safetensors: bytes, name: str) -> tuple[str, list[int], np.ndarray]:
    size = int.from_bytes(safetensors[:8], "little")
    entry = json.loads(safetensors[8 : 8 + size])[name]
    begin, end = entry["data_offsets"]
    dtype = _NUMPY.get(entry["dtype"], "u1")
    return entry["dtype"], entry["shape"], np.frombuffer(safetensors[8 + size + begin : 8 + size + end], dtype)


def _elements(one: tuple[str, list[int], np.ndarray], other: tuple[str, list[int], np.ndarray]) -> str:
    if one[:2] != other[:2]:
        return f"{one[0]} {one[1]} → {other[0]} {other[1]}"
    # By bits, so that a NaN equals itself.
    differing = np.flatnonzero(one[2].view(f"u{one[2].itemsize}") != other[2].view(f"u{other[2].itemsize}"))
    at = int(differing[0])
    what = "element" if one[0] in _NUMPY else "byte"
    return (
        f"{len(differing)} of {one[2].size} {what}s, first {what} {at}: {one[2][at].item()!r} → {other[2][at].item()!r}"
    )
