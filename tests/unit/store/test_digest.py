"""Row and content digests: what changes them and what must not."""

import json
import struct

import pyarrow as pa
import pytest

from miles_core.store.digest import content_digest, row_digests, tensor_digests, with_row_digests
from miles_core.store.schemas import IMAGE, column


def table(**changes: object) -> pa.Table:
    schema = pa.schema(
        [
            column("number", pa.int64(), "a number"),
            column("real", pa.float64(), "a real", nullable=True),
            column("text", pa.string(), "a text"),
            column("flag", pa.bool_(), "a switch"),
            column("image", IMAGE, "a picture", nullable=True),
            column("latent", pa.list_(pa.field("element", pa.float32(), nullable=False), 4), "a tensor"),
            column("steps", pa.list_(pa.field("element", pa.int32(), nullable=False)), "a list"),
            column("seconds", pa.float64(), "a time", volatile=True),
            column("row_digest", pa.string(), "the digest", volatile=True),
        ]
    )
    row = {
        "number": 1,
        "real": 0.5,
        "text": "a",
        "flag": True,
        "image": {"bytes": b"12", "path": None},
        "latent": [1.0, 2.0, 3.0, 4.0],
        "steps": [1, 2],
        "seconds": 1.0,
        "row_digest": "",
    }
    return pa.Table.from_pylist([row, row | changes], schema=schema)


def test_equal_rows_have_equal_digests() -> None:
    first, second = row_digests(table())
    assert first == second


@pytest.mark.parametrize(
    "change",
    [
        {"number": 2},
        {"number": -1},
        {"real": 0.25},
        {"real": None},
        {"text": "b"},
        {"flag": False},
        {"image": {"bytes": b"13", "path": None}},
        {"image": {"bytes": b"12", "path": "p"}},
        {"image": None},
        {"latent": [1.0, 2.0, 3.0, 5.0]},
        {"steps": [1, 2, 3]},
        {"steps": []},
    ],
)
def test_every_column_counts(change: dict) -> None:
    first, second = row_digests(table(**change))
    assert first != second


@pytest.mark.parametrize("change", [{"seconds": 9.0}, {"row_digest": "x"}])
def test_volatile_columns_do_not_count(change: dict) -> None:
    first, second = row_digests(table(**change))
    assert first == second


def test_chunks_and_slices_do_not_count() -> None:
    whole = table(number=2)
    again = pa.concat_tables([whole.slice(0, 1), whole.slice(1, 1)])
    assert row_digests(again) == row_digests(whole)
    assert row_digests(whole.slice(1, 1)) == row_digests(whole)[1:]


def test_text_does_not_run_over_into_the_next_column() -> None:
    schema = pa.schema([column("a", pa.string(), ""), column("b", pa.string(), "")])
    rows = [{"a": "xy", "b": "z"}, {"a": "x", "b": "yz"}]
    first, second = row_digests(pa.Table.from_pylist(rows, schema=schema))
    assert first != second


def test_filled_in_column_holds_the_digests() -> None:
    filled = with_row_digests(table(number=2))
    assert filled.column("row_digest").to_pylist() == row_digests(table(number=2))


def test_content_digest_knows_order_and_what_stands_beside() -> None:
    plain = content_digest(["a", "b"])
    assert plain != content_digest(["b", "a"])
    assert plain != content_digest(["a", "b"], [("x", "1")])
    assert content_digest([], [("x", "1"), ("y", "2")]) == content_digest([], [("y", "2"), ("x", "1")])


def safetensors(**tensors: tuple[str, list[int], bytes]) -> bytes:
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + body


def test_tensor_digests_depend_on_name_dtype_shape_and_bytes_alone() -> None:
    a, b = ("F32", [1, 2], b"12345678"), ("BF16", [1], b"12")
    first, swapped = tensor_digests(safetensors(a=a, b=b)), tensor_digests(safetensors(b=b, a=a))
    assert first == swapped
    assert set(first) == {"a", "b"}
    for changed in (("F32", [2, 1], b"12345678"), ("I32", [1, 2], b"12345678"), ("F32", [1, 2], b"12345679")):
        assert tensor_digests(safetensors(a=changed))["a"] != first["a"]
