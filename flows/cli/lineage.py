"""miles lineage RUN ITER ROW: one sample from its prompt to the optimizer step."""

import json

import typer

from miles_core.errors import InputError
from miles_core.observe.lineage_text import lineage_lines
from miles_core.pipeline.run import existing_iteration, open_run
from miles_core.store.lineage import trace


def lineage(
    run: str = typer.Argument(help="Name of the run."),
    iteration: str = typer.Argument(help="Number of the iteration, from 0."),
    row: str = typer.Argument(help="The sample's sample_index, which grows through the whole run."),
    as_json: bool = typer.Option(False, "--json", help="All that is known, as JSON."),
    artifact_root: str | None = typer.Option(None, help="Folder of all runs."),
) -> None:
    """Show where a sample came from and what became of it, with attempts and digests."""
    store, _ = open_run(run, artifact_root)
    number = existing_iteration(store, iteration)
    if not row.isdecimal() or len(row) > 18:
        raise InputError(f"{row!r} is no sample_index: give a whole number from 0")
    found = trace(store, number, int(row))
    if as_json:
        print(json.dumps(found.to_json(), default=str, ensure_ascii=False, indent=1))
        return
    for line in lineage_lines(found):
        print(line)
