"""A whole run: iterations until num_rollout, each a flow of its own."""

import time
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from flows.iteration import iteration as run_iteration
from flows.session import train_session
from miles_core.pipeline.budget import disk_line
from miles_core.pipeline.evaluation import missing
from miles_core.pipeline.iteration import finished


def _name() -> str:
    given = flow_run.parameters
    return f"{(given.get('overrides') or {}).get('run_id') or given['recipe']} · train"


@flow(name="train", flow_run_name=_name)
def train(recipe: str = "tiny", overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train from a recipe, or carry the run on where it stands.

    Args:
        recipe: name of a recipe in deployments/recipes.
        overrides: options by name, e.g. {"num_rollout": 5, "lr": 0.001}; the same names as the command line's.
    """
    started = time.monotonic()
    with train_session(recipe, overrides or {}) as session:
        run, root = session.store.run, session.store.files.root
        total = session.config.run.num_rollout
        print(f"run {run} · {total} iterations · artifacts {session.store.files.url(run)}", flush=True)
        reused = 0
        for number in range(total):
            step = session.step(number)
            if flow_run.run_count == 1 and finished(step) and not missing(step):
                print(f"iteration {number}: reused", flush=True)
                reused += 1
                continue
            if reused == number:
                print(disk_line(step), flush=True)
            print(f"iteration {number}", flush=True)
            run_iteration(run=run, iteration=number, artifact_root=root)
        seconds = time.monotonic() - started
        print(f"run {run} is done: {total - reused} iterations computed, {reused} reused, {seconds:.1f} s", flush=True)
        return {"run": run, "artifact_root": root, "iterations": total, "reused": reused}
