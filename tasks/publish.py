"""What a stage's task shows: a line for the terminal and the run's log, an artifact in the Prefect UI."""

import re
from typing import Any, cast

from prefect.artifacts import create_markdown_artifact, create_progress_artifact, update_progress_artifact
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed, State

from miles_core.observe.terminal import figures_of, stage_line
from miles_core.pipeline.stage import Outcome, Step
from miles_core.store.digest import sha256_hex
from miles_core.store.files import Files
from miles_core.store.manifest import Manifest

TOLD = "Failed, training goes on"


def publish(outcome: Outcome, step: Step) -> Manifest:
    """Tell what became of a stage, of a rerun under a key of its own.

    A reused one ends in the state Cached: Prefect takes a state that a task returns as the task's own, and its data as
    the result.
    """
    line, m = stage_line(outcome), outcome.manifest
    print(line, flush=True)
    if FlowRunContext.get() is not None:
        get_run_logger().info(line.strip())
        place = f"iteration {m.iteration}" if m.iteration >= 0 else "before training"
        place += "" if step.moves_line else ", beside the run's line"
        create_markdown_artifact(
            _markdown(outcome, step.store.files, place),
            key=key_of(step.store.run, m.stage if step.moves_line else f"{m.stage}-beside"),
            description=f"{place}: {' '.join(line.split())}",
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
        self.run, self.key = run, key_of(run, f"{stage}-rerun")
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
            f"## {self.run}, iteration {iteration}\n\n{text}\n",
            key=self.key,
            description=f"iteration {iteration} of {self.run}: {'; '.join(lines)}",
        )
        get_run_logger().info("iteration %d: %s", iteration, "; ".join(lines))


def key_of(run: str, what: str) -> str:
    """The key under which the UI collects a run's artifacts of a kind: small letters, digits and dashes. A run whose name
    has others gets four digits of its digest, so that no two runs share a key; no kind ends in a dash and another kind."""
    name = re.sub(r"[^a-z0-9-]+", "-", run.lower())
    return f"{name}-{what}" if name == run else f"{name}-{sha256_hex(run.encode())[:4]}-{what}"


def _markdown(outcome: Outcome, files: Files, place: str) -> str:
    m = outcome.manifest
    rows = {
        "run": f"{m.run}, {place}",
        "attempt": m.attempt,
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
