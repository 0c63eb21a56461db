"""How a stage runs: reused or computed, why, and what that does to the line. Real stages over a real store."""

from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from deployments.recipes import recipe
from miles_core.config import RunConfig
from miles_core.errors import StageError
from miles_core.pipeline import advantages
from miles_core.pipeline.inputs import Inputs
from miles_core.pipeline.stage import Outcome, Product, Step, run_stage
from miles_core.pipeline.upstream import line
from miles_core.runtime.workers import Workers
from miles_core.store.files import DamagedError, Files
from miles_core.store.manifest import Manifest
from miles_core.store.parts import read_table, write_table
from miles_core.store.run_store import Attempt, RunStore
from miles_core.store.schemas import rewards_schema

INPUTS = Inputs(Path(), "base", "sd3", Path(), "prompts", (), ("jpeg_compressibility",), None, None)


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    made = RunStore(Files(str(tmp_path)), "r")
    made.create_record({"recipe": "tiny", "config": {}, "meaning": {}})
    return made


def step(store: RunStore, *, moves_line: bool = True, **changes: Any) -> Step:
    config: RunConfig = recipe("tiny").replace(**changes)
    return Step(config, INPUTS, store, cast(Workers, None), 0, moves_line=moves_line)


def rewards(store: RunStore, values: tuple[float, ...], *, rm_type: str = "jpeg_compressibility") -> Manifest:
    """A committed rewards stage of groups of two."""
    rows = [
        {
            "sample_index": i,
            "group_index": i // 2,
            "rollout_digest": "d",
            "reward": value,
            "rm_type": rm_type,
            "rm_version": "1",
            "score_jpeg_compressibility": value,
            "recognized": None,
            "target": None,
            "tries": 1,
            "worker": "w",
            "seconds": 0.0,
            "row_digest": "",
        }
        for i, value in enumerate(values)
    ]

    def compute(step: Step, attempt: Attempt, upstream: dict[str, Manifest]) -> Product:
        table = pa.Table.from_pylist(rows, schema=rewards_schema(["jpeg_compressibility"]))
        # Parts land in any order.
        parts = [
            write_table(store.files, attempt.path(f"data/{i:08d}-1.parquet"), table.slice(2 * i, 2))
            for i in reversed(range(len(values) // 2))
        ]
        return Product(parts)

    return run_stage(step(store, rm_type=rm_type), "rewards", {}, compute).manifest


def normalized(of: Step, upstream: Manifest) -> Outcome:
    return run_stage(of, "advantages", {"rewards": upstream}, advantages.normalize)


def test_a_stage_is_computed_once_and_then_reused(store: RunStore) -> None:
    upstream = rewards(store, (1.0, 2.0, 3.0, 3.0))
    first, second = normalized(step(store), upstream), normalized(step(store), upstream)
    assert (first.reused, first.reason) == (False, "not made yet")
    assert (second.reused, second.manifest) == (True, first.manifest)
    assert store.on_line("advantages", 0) == first.manifest
    assert first.manifest.summary["zero_std_groups"] == 1


def test_rows_are_in_sample_order_whatever_order_the_parts_came_in(store: RunStore) -> None:
    made = normalized(step(store), rewards(store, (1.0, 2.0, 3.0, 5.0))).manifest
    rows = read_table(store.files, made.data[0]).to_pylist()
    assert [row["raw_reward"] for row in rows] == [1.0, 2.0, 3.0, 5.0]
    assert rows[0]["advantage"] == -rows[1]["advantage"] < 0


def test_a_changed_option_is_named_as_the_reason(store: RunStore) -> None:
    upstream = rewards(store, (1.0, 2.0))
    normalized(step(store), upstream)
    again = normalized(step(store, globalize_reward_mean=True), upstream)
    assert (again.reused, again.reason) == (False, "globalize_reward_mean False → True")


def test_an_option_that_affects_another_stage_changes_nothing(store: RunStore) -> None:
    upstream = rewards(store, (1.0, 2.0))
    first = normalized(step(store), upstream)
    assert normalized(step(store, lr=0.5, ocr_num_workers=1, num_rollout=9), upstream).manifest == first.manifest


def test_changed_rewards_are_named_as_the_reason(store: RunStore) -> None:
    normalized(step(store), rewards(store, (1.0, 2.0)))
    other = rewards(store, (1.0, 4.0), rm_type="jpeg_incompressibility")
    again = normalized(step(store), other)
    assert not again.reused
    assert again.reason.startswith("rewards changed (")


def test_a_rerun_leaves_the_line(store: RunStore) -> None:
    upstream = rewards(store, (1.0, 2.0))
    first = normalized(step(store), upstream)
    beside = normalized(step(store, moves_line=False, globalize_reward_mean=True), upstream)
    assert beside.manifest.attempt != first.manifest.attempt
    assert store.on_line("advantages", 0) == first.manifest


def test_a_damaged_stage_is_made_again_with_the_same_content(store: RunStore, tmp_path: Path) -> None:
    """Cache hit, blob missing (pitfall 47)."""
    upstream = rewards(store, (1.0, 2.0))
    first = normalized(step(store), upstream)
    (tmp_path / first.manifest.data[0].path).unlink()
    with pytest.raises(StageError, match="is damaged"):
        line(step(store), "advantages", 0)
    again = normalized(step(store), upstream)
    assert "damaged" in again.reason and "advantages.parquet is missing" in again.reason
    assert again.manifest.attempt == f"{first.manifest.attempt}.2"
    assert again.manifest.content_digest == first.manifest.content_digest
    assert line(step(store), "advantages", 0) == again.manifest


def test_a_stage_that_fails_commits_nothing_and_the_next_try_starts_afresh(store: RunStore) -> None:
    upstream = rewards(store, (1.0, 2.0))

    def fail(step: Step, attempt: Attempt, products: dict[str, Manifest]) -> Product:
        advantages.normalize(step, attempt, products)
        raise StageError("after the part was written")

    with pytest.raises(StageError):
        run_stage(step(store), "advantages", {"rewards": upstream}, fail)
    assert store.committed("advantages", 0) == []
    assert normalized(step(store), upstream).manifest.attempt.endswith(".2")


def test_a_non_finite_reward_stops_the_stage(store: RunStore) -> None:
    with pytest.raises(StageError, match="non-finite"):
        normalized(step(store), rewards(store, (1.0, float("nan"))))
    assert store.committed("advantages", 0) == []


def test_what_is_missing_upstream_is_named(store: RunStore) -> None:
    with pytest.raises(StageError, match="rollout of iteration 0 is not committed"):
        line(step(store), "rollout", 0)


def test_an_altered_part_is_found_when_it_is_read_and_made_again_on_the_next_try(
    store: RunStore, tmp_path: Path
) -> None:
    upstream = rewards(store, (1.0, 2.0, 3.0, 3.0))
    path = tmp_path / upstream.data[0].path
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)
    assert store.damage(upstream) is None
    with pytest.raises(DamagedError, match="SHA-256"):
        normalized(step(store), upstream)
    assert "SHA-256" in (store.damage(upstream) or "")
    again = rewards(store, (1.0, 2.0, 3.0, 3.0))
    assert again.attempt == f"{upstream.attempt}.2"
    assert again.content_digest == upstream.content_digest
    assert not normalized(step(store), again).reused


def test_a_failure_of_another_kind_marks_nothing(store: RunStore) -> None:
    upstream = rewards(store, (1.0, float("inf")))
    with pytest.raises(StageError):
        normalized(step(store), upstream)
    assert store.damage(upstream) is None
