"""Files and parts: created once, whole or not at all, checked before use."""

import multiprocessing
import os
from pathlib import Path

import pyarrow as pa
import pytest

from miles_core.store.files import DamagedError, Files
from miles_core.store.parts import file_part, inspect_table, read_bytes, read_table, write_file, write_table
from miles_core.store.schemas import PROMPTS


def prompts(count: int = 3) -> pa.Table:
    rows = [
        {
            "sample_index": i,
            "group_index": 0,
            "prompt": f"p{i}",
            "seed": i,
            "prompt_index": 0,
            "epoch": 0,
            "metadata": "{}",
            "rm_type": None,
            "row_digest": "",
        }
        for i in range(count)
    ]
    return pa.Table.from_pylist(rows, schema=PROMPTS)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(str(tmp_path))


def test_create_is_exclusive_and_leaves_the_first_content(files: Files) -> None:
    assert files.create("a/b.json", b"1")
    assert not files.create("a/b.json", b"2")
    assert files.read("a/b.json") == b"1"
    assert files.list("a") == ["b.json"]


def _create(root: str, number: int, wins) -> None:
    if Files(root).create("manifest.json", str(number).encode() * 1000):
        wins.put(number)


def test_of_twelve_racing_creators_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    wins = context.Queue()
    racers = [context.Process(target=_create, args=(str(tmp_path), 10 + i, wins)) for i in range(12)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    winner = wins.get(timeout=5)
    assert wins.empty()
    assert Files(str(tmp_path)).read("manifest.json") == str(winner).encode() * 1000


def test_a_failed_write_leaves_nothing(files: Files, tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        files.create("a.bin", "text")  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


def test_listing_hides_files_being_written(files: Files, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".tmp-1").write_bytes(b"half")
    files.create("a/whole", b"1")
    assert files.list("a") == ["whole"]
    assert files.list("nowhere") == []


def test_a_part_is_never_overwritten(files: Files) -> None:
    write_table(files, "data/0-1.parquet", prompts())
    with pytest.raises(FileExistsError):
        write_table(files, "data/0-1.parquet", prompts())


def test_a_part_reads_back_with_its_schema(files: Files) -> None:
    part = write_table(files, "data/0-1.parquet", prompts())
    table = read_table(files, part)
    assert (part.rows, table.num_rows) == (3, 3)
    assert table.schema.metadata[b"stage"] == b"prompts"
    assert inspect_table(files, part.path) == part


@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damage_is_found_before_use_and_names_the_file(files: Files, tmp_path: Path, damage: str) -> None:
    part = write_table(files, "data/0-1.parquet", prompts())
    path = tmp_path / part.path
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "truncated":
        path.write_bytes(data[:-1])
    if damage == "flipped":
        data[40] ^= 1  # inside the first data page
        path.write_bytes(data)
    with pytest.raises(DamagedError, match="0-1.parquet"):
        read_table(files, part)
    if damage != "missing":
        assert inspect_table(files, part.path) is None


def test_content_of_a_part_ignores_volatile_columns_and_file_bytes(files: Files) -> None:
    first = write_table(files, "a.parquet", prompts())
    second = write_table(files, "b.parquet", prompts().replace_schema_metadata({"other": "metadata"}))
    assert first.sha256 != second.sha256
    assert first.content == second.content


def test_files_beside_the_rows(files: Files) -> None:
    part = write_file(files, "state.json", b"{}")
    assert read_bytes(files, part) == b"{}"
    assert part == file_part("state.json", b"{}")


def test_a_deleted_file_is_gone_and_deleting_it_again_is_fine(files: Files, tmp_path: Path) -> None:
    files.create("a/b.json", b"1")
    assert files.modified("a/b.json") == pytest.approx((tmp_path / "a/b.json").stat().st_mtime)
    files.delete("a/b.json")
    assert files.list("a") == []
    files.delete("a/b.json")
    with pytest.raises(FileNotFoundError):
        files.modified("a/b.json")
