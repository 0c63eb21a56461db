"""What a stage's task shows: a line for the terminal and the run's log, an artifact in the Prefect UI."""

import re
from typing import Any, cast

from prefect.artifacts import create_markdown_artifact
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
    line = stage_line(outcome)
    print(line, flush=True)
    if FlowRunContext.get() is not None:
        get_run_logger().info(line.strip())
        key = _key(outcome.manifest.run, outcome.manifest.stage)
        create_markdown_artifact(_markdown(outcome, files), key=key, description=" ".join(line.split()))
    if outcome.reused:
        return cast(Manifest, Completed(name="Cached", data=outcome.manifest))
    return outcome.manifest


def publish_failure(run: str, stage: str, sentence: str) -> State:
    """Tell of a stage whose failure ends nothing. The state, for its task to return, is a failed one by the name TOLD."""
    print(f"  {sentence}", flush=True)
    if FlowRunContext.get() is not None:
        get_run_logger().error(sentence)
        create_markdown_artifact(f"## {stage}\n\n{sentence}\n", key=_key(run, stage), description=sentence)
    return Failed(name=TOLD, message=sentence)


def commit(stage: Any, *arguments: Any) -> Manifest:
    """Call a stage's task; its committed manifest, also out of the state Cached."""
    manifest: Manifest = stage(*arguments, return_state=True).result()
    return manifest


def _key(run: str, stage: str) -> str:
    return re.sub(r"[^a-z0-9-]+", "-", f"{run}-{stage}".lower())


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
