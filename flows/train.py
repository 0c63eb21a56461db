"""A whole run: iterations until num_rollout, each a flow of its own."""

import shlex
import time
from typing import Annotated, Any

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field

from deployments.recipes import RECIPES
from flows.iteration import iteration_of
from flows.session import SAME, train_session
from miles_core.config.forms import NONE, Options, changes_of
from miles_core.config.overrides import as_flags
from miles_core.observe.terminal import iteration_line
from miles_core.pipeline.budget import disk_line
from miles_core.pipeline.evaluation import missing
from miles_core.pipeline.guard import carried
from miles_core.pipeline.iteration import finished
from miles_core.pipeline.stage import library_versions, versions_told
from tasks.failure import told
from tasks.guard import heed
from tasks.restarts import refuse_in_vain


def _name() -> str:
    given = flow_run.parameters
    return f"{changes_of(given.get('options')).get('run_id') or given['recipe']} · train"


Recipe = Annotated[str, Field(json_schema_extra={"enum": [*RECIPES, SAME]})]


@flow(name="train", flow_run_name=_name, validate_parameters=False)
def train(recipe: Recipe = "tiny", options: Options = NONE) -> dict[str, Any]:
    """Train from a recipe, or carry the run on where it stands.

    Args:
        recipe: what is trained: a recipe of deployments/recipes; or `same`: what the run named by options.run.run_id was
            begun with.
        options: options by concern; those left out are as the recipe has them.
    """
    started, changes = time.monotonic(), changes_of(options)
    name = changes.get("run_id") or recipe
    command = shlex.join(["miles", "train", recipe, *as_flags(changes)])
    with told(f"run {name}", name, command):
        while True:
            result = _trained(recipe, changes, started)
            if "rewound" not in result:
                return result
            recipe, changes = SAME, result["rewound"]


def _trained(recipe: str, changes: dict[str, Any], started: float) -> dict[str, Any]:
    """Train one run. Where the guard rewinds it the result holds `rewound`, the options of the fork to train in its place."""
    with train_session(recipe, changes, flow_run.id) as session:
        refuse_in_vain(session.store)
        run, root = session.store.run, session.store.files.root
        total = session.config.run.num_rollout
        print(f"run {run} · {total} iterations · artifacts {session.store.files.url(run)}", flush=True)
        if changed := versions_told((session.store.record() or {}).get("versions", {}), library_versions()):
            print(f"other versions than when the run was begun: {', '.join(changed)}", flush=True)
        reused, took = 0, list[float]()
        for number in range(total):
            step = session.step(number)
            if finished(step) and not missing(step):
                print(f"iteration {number}: reused", flush=True)
                session.log.catch_up(step)
                reused += 1
                continue
            if reused == number:
                print(disk_line(step), flush=True)
            if number and (fork := heed(session.store, session.config, session.history, number - 1)):
                return {"rewound": carried(session.store, session.config, fork)}
            print(f"iteration {number}", flush=True)
            begun = time.monotonic()
            iteration_of(number, run)(run=run, iteration=number, artifact_root=root)
            took.append(time.monotonic() - begun)
            print(iteration_line(number, total, took, session.rewards), flush=True)
        if fork := heed(session.store, session.config, session.history, total - 1):
            return {"rewound": carried(session.store, session.config, fork)}
        seconds = time.monotonic() - started
        print(f"run {run} is done: {total - reused} iterations computed, {reused} reused, {seconds:.1f} s", flush=True)
        return {"run": run, "artifact_root": root, "iterations": total, "reused": reused}
