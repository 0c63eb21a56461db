"""miles train RECIPE: run or carry on a training."""

import os

import typer

from flows.cli.server import ensure_server, ui_address
from flows.session import plan
from miles_core.config.forms import grouped
from miles_core.config.overrides import from_environment, from_flags
from miles_core.errors import InputError


def train(
    context: typer.Context,
    recipe: str = typer.Argument(
        help="Recipe: tiny, tiny-ocr, or a full name; same: what the run of --run-id was begun with."
    ),
) -> None:
    """Train from a recipe, or carry the run on. Any option of `miles config` goes on the command line:
    --num-rollout 5 --lr 1e-3 --run-id NAME --artifact-root DIR."""
    if recipe.startswith("-"):
        raise InputError(f"the recipe is written before the options: miles train RECIPE {recipe} …")
    overrides = from_environment(os.environ) | from_flags(context.args)
    planned = plan(recipe, overrides)
    overrides["run_id"], overrides["new"] = planned.store.run, False
    overrides["artifact_root"] = planned.store.files.root
    api = ensure_server()
    print(f"Prefect UI {ui_address(api)}", flush=True)
    from flows.train import train as train_flow

    train_flow(recipe=recipe, options=grouped(overrides))
