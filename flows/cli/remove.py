"""miles remove RUN: delete a run and all that it holds."""

import typer

from miles_core.config.folders import home
from miles_core.errors import InputError
from miles_core.observe.terminal import several
from miles_core.pipeline.remove import refuse_removal, remove_run
from miles_core.pipeline.run import actors_of, open_run
from miles_core.runtime.heads import end_left_heads


def remove(
    run: str = typer.Argument(help="Name of the run."),
    yes: bool = typer.Option(False, "--yes", help="Remove it; without this only what would go is said."),
    artifact_root: str | None = typer.Option(None, help="Folder of all runs."),
) -> None:
    """Delete a run: its images, rewards, policies, everything. Refused while a command trains it, and where forks stand on
    it. What was sent to wandb, and galleries, stay."""
    store, _ = open_run(run, artifact_root)
    if store.run != run:
        raise InputError(f"{run} is run {store.run} at present: give the name itself")
    refuse_removal(store)
    told = f"run {run}, {several(len(store.iterations()), 'iteration')}, at {store.files.url(run)}"
    if not yes:
        raise InputError(f"{told} would be deleted for good: give --yes as well")
    remove_run(store)
    end_left_heads(home() / "state", actors_of(store))
    print(f"{told} was deleted")
