"""The committed attempts of runs, read side by side: what queries look at."""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from miles_core.errors import InputError
from miles_core.store.files import Files
from miles_core.store.line import standing
from miles_core.store.manifest import Manifest
from miles_core.store.run_store import RunStore, check_run_id
from miles_core.store.run_store import runs as names_of
from miles_core.store.stages import ITERATION_STAGES, StageName
from miles_core.store.tombstone import Tombstone

_THREADS = 16


@dataclass(frozen=True)
class Entry:
    """A committed attempt, whether it is on its run's line, and what was pruned from it."""

    manifest: Manifest
    on_line: bool
    pruned: Tombstone | None


@dataclass(frozen=True)
class Catalog:
    """Entries by run, iteration and stage; `notes` tell in words what is not among them."""

    entries: list[Entry]
    notes: list[str]

    def of(self, stage: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.manifest.stage == stage]


@dataclass(frozen=True)
class _Place:
    """An attempt to read. `store`: of the run that holds it; `run`: on whose behalf, another where a fork keeps it."""

    store: RunStore
    run: str
    stage: StageName
    iteration: int
    attempt: str
    on_line: bool


def chosen_runs(files: Files, given: Sequence[str]) -> list[str]:
    """The runs that a person names; all for none or `all`. Raises InputError for one that is not there."""
    there = names_of(files)
    if not given or "all" in given:
        return there
    for run in given:
        if check_run_id(run) not in there:
            raise InputError(f"there is no run {run} under {files.root}: `miles runs` lists those there are")
    return list(dict.fromkeys(given))


def read_catalog(
    files: Files, runs: Sequence[str], stages: Collection[StageName], every: Collection[StageName]
) -> Catalog:
    """The attempts at `stages` on the lines of `runs`; of `every`, also those beside them, which takes a listing of
    each stage's folder. A run or an attempt that a newer program wrote is told in a note."""
    notes: list[str] = []
    with ThreadPoolExecutor(_THREADS) as threads:
        places: list[_Place] = []
        for run in runs:
            try:
                places += _places(threads, RunStore(files, run), stages, every)
            except InputError as fault:
                notes.append(f"run {run} is left out: {fault}")
        found = list(threads.map(_entry, places))
    newer = 0
    for place, entry in zip(places, found, strict=True):
        if isinstance(entry, InputError):
            newer += 1
            if newer == 1:
                notes.append(f"left out: {entry}")
        elif entry is None and place.on_line:
            notes.append(
                f"run {place.run}: {place.stage} of iteration {place.iteration} cannot be read ({place.attempt}): "
                "`miles train` makes it afresh"
            )
    if newer > 1:
        notes.append(f"{newer} attempts in all were left out because a newer program wrote them")
    return Catalog([entry for entry in found if isinstance(entry, Entry)], notes)


def _places(
    threads: ThreadPoolExecutor, store: RunStore, stages: Collection[StageName], every: Collection[StageName]
) -> list[_Place]:
    line = (store.record() or {}).get("line", {})
    named = {
        (stage, _iteration(slot)): standing(entry, store.run)
        for slot, entry in line.items()
        for stage in [slot.rpartition("/")[2]]
    }
    # What a fork keeps of another run lies in no folder of its own.
    found = [
        _Place(store.of(holder), store.run, stage, number, attempt, True)
        for (stage, number), (holder, attempt) in named.items()
        if stage in stages and (stage not in every or holder != store.run)
    ]
    numbers = store.iterations() if set(every) - {"policy"} else []
    first: tuple[StageName, ...] = ("policy", "evaluation")
    slots = [(stage, -1) for stage in first if stage in every]
    slots += [(stage, number) for number in numbers for stage in (*ITERATION_STAGES, "evaluation") if stage in every]
    listed = threads.map(lambda slot: store.attempts(*slot), slots)
    for (stage, number), attempts in zip(slots, listed, strict=True):
        found += [
            _Place(store, store.run, stage, number, name, named.get((stage, number)) == (store.run, name))
            for name in attempts
        ]
    return sorted(found, key=lambda place: place.iteration)


def _iteration(slot: str) -> int:
    return -1 if "/" not in slot else int(slot.partition("/")[0])


def _entry(place: _Place) -> Entry | InputError | None:
    try:
        manifest = place.store.manifest(place.stage, place.iteration, place.attempt)
    except InputError as fault:
        return fault
    if manifest is None:
        return None
    # Of other stages nothing is pruned.
    stone = place.store.pruned(manifest) if place.stage in ("rollout", "update") else None
    return Entry(replace(manifest, run=place.run), place.on_line, stone)
