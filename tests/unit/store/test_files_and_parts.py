"""Files and parts: created once, whole or not at all, checked before use."""

import multiprocessing
import os
import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from roots import BucketRoot, Root
from s3_proxy import Proxy

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
def files(root: Root) -> Files:
    return root.files


def test_create_is_exclusive_and_leaves_the_first_content(files: Files) -> None:
    assert files.create("a/b.json", b"1")
    assert not files.create("a/b.json", b"2")
    assert files.read("a/b.json") == b"1"
    assert files.list("a") == ["b.json"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        Files(str(tmp_path)).create("a.bin", "text")  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []


def test_listing_hides_what_is_no_artifact(files: Files, root: Root) -> None:
    for name in (".tmp-1", ".lock-whole", ".probe-1"):
        root.put(f"a/{name}", b"half")
    files.create("a/whole", b"1")
    files.create("a/folder/file", b"1")
    assert len(root.names()) == 5
    assert files.list("a") == ["folder", "whole"]
    assert files.list("nowhere") == []


def test_a_listing_longer_than_a_page_is_whole(bucket: BucketRoot) -> None:
    for number in range(205):
        bucket.put(f"a/{number:03d}", b"")
    assert bucket.files.list("a") == [f"{number:03d}" for number in range(205)]


def test_replace_and_delete_need_no_file_before(files: Files) -> None:
    files.replace("a/b.json", b"1")
    files.replace("a/b.json", b"22")
    assert (files.read("a/b.json"), files.size("a/b.json"), files.exists("a/b.json")) == (b"22", 2, True)
    files.delete("a/b.json")
    files.delete("a/b.json")
    assert not files.exists("a/b.json")
    for missing in (files.read, files.size):
        with pytest.raises(FileNotFoundError):
            missing("a/b.json")


def test_an_edit_makes_changes_or_leaves_a_file(files: Files) -> None:
    seen: list[bytes | None] = []

    def change(new: bytes | None) -> Callable[[bytes | None], bytes | None]:
        def changed(data: bytes | None) -> bytes | None:
            seen.append(data)
            return new

        return changed

    assert files.edit("a/b.json", change(None)) is None
    assert not files.exists("a/b.json")
    assert files.edit("a/b.json", change(b"1")) == b"1"
    assert files.edit("a/b.json", change(None)) == b"1"
    assert files.edit("a/b.json", change(b"2")) == b"2"
    assert seen == [None, None, b"1", b"1"]
    assert files.list("a") == ["b.json"]
    assert files.read("a/b.json") == b"2"


def test_an_edit_that_fails_leaves_the_file_and_the_next_one_is_not_held_up(files: Files) -> None:
    files.create("a.json", b"1")
    with pytest.raises(ZeroDivisionError):
        files.edit("a.json", lambda data: bytes(1 // 0))
    assert files.read("a.json") == b"1"
    assert files.edit("a.json", lambda data: b"2") == b"2"


def test_a_large_file_goes_up_in_parts_and_stays_exclusive(bucket: BucketRoot, proxy: Proxy) -> None:
    data = os.urandom(101 * 2**20)
    assert bucket.files.create("large", data)
    assert sum("partNumber=" in request.path for request in proxy.seen) == 3
    assert not bucket.files.create("large", data[:-1])
    assert bucket.files.read("large") == data
    assert not bucket.client.list_multipart_uploads(Bucket=bucket.bucket).get("Uploads")


def test_a_root_goes_through_pickle_and_into_a_fork(root: Root) -> None:
    files: Files = pickle.loads(pickle.dumps(root.files))
    files.create("parent", b"1")
    child = multiprocessing.get_context("fork").Process(target=files.create, args=("child", b"2"))
    child.start()
    child.join()
    assert files.list("") == ["child", "parent"]


def test_many_threads_share_a_root(files: Files) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: files.create(f"{number % 8}", str(number).encode()), range(32)))
    assert sum(made) == 8
    assert files.list("") == [str(number) for number in range(8)]


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
def test_damage_is_found_before_use_and_names_the_file(files: Files, root: Root, damage: str) -> None:
    part = write_table(files, "data/0-1.parquet", prompts())
    data = bytearray(root.get(part.path))
    root.remove(part.path)
    if damage == "truncated":
        root.put(part.path, bytes(data[:-1]))
    if damage == "flipped":
        data[40] ^= 1  # inside the first data page
        root.put(part.path, bytes(data))
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


def test_a_deleted_file_is_gone_and_deleting_it_again_is_fine(files: Files) -> None:
    files.create("a/b.json", b"1")
    assert files.modified("a/b.json") == pytest.approx(time.time(), abs=30)
    files.delete("a/b.json")
    assert files.list("a") == []
    files.delete("a/b.json")
    with pytest.raises(FileNotFoundError):
        files.modified("a/b.json")
