"""Rows of a query for people and programs: a table, CSV, JSON, Parquet."""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from miles_core.observe.terminal import bytes_text

Format = Literal["table", "csv", "json", "parquet"]
TABLE_ROWS = 200
_LIST, _TEXT = 6, 80
_PNG = b"\x89PNG"


def text_of(batches: Iterable[pa.RecordBatch], schema: pa.Schema, kind: Format) -> Iterator[str]:
    """The rows as text, piece by piece. Bytes are told by kind and size, never printed."""
    if kind == "csv":
        yield _csv([schema.names])
        for batch in batches:
            yield _csv([[_csv_cell(value) for value in row.values()] for row in batch.to_pylist()])
    elif kind == "json":
        lead = "[\n"
        for batch in batches:
            for row in batch.to_pylist():
                yield lead + json.dumps(_json(row), ensure_ascii=False)
                lead = ",\n"
        yield "[]\n" if lead == "[\n" else "\n]\n"
    else:
        yield from _table(batches, schema)


def parquet_of(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> bytes:
    """The rows as a Parquet file, bytes and all."""
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


def cell(value: Any) -> str:
    """A value in a table: short, in one line, no control characters."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        return f"<{'PNG ' if value.startswith(_PNG) else ''}{bytes_text(len(value))}>"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return value.isoformat(" ", "seconds")
    if isinstance(value, dict):
        if set(value) == {"bytes", "path"} and isinstance(value["bytes"], bytes):
            return cell(value["bytes"])
        return "{" + ", ".join(f"{name}: {cell(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        shown = ", ".join(cell(inner) for inner in value[:_LIST])
        return f"[{shown}, … {len(value)}]" if len(value) > _LIST else f"[{shown}]"
    text = "".join(c if c.isprintable() else "·" for c in str(value))
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"


def _table(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[str]:
    kept: list[list[str]] = []
    total = 0
    for batch in batches:
        wanted = batch.slice(0, max(TABLE_ROWS - total, 0)) if total < TABLE_ROWS else batch.slice(0, 0)
        kept += [[cell(value) for value in row.values()] for row in wanted.to_pylist()]
        total += batch.num_rows
    lines = [list(schema.names), *kept]
    widths = [max(len(line[i]) for line in lines) for i in range(len(schema))]
    right = [pa.types.is_integer(f.type) or pa.types.is_floating(f.type) or pa.types.is_decimal(f.type) for f in schema]
    for line in lines:
        cells = (
            text.rjust(width) if flush else text.ljust(width)
            for text, width, flush in zip(line, widths, right, strict=True)
        )
        yield "  ".join(cells).rstrip() + "\n"
    more = f", the first {TABLE_ROWS} shown: --output csv gives all" if total > TABLE_ROWS else ""
    yield f"({total} row{'' if total == 1 else 's'}{more})\n"


def _csv(rows: list[list[Any]]) -> str:
    sink = io.StringIO()
    csv.writer(sink, lineterminator="\n").writerows(rows)
    return sink.getvalue()


def _csv_cell(value: Any) -> Any:
    plain = _json(value)
    return json.dumps(plain, ensure_ascii=False) if isinstance(plain, dict | list) else plain


def _json(value: Any) -> Any:
    """JSON has neither bytes, times, decimals nor NaN."""
    if isinstance(value, dict):
        if set(value) == {"bytes", "path"} and isinstance(value["bytes"], bytes):
            return cell(value)
        return {name: _json(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_json(inner) for inner in value]
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes):
        return cell(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)
