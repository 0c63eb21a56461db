"""Which runs stand on attempts of a run: `forks/<fork>.json` in the run that holds them, written before the fork's own
record, so that nothing is pruned from under one that is just being made."""

import json
import time

from miles_core.store.digest import canonical_json
from miles_core.store.files import Files
from miles_core.store.line import standing
from miles_core.store.run_store import RunStore

# Longer than a fork takes to be made: a note of an older one without a record belongs to nobody.
_BEING_MADE_SECONDS = 24 * 3600.0


def note_fork(files: Files, holder: str, fork: str, slots: dict[str, str]) -> None:
    """Note that `fork` stands on these attempts of `holder`, by slot of the line. Once it has a record, that says it."""
    files.replace(_path(holder, fork), canonical_json({"slots": slots, "when": time.time()}))


def drop_note(files: Files, holder: str, fork: str) -> None:
    """Take the note back, for a fork that was not made."""
    files.delete(_path(holder, fork))


def forks_of(store: RunStore) -> dict[str, dict[str, str]]:
    """The forks that stand on attempts of a run, each with these by slot of its line. One that was removed is none."""
    found = {}
    for name in store.files.list(f"{store.run}/forks"):
        fork = name.removesuffix(".json")
        record = store.of(fork).record()
        if record is None:
            slots = _noted(store.files, store.run, fork)
        else:
            entries = {place: standing(named, fork) for place, named in record["line"].items()}
            slots = {place: attempt for place, (holder, attempt) in entries.items() if holder == store.run}
        if slots:
            found[fork] = slots
    return found


def _noted(files: Files, holder: str, fork: str) -> dict[str, str]:
    try:
        note = json.loads(files.read(_path(holder, fork)))
        young = time.time() - note["when"] < _BEING_MADE_SECONDS
        return {str(place): str(attempt) for place, attempt in note["slots"].items()} if young else {}
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _path(holder: str, fork: str) -> str:
    return f"{holder}/forks/{fork}.json"
