"""The database of queries: the store's views, and `metrics`."""

from collections.abc import Sequence

from miles_core.observe.metrics_file import query_view
from miles_core.store.files import Files
from miles_core.store.schemas import METRICS
from miles_core.store.sql import Database


def database(files: Files, runs: Sequence[str], sql: str, *, attempts: bool = False) -> Database:
    """As store.sql.Database, with the view `metrics`: a figure of a stage on the line, of every attempt with `attempts`."""
    metrics = {"metrics": (METRICS, lambda: query_view(files, runs, attempts))}
    return Database(files, runs, sql, attempts=attempts, further=metrics)
