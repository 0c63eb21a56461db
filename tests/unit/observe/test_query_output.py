"""Rows of a query as text and as Parquet: no bytes in a terminal, nothing lost in a file."""

import csv
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq

from miles_core.observe.query_output import TABLE_ROWS, parquet_of, text_of

PNG = b"\x89PNG" + bytes(5196)
TABLE = pa.table(
    {
        "image": [{"bytes": PNG, "path": None}, {"bytes": None, "path": None}],
        "prompt": ["a \x1b[31mred\n cat", None],
        "reward": [0.25, float("nan")],
        "sigmas": [[float(i) for i in range(20)], []],
    }
)


def text(table: pa.Table, kind: str) -> str:
    return "".join(text_of(table.to_batches(), table.schema, kind))  # type: ignore[arg-type]


def test_a_table_shows_bytes_by_kind_and_size_and_no_control_characters() -> None:
    shown = text(TABLE, "table")
    assert "<PNG 5.2 kB>" in shown and "a ·[31mred· cat" in shown and "[0, 1, 2, 3, 4, 5, … 20]" in shown
    assert "\x1b" not in shown and shown.endswith("(2 rows)\n")


def test_a_long_table_says_how_much_is_not_shown() -> None:
    shown = text(pa.table({"n": range(TABLE_ROWS + 5)}), "table")
    assert len(shown.splitlines()) == TABLE_ROWS + 2
    assert f"({TABLE_ROWS + 5} rows, the first {TABLE_ROWS} shown: --output csv gives all)" in shown


def test_json_is_json() -> None:
    rows = json.loads(text(TABLE, "json"))
    assert rows[0]["image"] == "<PNG 5.2 kB>" and len(rows[0]["sigmas"]) == 20
    assert rows[1]["reward"] == "nan" and rows[1]["prompt"] is None
    assert json.loads(text(TABLE.slice(0, 0), "json")) == []


def test_csv_reads_back() -> None:
    rows = list(csv.DictReader(io.StringIO(text(TABLE, "csv"))))
    assert rows[0]["image"] == "<PNG 5.2 kB>" and rows[0]["prompt"] == "a \x1b[31mred\n cat"
    assert len(json.loads(rows[0]["sigmas"])) == 20


def test_parquet_keeps_the_bytes() -> None:
    found = pq.read_table(pa.BufferReader(parquet_of(TABLE.to_batches(), TABLE.schema)))
    assert found.column("image").to_pylist()[0]["bytes"] == PNG
