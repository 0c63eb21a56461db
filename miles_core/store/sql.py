"""DuckDB over the committed attempts of runs, in a folder or a bucket: a view a stage, read column by column.

Parts are Arrow datasets that DuckDB scans lazily: a query fetches the columns that it names, of the iterations that it
asks for. Only what a manifest names is read. Nothing is written: the database lives in memory, and has no access to
files.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from miles_core.errors import InputError
from miles_core.store import schemas
from miles_core.store.catalog import Catalog, Entry, read_catalog
from miles_core.store.files import DamagedError, Files
from miles_core.store.part_file import PartFile
from miles_core.store.parts import Part, read_bytes
from miles_core.store.sql_text import SAMPLES, fault_sentence, refuse_writing, samples_view
from miles_core.store.stages import STAGES, StageName
from miles_core.store.tombstone import PrunedError

_THREADS = 16
_TIME = pa.timestamp("us", tz="UTC")
_PLACE = pa.schema(
    [
        ("run", pa.string()),
        ("iteration", pa.int64()),
        ("attempt", pa.string()),
        ("part", pa.string()),
        ("on_line", pa.bool_()),
    ]
)
_MANIFESTS = pa.schema(
    [
        ("stage", pa.string()),
        ("run", pa.string()),
        ("iteration", pa.int64()),
        ("attempt", pa.string()),
        ("fingerprint", pa.string()),
        ("content_digest", pa.string()),
        ("rows", pa.int64()),
        ("bytes", pa.int64()),
        ("started", _TIME),
        ("committed", _TIME),
        ("seconds", pa.float64()),
        ("on_line", pa.bool_()),
        ("pruned", pa.string()),
    ]
)
# The columns of a stage that no run has committed yet.
_BASE = {
    "policy": schemas.POLICY,
    "prompts": schemas.PROMPTS,
    "rollout": schemas.rollout_schema(sde_steps=1, steps=1),
    "rewards": schemas.rewards_schema([]),
    "advantages": schemas.ADVANTAGES,
    "update": schemas.UPDATE,
    "sync": schemas.SYNC,
    "evaluation": schemas.evaluation_schema([]),
    "latents": schemas.latents_schema(latent_shape=(1,), positions=1, latent_dtype=pa.float32()),
}
TABLES: dict[str, StageName] = {**{name: name for name in STAGES}, "latents": "rollout"}


class Database:
    """The views that a query names, over some runs. `notes` tell in words what they do not hold.

    sql: the query, whose words say which stages are read. attempts: views hold every committed attempt, not only those
    on a run's line. further: views by name, with their schema and what makes their rows where the query names them.
    """

    def __init__(
        self,
        files: Files,
        runs: Sequence[str],
        sql: str,
        *,
        attempts: bool = False,
        further: Mapping[str, tuple[pa.Schema, Callable[[], pa.Table]]] | None = None,
    ) -> None:
        self.files, self._sql, self._sources, self._further = files, sql, list[PartFile](), further or {}
        words = set(re.findall(r"\w+", sql.lower()))
        tables = {t for t in TABLES if words & {t, f"{t}_all"}} | (set(SAMPLES) if "samples" in words else set())
        whole = tables if attempts else {t for t in tables if f"{t}_all" in words}
        told = "manifests" in words
        stages: set[StageName] = set(STAGES) if told else {TABLES[t] for t in tables}
        every: set[StageName] = set(STAGES) if told else {TABLES[t] for t in whole}
        catalog = read_catalog(files, runs, stages, every)
        self.notes = catalog.notes
        self._connection = duckdb.connect(
            ":memory:", config={"enable_external_access": "false", "python_enable_replacements": "false"}
        )
        for table, base in _BASE.items():
            self._view(table, base, catalog.of(TABLES[table]) if table in tables else [], attempts)
        self._connection.register("manifests", _manifests(catalog if told else Catalog([], [])))
        self._connection.register("_upstream", _upstream(catalog))
        for name, (schema, rows) in self._further.items():
            self._connection.register(name, rows() if name in words else schema.empty_table())
        self._connection.execute(samples_view(self._columns("rewards"), attempts))
        self._connection.execute("SET lock_configuration = true")

    def run(self) -> pa.RecordBatchReader:
        """The query's rows, batch by batch; see read. Raises InputError for SQL that is wrong or would write."""
        try:
            refuse_writing(self._connection.extract_statements(self._sql))
            return self._rows()
        except duckdb.Error as fault:
            raise self._told(fault) from None

    def _rows(self) -> pa.RecordBatchReader:
        try:
            return self._connection.sql(self._sql).to_arrow_reader(1000)
        except (duckdb.BinderException, duckdb.CatalogException):
            # sql() streams and does not say where a wrong name stands; execute() says it.
            self._connection.execute(self._sql)
            raise

    def read(self, rows: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
        """Batches of a query. Raises DamagedError or PrunedError for a part that cannot be read."""
        try:
            yield from rows
        except (duckdb.Error, pa.ArrowException, OSError) as fault:
            raise self._told(fault) from None

    def views(self) -> dict[str, list[str]]:
        """The columns of each view a person uses."""
        names = [*(name for table in _BASE for name in (table, f"{table}_all")), "samples", "manifests", *self._further]
        return {name: self._columns(name) for name in names}

    def _columns(self, view: str) -> list[str]:
        return [row[0] for row in self._connection.execute(f"DESCRIBE {view}").fetchall()]

    def _told(self, fault: Exception) -> Exception:
        for source in self._sources:
            if isinstance(source.fault, DamagedError):
                return _damaged(str(source.fault))
            if source.fault:
                return source.fault
        if "reading the stream" in str(fault):
            # A part that opens and does not decode: which one, its digest says.
            for source in self._sources:
                try:
                    read_bytes(self.files, source.part)
                except DamagedError as damage:
                    return _damaged(str(damage))
        return InputError(fault_sentence(str(fault)))

    def _view(self, table: str, base: pa.Schema, entries: list[Entry], attempts: bool) -> None:
        """`<table>_all` over the parts of `entries`, and `<table>` over those on the line."""
        kinds: dict[str, tuple[pa.Schema, list[ds.Fragment]]] = {}
        if table == "latents":
            entries = self._not_pruned(entries)
        with ThreadPoolExecutor(_THREADS) as threads:
            for schema, fragments in threads.map(lambda entry: self._fragments(table, entry), entries):
                kinds.setdefault(str(schema), (schema, []))[1].extend(fragments)
        if not kinds:
            kinds[""] = (base.remove_metadata(), [])
        selects = []
        for number, (schema, fragments) in enumerate(kinds.values()):
            source = f"_{table}_{number}"
            whole = pa.schema([*schema, *_PLACE])
            form = ds.ParquetFileFormat()
            data = ds.FileSystemDataset(fragments, whole, form) if fragments else whole.empty_table()
            self._connection.register(source, data)
            # Tensors of several shapes meet in one view.
            lists = [f.name for f in schema if pa.types.is_fixed_size_list(f.type)]
            casts = ", ".join(f'CAST("{n}" AS FLOAT[]) AS "{n}"' for n in lists)
            selects.append(f"SELECT *{f' REPLACE ({casts})' if casts else ''} FROM {source}")
        self._connection.execute(f"CREATE VIEW {table}_all AS {' UNION ALL BY NAME '.join(selects)}")
        where = "" if attempts else " WHERE on_line"
        self._connection.execute(f"CREATE VIEW {table} AS SELECT * FROM {table}_all{where}")

    def _fragments(self, table: str, entry: Entry) -> tuple[pa.Schema, list[ds.Fragment]]:
        """The parts of an attempt as fragments, and their schema."""
        manifest = entry.manifest
        parts = manifest.latents if table == "latents" else manifest.data
        fragments = [self._fragment(entry, part) for part in parts]
        if not fragments:
            return _BASE[table].remove_metadata(), []
        try:
            schema = fragments[0].physical_schema
        except (pa.ArrowException, DamagedError, PrunedError, OSError) as fault:
            known = next((s.fault for s in self._sources if s.part == parts[0] and s.fault), None)
            if known is not None and not isinstance(known, DamagedError):
                raise known from None
            text = str(known or f"{self.files.url(parts[0].path)} is no Parquet file ({' '.join(str(fault).split())})")
            raise _damaged(text) from None
        return pa.schema([field.remove_metadata() for field in schema]), fragments

    def _fragment(self, entry: Entry, part: Part) -> ds.Fragment:
        m = entry.manifest
        name = part.path.rsplit("/", 1)[1].removesuffix(".parquet")
        place = (m.run, m.iteration, m.attempt, name, entry.on_line)
        where = None
        for field, value in zip(_PLACE, place, strict=True):
            term = ds.field(field.name) == pa.scalar(value, field.type)
            where = term if where is None else where & term
        source = PartFile(self.files, part)
        self._sources.append(source)
        return ds.ParquetFileFormat().make_fragment(pa.PythonFile(source, mode="r"), partition_expression=where)

    def _not_pruned(self, entries: list[Entry]) -> list[Entry]:
        gone = [e for e in entries if e.pruned and "latents" in e.pruned.what]
        for run in dict.fromkeys(e.manifest.run for e in gone):
            numbers = sorted({e.manifest.iteration for e in gone if e.manifest.run == run})
            option = next(e.pruned.option for e in gone if e.manifest.run == run and e.pruned)
            self.notes.append(
                f"run {run}: latents of {len(numbers)} iterations ({numbers[0]} to {numbers[-1]}) were pruned ({option}) "
                f"and are left out: `miles rerun {run} ITER rollout` generates them again"
            )
        return [e for e in entries if e not in gone]


def _damaged(text: str) -> DamagedError:
    return DamagedError(f"{text}: leave that run out by --run, or have `miles train` make it again")


def _manifests(catalog: Catalog) -> pa.Table:
    rows = []
    for entry in catalog.entries:
        m = entry.manifest
        started, committed = m.times["started_at"], m.times["committed_at"]
        rows.append(
            {name: getattr(m, name) for name in ("stage", "run", "iteration", "attempt", "fingerprint")}
            | {"content_digest": m.content_digest, "rows": m.rows, "bytes": sum(p.bytes for p in m.parts)}
            | {"started": datetime.fromtimestamp(started, UTC), "committed": datetime.fromtimestamp(committed, UTC)}
            | {"seconds": committed - started, "on_line": entry.on_line}
            | {"pruned": ", ".join(entry.pruned.what) if entry.pruned else None}
        )
    return pa.Table.from_pylist(rows, schema=_MANIFESTS)


def _upstream(catalog: Catalog) -> pa.Table:
    """Which attempt consumed which, within an iteration."""
    kinds: list[Any] = [("run", pa.string()), ("iteration", pa.int64()), ("stage", pa.string())]
    kinds += [("attempt", pa.string()), ("upstream", pa.string())]
    rows = [
        {"run": m.run, "iteration": m.iteration, "stage": m.stage, "attempt": m.attempt, "upstream": u.attempt}
        for m in (entry.manifest for entry in catalog.entries)
        for u in m.upstream.values()
        if (m.stage, u.stage) in (("rollout", "prompts"), ("rewards", "rollout"), ("advantages", "rewards"))
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema(kinds))
