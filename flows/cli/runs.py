"""miles runs: the runs under an artifact root."""

import datetime

import typer

from miles_core.config.folders import artifact_root as root_of
from miles_core.errors import InputError
from miles_core.store.files import Files, reach
from miles_core.store.run_store import RunStore
from miles_core.store.run_store import runs as names_of


def runs(artifact_root: str | None = typer.Option(None, help="Folder of all runs.")) -> None:
    """List runs: name, recipe, committed iterations, when begun."""
    files = Files(root_of(given=artifact_root))
    reach(files)
    found = names_of(files)
    if not found:
        print(f"no runs under {files.root}")
    for name in found:
        try:
            record = RunStore(files, name).record() or {}
        except InputError as fault:
            print(f"{name:<24} unreadable: {fault}")
            continue
        done = sum(slot.endswith("/update") for slot in record["line"])
        wanted = record["config"]["run"]["num_rollout"]
        begun = datetime.datetime.fromtimestamp(record["created_at"]).isoformat(" ", "seconds")
        print(f"{name:<24} {record['recipe']:<20} {done} of {wanted} iterations  begun {begun}")
