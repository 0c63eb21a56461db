"""metrics.parquet of a run, and the view `metrics` of queries: a row a figure, made from stage summaries alone."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from miles_core.observe.metrics import metrics_of
from miles_core.observe.rows import on_line
from miles_core.store.catalog import read_catalog
from miles_core.store.files import Files
from miles_core.store.line import standing
from miles_core.store.manifest import Manifest
from miles_core.store.parts import encode_table
from miles_core.store.run_store import RunStore
from miles_core.store.schemas import METRICS
from miles_core.store.stages import StageName

_STAGES: tuple[StageName, ...] = ("rollout", "rewards", "advantages", "update", "sync", "evaluation")


def metrics_path(run: str) -> str:
    """Where it lies under the artifact root."""
    return f"{run}/metrics.parquet"


def metrics_table(manifests: Iterable[tuple[Manifest, bool]]) -> pa.Table:
    """The rows of committed stages, each with whether it is on its run's line."""
    rows = [row for manifest, named in manifests for row in _rows(manifest, named)]
    return pa.Table.from_pylist(rows, schema=METRICS)


def metrics_of_run(store: RunStore) -> pa.Table:
    """All that metrics.parquet has to hold: the stages on the run's line, by iteration."""
    return _ordered(metrics_table((manifest, True) for manifest in _line(store, None)))


def update_metrics_file(store: RunStore) -> None:
    """Have metrics.parquet hold what the line names now: the iterations at which it does not, and all of them where it is
    missing or unreadable, are made from the store."""
    there = _read(store.files, metrics_path(store.run))
    if there is None:
        made = metrics_of_run(store)
    else:
        stale = _stale(store, there)
        if not stale:
            return
        kept = there.filter(pa.array([i not in stale for i in there.column("iteration").to_pylist()], pa.bool_()))
        made = _ordered(pa.concat_tables([kept, metrics_table((m, True) for m in _line(store, stale))]))
    store.files.replace(metrics_path(store.run), encode_table(made))


def query_view(files: Files, runs: Sequence[str], attempts: bool) -> pa.Table:
    """The rows of `miles query`'s view `metrics`: from the store's summaries, never from a metrics.parquet."""
    catalog = read_catalog(files, runs, _STAGES, _STAGES if attempts else ())
    return metrics_table((entry.manifest, entry.on_line) for entry in catalog.entries)


def _stale(store: RunStore, there: pa.Table) -> set[int]:
    """The iterations at which the line names another attempt than the rows are of."""
    slots = ((*slot.partition("/"), name) for slot, name in (store.record() or {}).get("line", {}).items())
    named = {(int(i), stage, standing(name, store.run)[1]) for i, _, stage, name in slots if stage in _STAGES}
    columns = (there.column(name).to_pylist() for name in ("iteration", "stage", "attempt"))
    return {place[0] for place in named ^ set(zip(*columns, strict=True))}


def _line(store: RunStore, iterations: set[int] | None) -> list[Manifest]:
    """What the line names, under this run's name also where a fork keeps it of another."""
    return [replace(m, run=store.run) for stage in _STAGES for m in on_line(store, stage, iterations).values()]


def _rows(manifest: Manifest, named: bool) -> list[dict[str, Any]]:
    same = {
        "run": manifest.run,
        "iteration": manifest.iteration,
        "stage": manifest.stage,
        "attempt": manifest.attempt,
        "committed": datetime.fromtimestamp(manifest.times["committed_at"], UTC),
        "on_line": named,
    }
    return [same | {"metric": name, "value": value} for name, value in metrics_of(manifest).items()]


def _ordered(table: pa.Table) -> pa.Table:
    return table.sort_by([("iteration", "ascending"), ("committed", "ascending"), ("metric", "ascending")])


def _read(files: Files, path: str) -> pa.Table | None:
    with contextlib.suppress(FileNotFoundError, pa.ArrowException, OSError):
        table = pq.read_table(pa.BufferReader(files.read(path)))
        if table.schema == METRICS:
            return table
    return None
