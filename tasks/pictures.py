"""What people look at in the UI besides lines of figures: images, the reward curve, the iterations, how far a stage is."""

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from miles_core.observe.gallery import make_gallery
from miles_core.observe.gallery_page import told as gallery_told
from miles_core.observe.history import History
from miles_core.observe.plots import reward_svg, svg_url
from miles_core.observe.query_output import cell
from miles_core.observe.samples import sample_sheet
from miles_core.pipeline.guard import guard_column
from miles_core.store.files import DamagedError, Files
from miles_core.store.manifest import Manifest
from miles_core.store.questions import QUESTIONS, question
from miles_core.store.run_store import RunStore
from tasks.publish import key_of

# The UI shows pictures as data: URLs up to about 300 KB of text; base64 makes 4 bytes of 3.
_SHEET_BYTES = 120_000
_ROWS = 200
_NEWEST = 100
_PAGE_BYTES = 30_000_000
_FIRST_SECONDS, _EVERY_SECONDS = 5.0, 3.0


def publish_samples(history: History, rollout: Manifest, rewards: Manifest | None, advantages: Manifest | None) -> None:
    """Images of an iteration, the best, the worst and some between, with prompt, reward and advantage."""
    files, run = history.store.files, history.store.run
    try:
        sheet = sample_sheet(files, rollout, rewards, advantages, max_bytes=_SHEET_BYTES)
    except (DamagedError, ValueError) as fault:
        text = f"No pictures of iteration {rollout.iteration}: {fault}\n"
    else:
        picture = f"![samples of iteration {rollout.iteration}]({sheet.url})" if sheet else "The engine gave no images."
        text = f"## {run}, iteration {rollout.iteration}\n\n{picture}\n\nAll images: `miles gallery {run}`\n"
    create_markdown_artifact(
        text, key=key_of(run, "samples"), description=f"images of iteration {rollout.iteration} of {run}"
    )


def publish_run(history: History) -> None:
    """The reward curve of the run and a table of its iterations, as they stand."""
    history.refresh()
    run, points = history.store.run, history.points()
    if points:
        last = points[-1]
        # Not an image artifact: the UI prints the whole data: URL beneath one.
        create_markdown_artifact(
            f"![reward of {run}]({svg_url(reward_svg(points, further=history.evaluations()))})\n",
            key=key_of(run, "reward-curve"),
            description=f"reward of {run} up to iteration {last.iteration}: mean {last.mean:.4g}",
        )
    create_table_artifact(
        table=history.table(_NEWEST, guard_column(history, _NEWEST)),
        key=key_of(run, "iterations"),
        description=f"the newest {_NEWEST} iterations of {run}",
    )


@dataclass(frozen=True)
class Answer:
    """What a question asks, and the first rows of its answer; `more`: there are further ones."""

    name: str
    asks: str
    sql: str
    table: list[dict[str, Any]]
    more: bool


def answer_of(store: RunStore, name: str, sql: str | None = None) -> Answer:
    """The answer of a ready question, or of a query, over one run; at most its first 200 rows. Publishes nothing.

    Raises InputError for SQL that is wrong or would write, DamagedError or PrunedError for a part that cannot be read.
    """
    from miles_core.observe.database import database as open_database

    text = sql or question(name).sql
    database = open_database(store.files, [store.run], text)
    rows = database.run()
    shown: list[dict[str, Any]] = []
    for batch in database.read(rows):
        shown += [{column: cell(value) for column, value in row.items()} for row in batch.to_pylist()]
        if len(shown) > _ROWS:
            break
    asks = "your query" if sql else QUESTIONS[name].asks
    return Answer(name, asks, text, shown[:_ROWS], len(shown) > _ROWS)


def publish_answer(run: str, answer: Answer) -> None:
    """An answer as a table."""
    first = f", the first {_ROWS} rows" if answer.more else ""
    create_table_artifact(
        table=answer.table,
        key=key_of(run, answer.name),
        description=f"{run}: {answer.asks}{first}\n\n```sql\n{answer.sql}\n```",
    )


def publish_gallery(store: RunStore, iterations: Sequence[int], path: Path) -> None:
    """Write the gallery page, and say where it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = make_gallery(store, iterations, _PAGE_BYTES, (f"miles lineage {store.run}", ""))
    Files(str(path.parent)).replace(path.name, made.html)
    lines = "\n".join(f"- {line.strip()}" for line in gallery_told(made, f"`{path}`"))
    create_markdown_artifact(
        f"## Gallery of {store.run}\n\n{lines}\n", key=key_of(store.run, "gallery"), description=f"gallery page: {path}"
    )


class Progress:
    """Passes progress on, and shows stages that take long as a bar in the UI. Made inside a flow run."""

    def __init__(self, run: str, further: Callable[[str, int, int], None]) -> None:
        self._run, self._further = run, further
        # Stages call from threads of their own, which do not know the flow run.
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._bars: dict[str, dict[str, Any]] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._further(stage, done, total)
        now = time.monotonic()
        with self._lock:
            bar = self._bars.setdefault(stage, {"id": None, "due": now + _FIRST_SECONDS})
            if not total or (now < bar["due"] and not (bar["id"] and done >= total)):
                return
            bar["due"] = now + _EVERY_SECONDS
            # A server that does not answer is told of by what must reach it, not by a bar.
            with contextlib.suppress(Exception):
                self._context.copy().run(self._show, stage, bar, 100.0 * done / total, f"{done} of {total}")

    def finish(self) -> None:
        """The stages are over: bars stand at the end."""
        for stage, bar in self._bars.items():
            if bar["id"] is not None:
                with contextlib.suppress(Exception):
                    self._show(stage, bar, 100.0, "done")

    def _show(self, stage: str, bar: dict[str, Any], percent: float, text: str) -> None:
        if bar["id"] is None:
            bar["id"] = create_progress_artifact(
                percent, key=key_of(self._run, f"{stage}-progress"), description=f"{stage} of {self._run}: {text}"
            )
        else:
            update_progress_artifact(bar["id"], percent, description=f"{stage} of {self._run}: {text}")
