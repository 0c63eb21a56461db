"""Prunes what a run's retention rule gives up, at the end of each iteration of train.

Crash-safe: the tombstone first, then the files; files that an interrupted pass left go with the next one.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator

from miles_core.config import RunConfig, build
from miles_core.config.guard import checkpoints_kept
from miles_core.observe.terminal import bytes_text
from miles_core.pipeline.stage import Step
from miles_core.store.forks import forks_of
from miles_core.store.line import iterations, slot
from miles_core.store.retention import Rule, rules, to_prune
from miles_core.store.run_store import RunStore
from miles_core.store.tombstone import Tombstone, read_tombstone, write_tombstone

# Longer than any stage takes: an unfinished attempt whose files are older belongs to nobody.
ABANDONED_SECONDS = 24 * 3600.0
# What this process has gone over already; the first pass of a command goes over all.
_PASSED: dict[tuple[str, str, Rule], int] = {}


def rules_of(config: RunConfig) -> tuple[Rule, ...]:
    """The retention rules of a configuration."""
    return rules(full_checkpoints=checkpoints_kept(config), latents_iterations=config.run.keep_latents_iterations)


def retain(step: Step) -> None:
    """Prune older iterations after the step's own was finished, and say what went. For train alone."""
    step.fence()
    gone = [stone for rule in rules_of(step.config) for stone in _prune(step.store, rule, step.iteration)]
    if gone:
        what = ", ".join(dict.fromkeys(name for stone in gone for name in stone.what))
        print(f"  pruned {what}: {len(gone)} attempts, {bytes_text(sum(stone.bytes for stone in gone))}", flush=True)


def _prune(store: RunStore, rule: Rule, at: int) -> Iterator[Tombstone]:
    key = (store.files.root, store.run, rule)
    going = to_prune(store.iterations(), store.line_iterations(rule.stage), rule.keep, at)
    going = going[bisect_left(going, _PASSED.get(key, 0)) :]
    held = held_by_forks(store, rule) if going else set()
    for iteration in going:
        _PASSED[key] = iteration
        for name in store.attempts(rule.stage, iteration):
            if (iteration, name) in held:
                continue
            folder = f"{store.stage_folder(rule.stage, iteration)}/{name}"
            stone = read_tombstone(store.files, folder)
            if stone is None and _prunable(store, rule, iteration, name):
                stone = _bury(store, rule, folder)
                if stone:
                    yield stone
            if stone:
                _delete(store, folder, stone)


def held_by_forks(store: RunStore, rule: Rule) -> set[tuple[int, str]]:
    """The attempts, by iteration and name, that forks of this run stand on and would not prune by their own rule."""
    held: set[tuple[int, str]] = set()
    for fork, slots in forks_of(store).items():
        record = store.of(fork).record()
        places = iterations({"line": slots}, rule.stage)
        if record is not None:
            line = iterations(record, rule.stage)
            own = next(r for r in rules_of(build(record["config"])) if r.stage == rule.stage)
            going = set(to_prune(line, line, own.keep, max(line, default=0)))
            places = [i for i in places if i not in going]
        held |= {(i, slots[slot(rule.stage, i)]) for i in places}
    return held


def _prunable(store: RunStore, rule: Rule, iteration: int, name: str) -> bool:
    """Whether an attempt is finished, or given up: unfinished, beside a committed one, untouched for a day."""
    folder = f"{store.stage_folder(rule.stage, iteration)}/{name}"
    if store.files.exists(f"{folder}/manifest.json"):
        made = store.manifest(rule.stage, iteration, name)
        line = store.on_line(rule.stage, iteration)
        if made is None or (line and line.attempt == name):
            return made is not None
        # A rerun may be about to use what it has just made.
        return time.time() - made.times["committed_at"] > ABANDONED_SECONDS
    if not store.committed(rule.stage, iteration):
        return False
    written = [f"{folder}/attempt.json", *(f"{folder}/{path}" for path in _listed(store, rule.folders, folder))]
    touched = [store.files.modified(path) for path in written if store.files.exists(path)]
    return bool(touched) and time.time() - max(touched) > ABANDONED_SECONDS


def _bury(store: RunStore, rule: Rule, folder: str) -> Tombstone | None:
    parts = tuple(_listed(store, rule.folders, folder))
    if not parts:
        return None
    stone = Tombstone(
        what=tuple(name for name in rule.folders if any(path.startswith(f"{name}/") for path in parts)),
        when=time.time(),
        why=f"older than the newest {rule.keep} iterations",
        option=rule.option,
        parts=parts,
        bytes=sum(store.files.size(f"{folder}/{path}") for path in parts),
    )
    return stone if write_tombstone(store.files, folder, stone) else None


def _delete(store: RunStore, folder: str, stone: Tombstone) -> None:
    for path in set(_listed(store, stone.what, folder)) & set(stone.parts):
        store.files.delete(f"{folder}/{path}")


def _listed(store: RunStore, folders: tuple[str, ...], folder: str) -> list[str]:
    return [f"{name}/{file}" for name in folders for file in store.files.list(f"{folder}/{name}")]
