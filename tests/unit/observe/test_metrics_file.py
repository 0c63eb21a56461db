"""metrics.parquet and the view `metrics` say what the stages' summaries say, and nothing of their own."""

import sys
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from roots import Root
from synthetic_run import SyntheticRun, reward_of, synthetic_run

from miles_core.observe.database import database
from miles_core.observe.metrics import metrics_of
from miles_core.observe.metrics_file import metrics_of_run, metrics_path, update_metrics_file
from miles_core.store.files import Files
from miles_core.store.run_store import RunStore


def content(files: Files, run: str) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pq.read_table(pa.BufferReader(files.read(metrics_path(run)))).to_pylist()


def asked(files: Files, runs: list[str], sql: str, **options: Any) -> list[tuple[Any, ...]]:
    opened = database(files, runs, sql, **options)
    return [tuple(row.values()) for batch in opened.read(opened.run()) for row in batch.to_pylist()]


def test_the_file_is_always_what_the_store_says(root: Root) -> None:
    """Whatever became of it: missing, half, altered, or of another line."""
    store = synthetic_run(root.files, "r", 3, 2, 4, 16)
    path = metrics_path("r")
    update_metrics_file(store)
    expected = metrics_of_run(store).to_pylist()
    assert {row["iteration"] for row in expected} == {0, 1, 2}
    assert content(root.files, "r") == expected
    root.files.replace(path, b"PAR1 not really")
    update_metrics_file(store)
    assert content(root.files, "r") == expected
    root.files.delete(path)
    update_metrics_file(store)
    assert content(root.files, "r") == expected


def test_an_iteration_that_was_made_again_has_its_new_figures_alone(tmp_path: Path) -> None:
    made = SyntheticRun(Files(str(tmp_path)), "r")
    for iteration in range(2):
        made.iterate(iteration)
    store = made.draw_line()
    update_metrics_file(store)
    before = content(store.files, "r")
    made.make("rewards", 1, reward=lambda sample, group: 7.0)
    made.draw_line()
    update_metrics_file(store)
    after = content(store.files, "r")
    assert after == metrics_of_run(store).to_pylist()
    assert [row for row in after if row["iteration"] == 0] == [row for row in before if row["iteration"] == 0]
    means = [row["value"] for row in after if row["metric"] == "rollout/reward/raw_mean" and row["iteration"] == 1]
    assert means == [7.0]


def test_duckdb_and_pandas_read_it(tmp_path: Path) -> None:
    store = synthetic_run(Files(str(tmp_path)), "r", 3, 2, 4, 16)
    update_metrics_file(store)
    path = f"{tmp_path}/{metrics_path('r')}"
    wide = pd.read_parquet(path).pivot(index="iteration", columns="metric", values="value")
    expected = [sum(reward_of(g * 4 + i, g) for g in (2 * n, 2 * n + 1) for i in range(4)) / 8 for n in range(3)]
    assert wide["rollout/reward/raw_mean"].tolist() == pytest.approx(expected)
    sql = f"SELECT value FROM '{path}' WHERE metric = 'rollout/reward/raw_mean' ORDER BY iteration"
    assert [row[0] for row in duckdb.sql(sql).fetchall()] == pytest.approx(expected)


def test_a_query_has_the_same_rows_without_the_file(root: Root) -> None:
    store = synthetic_run(root.files, "r", 2, 2, 4, 16)
    rows = asked(root.files, ["r"], "SELECT iteration, metric, value FROM metrics ORDER BY ALL")
    expected = {(r["iteration"], r["metric"], r["value"]) for r in metrics_of_run(store).to_pylist()}
    assert set(rows) == expected and len(rows) == len(expected) > 10
    assert "metrics" in database(root.files, ["r"], "SELECT 1").views()


def test_a_query_tells_attempts_beside_the_line_apart(tmp_path: Path) -> None:
    made = SyntheticRun(Files(str(tmp_path)), "r")
    made.iterate(0)
    made.make("rewards", 0, on_line=False, reward=lambda sample, group: 7.0)
    store = made.draw_line()
    sql = "SELECT value, on_line FROM metrics WHERE metric = 'rollout/reward/raw_mean' ORDER BY on_line"
    line = metrics_of(store.on_line("rewards", 0))["rollout/reward/raw_mean"]  # type: ignore[arg-type]
    assert asked(store.files, ["r"], sql) == [(line, True)]
    assert asked(store.files, ["r"], sql, attempts=True) == [(7.0, False), (line, True)]


def test_the_figures_of_each_stage(tmp_path: Path) -> None:
    store = synthetic_run(Files(str(tmp_path)), "r", 1, 2, 4, 16)
    found = {row["metric"]: row["stage"] for row in metrics_of_run(store).to_pylist()}
    assert (
        found.items()
        >= {
            "rollout/reward/raw_mean": "rewards",
            "rollout/zero_std_share": "advantages",
            "train/loss": "update",
            "train/grad_norm": "update",
            "perf/rollout_time": "rollout",
            "perf/train_time": "update",
            "perf/update_weights_time": "sync",
        }.items()
    )
    assert RunStore(store.files, "r").record()
