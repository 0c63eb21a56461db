"""What a stage's task shows: a line for the terminal and the run's log, an artifact in the Prefect UI."""

import re
from typing import Any, cast

from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed, State

from miles_core.observe.terminal import figures_of, stage_line
from miles_core.pipeline.stage import Outcome
from miles_core.store.files import Files
from miles_core.store.manifest import Manifest

TOLD = "Failed, training goes on"


def publish(outcome: Outcome, files: Files) -> Manifest:
    """Tell what became of a stage. A reused one ends in the state Cached: Prefect takes a state that a task returns
    as the task's own, and its data as the result."""
    line, m = stage_line(outcome), outcome.manifest
    print(line, flush=True)
    if FlowRunContext.get() is not None:
        get_run_logger().info(line.strip())
        create_markdown_artifact(
            _markdown(outcome, files),
            key=key_of(m.run, m.stage),
            description=" ".join(line.split()),
        )
    if outcome.reused:
        return cast(Manifest, Completed(name="Cached", data=outcome.manifest))
    return outcome.manifest


def publish_failure(run: str, stage: str, sentence: str) -> State:
    """Tell of a stage whose failure ends nothing. The state, for its task to return, is a failed one by the name TOLD."""
    print(f"  {sentence}", flush=True)
    if FlowRunContext.get() is not None:
        get_run_logger().error(sentence)
        create_markdown_artifact(f"## {stage}\n\n{sentence}\n", key=key_of(run, stage), description=sentence)
    return Failed(name=TOLD, message=sentence)


def commit(stage: Any, *arguments: Any) -> Manifest:
    """Call a stage's task; its committed manifest, also out of the state Cached."""
    return commit_or_reuse(stage, *arguments)[0]


def commit_or_reuse(stage: Any, *arguments: Any) -> tuple[Manifest, bool]:
    """Call a stage's task; its committed manifest, and whether it was reused."""
    state = stage(*arguments, return_state=True)
    return state.result(), state.name == "Cached"


class Backfill:
    """The progress of a rerun over several iterations: a bar for all, a table for each, a line in the log."""

    def __init__(self, run: str, stage: str, total: int) -> None:
        self.key = key_of(run, f"rerun-{stage}")
        self.done, self.total = 0, total
        self.bar: Any = create_progress_artifact(
            0.0, key=f"{self.key}-progress", description=f"0 of {total} iterations"
        )

    def told(self, iteration: int, lines: list[str]) -> None:
        """An iteration is over: what became of it, in words."""
        self.done += 1
        share = 100.0 * self.done / self.total
        update_progress_artifact(self.bar, share, description=f"{self.done} of {self.total} iterations")
        text = "\n".join(f"- {line}" for line in lines)
        create_markdown_artifact(
            f"## iteration {iteration}\n\n{text}\n", key=self.key, description=f"iteration {iteration}"
        )
        get_run_logger().info("iteration %d: %s", iteration, "; ".join(lines))


def key_of(run: str, what: str) -> str:
    """The key under which the UI collects a run's artifacts of a kind."""
    return re.sub(r"[^a-z0-9-]+", "-", f"{run}-{what}".lower())


def _markdown(outcome: Outcome, files: Files) -> str:
    m = outcome.manifest
    rows = {
        "run": f"{m.run}, iteration {m.iteration}" if m.iteration >= 0 else f"{m.run}, before training",
        "what": "reused" if outcome.reused else "computed",
        "why": outcome.reason,
        "figures": figures_of(m.stage, m.summary),
        "rows": m.rows,
        "seconds": f"{outcome.seconds:.1f}",
        "content digest": m.content_digest,
        "folder": f"`{files.url(m.folder)}`",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value != "")
    return f"## {m.stage}\n\n| | |\n|---|---|\n{table}\n"
