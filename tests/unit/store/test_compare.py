"""Two attempts of one stage: identical, or the first difference with both values."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from roots import Root
from safetensors.numpy import save

from miles_core.store.compare import IDENTICAL, compare
from miles_core.store.manifest import Manifest, fingerprint
from miles_core.store.parts import Part, write_file, write_table
from miles_core.store.run_store import Attempt, RunStore
from miles_core.store.schemas import ADVANTAGES, UPDATE


@pytest.fixture
def store(root: Root) -> RunStore:
    return RunStore(root.files, "r")


def committed(store: RunStore, write: Any) -> Manifest:
    wanted = fingerprint("advantages", 0, config={}, inputs={}, hooks={}, upstream={})
    attempt = store.open_attempt("advantages", 0, wanted, {}, resumable=False)
    nothing: dict[str, Any] = {"upstream": {}, "affecting_config": {}, "inputs": {}, "versions": {}, "summary": {}}
    return store.commit(attempt, parts=write(attempt), started_at=0.0, flow_run_id=None, **nothing)


def rows(store: RunStore, *values: float, name: str = "a", reason: str | None = None) -> Any:
    def write(attempt: Attempt) -> list[Part]:
        table = [
            {"sample_index": 40 + i, "group_index": 0, "raw_reward": value, "advantage": 0.5, "group_mean": 0.0}
            | {"group_std": 1.0, "zero_std": False, "kept": True, "reason": reason, "remove_sample": False}
            | {"row_digest": ""}
            for i, value in enumerate(values)
        ]
        half = len(table) // 2
        return [
            write_table(
                store.files, attempt.path(f"data/{i}-{name}.parquet"), pa.Table.from_pylist(t, schema=ADVANTAGES)
            )
            for i, t in enumerate((table[:half], table[half:]))
        ]

    return write


def beside(store: RunStore, data: bytes, name: str = "adapter/x.safetensors") -> Any:
    return lambda attempt: [write_file(store.files, attempt.path(name), data)]


def compared(store: RunStore, one: Any, other: Any) -> str:
    return compare(store.files, committed(store, one), committed(store, other))


def test_the_same_content_under_other_names_is_identical(store: RunStore) -> None:
    assert compared(store, rows(store, 1, 2, 3, 4), rows(store, 1, 2, 3, 4, name="b")) == IDENTICAL


def test_the_first_differing_part_column_and_row_are_named_with_both_values(store: RunStore) -> None:
    said = compared(store, rows(store, 1, 2, 3, 4), rows(store, 1, 2, 3, 7, name="b"))
    assert said == "1 of 4 rows, first data/ part 1: column raw_reward, row 1 (sample 43): 4.0 → 7.0"


def test_a_column_counts_also_where_it_was_null(store: RunStore) -> None:
    said = compared(store, rows(store, 1, 2), rows(store, 1, 2, reason="why"))
    assert said == "2 of 2 rows, first data/ part 0: column reason, row 0 (sample 40): None → 'why'"


def test_another_number_of_rows(store: RunStore) -> None:
    assert compared(store, rows(store, 1, 2, 3, 4), rows(store, 1, 2, 3)) == "data/ part 0: 2 rows → 1 rows"


def test_volatile_columns_count_for_nothing(store: RunStore) -> None:
    def steps(loss: float, seconds: float) -> Any:
        def write(attempt: Attempt) -> list[Part]:
            row = {f.name: 0 for f in UPDATE} | {"loss": loss, "seconds": seconds, "row_digest": ""}
            table = pa.Table.from_pylist([row], schema=UPDATE)
            return [write_table(store.files, attempt.path("data/steps.parquet"), table)]

        return write

    assert compared(store, steps(0.5, 1.0), steps(0.5, 9.0)) == IDENTICAL
    assert (
        compared(store, steps(0.5, 1.0), steps(0.25, 9.0))
        == "1 of 1 rows, first data/ part 0: column loss, row 0: 0.5 → 0.25"
    )


def test_the_first_differing_tensor_and_element(store: RunStore) -> None:
    one = {"a": np.zeros(3, np.float32), "b": np.arange(4, dtype=np.float32)}
    other = {"a": np.zeros(3, np.float32), "b": np.array([0, 1, 5, 6], np.float32)}
    said = compared(store, beside(store, save(one)), beside(store, save(other)))
    assert said == "adapter/x.safetensors: tensor b: 2 of 4 elements, first element 2: 2.0 → 5.0"
    said = compared(store, beside(store, save(one)), beside(store, save({"a": one["a"]})))
    assert said == "adapter/x.safetensors: tensor b is in the earlier attempt alone"
    nan = {"a": np.array([np.nan, 1], np.float32)}
    said = compared(store, beside(store, save(nan)), beside(store, save({"a": np.array([np.nan, 2], np.float32)})))
    assert said.endswith("1 of 2 elements, first element 1: 1.0 → 2.0")


def test_a_file_beside_the_rows(store: RunStore) -> None:
    said = compared(store, beside(store, b'{"a":1}', "state.json"), beside(store, b'{"a":2}', "state.json"))
    assert said == "state.json: byte 5: b'{\"a\":1}' → b'{\"a\":2}'"
    said = compared(store, beside(store, b"1", "state.json"), beside(store, b"1", "other.json"))
    assert said == "other.json is in the new attempt alone"
