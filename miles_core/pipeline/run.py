"""A run's identity: its name, what it means, and whether this command may carry it on."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from miles_core.config import FIELDS, RunConfig, affects, build, by_content, flag, is_code
from miles_core.config.folders import artifact_root, local_path
from miles_core.data.prompts import PROMPT_SETS, named_sets
from miles_core.errors import InputError
from miles_core.families.resolve import PACKAGED
from miles_core.pipeline.inputs import Inputs, resolve_inputs
from miles_core.pipeline.stage import library_versions, versions_told
from miles_core.store.digest import sha256_hex
from miles_core.store.files import Files, prove_conditional_put, reach
from miles_core.store.lock import RunLock
from miles_core.store.run_store import RunStore, check_run_id, runs

LATEST = "latest"


@dataclass(frozen=True)
class Plan:
    """A checked run, before anything of it is written. `begun`: the run exists and is carried on."""

    recipe: str
    config: RunConfig
    inputs: Inputs
    store: RunStore
    begun: bool
    meaning: dict[str, Any]


def meaning_of(config: RunConfig, inputs: Inputs) -> dict[str, Any]:
    """All that a run's training depends on: affecting fields, and input files by digest.

    What affects evaluation alone is left out: nothing is made from an evaluation, and each carries its own options.
    """
    flat = config.flat()
    trained = (name for name in FIELDS if set(affects(name)) - {"evaluation"})
    fields = {name: None if name in config.idle else flat[name] for name in trained if not by_content(name)}
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
    return {"fields": plain, "inputs": inputs.all()}


def plan_run(config: RunConfig, recipe: str, begun_by: str | None = None, *, inputs: Inputs | None = None) -> Plan:
    """Check inputs, name and meaning. `begun_by` is the flow run that asks: where --new began a run for it before, that
    run is meant. `inputs`: those of `config`, where they are at hand. Raises InputError where the same name means
    something else already."""
    name = check_run_id(config.run.run_id or recipe)
    files = Files(artifact_root(config))
    prove_conditional_put(files)
    inputs = inputs or resolve_inputs(config)
    if config.run.new:
        name = _new_name(files, name, begun_by)
    store = RunStore(files, name)
    record = _record(store)
    meaning = meaning_of(config, inputs)
    if record is not None:
        _refuse_other_meaning(name, record["meaning"], meaning)
        if config.run.refuse_other_versions:
            _refuse_other_versions(name, record.get("versions", {}))
    return Plan(recipe, config, inputs, store, record is not None, meaning)


def _record(store: RunStore) -> dict[str, Any] | None:
    """run.json, or None where there is no such run. Raises InputError where it has gone from a run: what the stages
    there mean can no longer be told."""
    record = store.record()
    if record is None and store.begun():
        raise InputError(
            f"{store.files.url(store.record_path)} is missing, and stages of a run lie beside it: put it back from a copy, "
            "or give another --run-id"
        )
    return record


def _refuse_other_meaning(name: str, then: dict[str, Any], now: dict[str, Any]) -> None:
    difference = told(differences(then, now), now["fields"])
    if difference:
        raise InputError(
            f"run {name} was made with another meaning ({'; '.join(difference)}): give --new or another --run-id to "
            "start a run of its own, or the old values to carry this one on"
        )


def _refuse_other_versions(name: str, then: dict[str, str]) -> None:
    if changed := versions_told(then, library_versions()):
        raise InputError(
            f"run {name} was begun with other versions ({', '.join(changed)}): install those, start another run, or leave "
            "--refuse-other-versions out"
        )


def absolute(config: RunConfig) -> RunConfig:
    """Paths as they are found from any folder; names that are no paths stay as they are."""
    changes = {}
    for name in FIELDS:
        value = config.flat()[name]
        if not by_content(name) or is_code(name) or not value:
            continue
        pairs = named_sets(value) if name == "eval_prompt_data" else [("", value)]
        changes[name] = "\n".join(f"{words} {_found(path, name)}".strip() for words, path in pairs)
    for name in ("wandb_dir", "tensorboard_dir"):
        if (folder := config.flat()[name]) and "://" not in folder:
            changes[name] = str(local_path(folder, flag(name)))
    return config.replace(**changes)


def _found(path: str, name: str) -> str:
    return path if path in PROMPT_SETS or path in PACKAGED else str(local_path(path, flag(name)))


@contextlib.contextmanager
def line_lock(store: RunStore, say: Callable[[str], None]) -> Iterator[tuple[RunStore, RunLock]]:
    """Hold the run's line: one command at a time moves it. Gives the store as its holder sees it.

    Raises InputError where another command that lives holds it.
    """
    lock = RunLock(store.files, store.run)
    epoch = lock.take(say, above=(store.record() or {}).get("epoch", 0))
    held = replace(store, epoch=epoch)
    try:
        if store.record() is not None:
            held.update_record(lambda record: record | {"epoch": epoch})
        yield held, lock
    finally:
        lock.release()


def actors_of(store: RunStore) -> str:
    """What names the actors of a run: the same for every command that trains it, wherever its root is spelled."""
    return f"miles-{sha256_hex(store.files.url(store.run).encode())[:12]}"


def begin_run(plan: Plan, recipe: str, code_path: str, begun_by: str | None = None) -> None:
    """Write run.json of a new run, or the configuration in force of one that is carried on. `begun_by`: its flow run."""
    config = absolute(plan.config).model_dump(mode="json")
    if plan.store.create_record(
        {
            "recipe": recipe,
            "config": config,
            "meaning": plan.meaning,
            "code_path": code_path,
            "begun_by": begun_by,
            "versions": library_versions(),
            "epoch": plan.store.epoch,
        }
    ):
        return
    record = plan.store.record() or {}
    _refuse_other_meaning(plan.store.run, record["meaning"], plan.meaning)
    plan.store.update_record(lambda record: record | {"config": config})


def open_run(name: str, root: str | None = None) -> tuple[RunStore, RunConfig]:
    """An existing run and its configuration; `latest` is the one whose line moved last, unless a run is called so.

    Raises InputError where there is none of that name.
    """
    files = Files(artifact_root(given=root))
    reach(files)
    store = RunStore(files, name)
    if name == LATEST and _record(store) is None:
        store = RunStore(files, _newest(files))
    record = _record(store)
    if record is None:
        raise InputError(f"there is no run {name} under {files.root}: `miles runs` lists those there are")
    config = build(record["config"])
    if config.run.code_path is None and config.own_code:
        # The user's functions are those that it was begun with, wherever this command is given.
        config = config.replace(code_path=record.get("code_path"))
    return store, config


def any_run(root: str | None = None) -> bool:
    """Whether a run lies under the root."""
    files = Files(artifact_root(given=root))
    reach(files)
    return bool(runs(files))


def _newest(files: Files) -> str:
    moved = {}
    for name in runs(files):
        # One that cannot be read is told by `miles runs`.
        with contextlib.suppress(InputError):
            record = RunStore(files, name).record() or {}
            moved[name] = tuple(float(record.get(when, 0.0)) for when in ("moved_at", "created_at"))
    if not moved:
        raise InputError(f"there is no run under {files.root}: `miles train tiny` makes one")
    return max(moved, key=lambda name: moved[name])


ROLES = {
    "checkpoint": ("hf_checkpoint",),
    "prompt_data": ("prompt_data",),
    "ocr_models": ("ocr_det_model_dir", "ocr_rec_model_dir"),
    "pickscore": ("pickscore_model_path", "pickscore_processor_path"),
}


def inputs_of_run(store: RunStore, config: RunConfig, overrides: dict[str, Any], *, evaluation: bool = False) -> Inputs:
    """The inputs of an existing run, which must hold what they held when it began; those of evaluation where asked.

    An input that `overrides` names may differ. Raises InputError for any other.
    """
    inputs = resolve_inputs(config, evaluation=evaluation)
    recorded = (store.record() or {})["meaning"]["inputs"]
    for role, digest in inputs.all().items():
        options = ROLES.get(role, (role,))
        if role in recorded and recorded[role] != digest and not set(options) & set(overrides):
            raise InputError(
                f"{flag(options[0])} has another content than when run {store.run} began: put the old one back, or "
                "start another run"
            )
    return inputs


def existing_iteration(store: RunStore, given: str) -> int:
    """The number of an iteration of a run, as a person gave it. Raises InputError."""
    if not given.isdecimal() or len(given) > 9 or int(given) not in store.iterations():
        raise InputError(f"run {store.run} has no iteration {given!r}: `miles show {store.run}` lists those there are")
    return int(given)


def _new_name(files: Files, name: str, begun_by: str | None) -> str:
    """The first of name, name-2, name-3 … that is free, or that this flow run began."""
    for number in itertools.count(1):
        store = RunStore(files, name if number == 1 else f"{name}-{number}")
        record = store.record()
        mine = record is not None and begun_by is not None and record.get("begun_by") == begun_by
        if mine or (record is None and not store.begun()):
            return store.run
    raise AssertionError


def differences(then: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """[then, now] of each option, and of the digest of each input file by role, that two meanings differ in."""
    fields = {n: [then["fields"].get(n), v] for n, v in now["fields"].items() if then["fields"].get(n) != v}
    roles = sorted(set(then["inputs"]) | set(now["inputs"]))
    digests = {role: [then["inputs"].get(role), now["inputs"].get(role)] for role in roles}
    return fields | {role: both for role, both in digests.items() if both[0] != both[1]}


def told(found: dict[str, list[Any]], fields: dict[str, Any]) -> list[str]:
    """Differences in words; `fields` are the options among them."""
    return [
        f"{flag(name)} {_show(then)} → {_show(now)}" if name in fields else f"{name} has another content"
        for name, (then, now) in found.items()
    ]


def _show(value: Any) -> str:
    return "unset" if value is None else str(value)
