"""A run that goes on from another one's iteration with other options: its line begins with that run's attempts."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from miles_core.config import FIELDS, RunConfig, affects, flag
from miles_core.errors import InputError
from miles_core.observe.terminal import figures_of
from miles_core.pipeline.inputs import Inputs
from miles_core.pipeline.lineage import attempt_of, made_from
from miles_core.pipeline.run import ROLES, absolute, differences, inputs_of_run, meaning_of, told
from miles_core.pipeline.stage import library_versions
from miles_core.store.forks import drop_note, note_fork
from miles_core.store.line import entry, slot, standing
from miles_core.store.manifest import Manifest
from miles_core.store.run_store import RunStore, check_run_id
from miles_core.store.stages import ITERATION_STAGES, StageName
from miles_core.store.tombstone import pruned_error


@dataclass(frozen=True)
class Fork:
    """A checked fork, before anything of it is written. `kept`: what its line begins with, by slot. `stage`: the first
    one of `iteration` that is not kept. `attempt`: the one that was chosen, if any. `differences`: of the two runs'
    meanings, then and now by name."""

    parent: RunStore
    store: RunStore
    config: RunConfig
    inputs: Inputs
    iteration: int
    stage: StageName
    attempt: Manifest | None
    kept: dict[str, Manifest]
    differences: dict[str, list[Any]]


def plan_fork(
    parent: RunStore,
    config: RunConfig,
    iteration: str,
    name: str,
    *,
    stage: str | None = None,
    attempt: str | None = None,
    overrides: dict[str, Any] | None = None,
) -> Fork:
    """A fork of `parent` (whose configuration is `config`) at an iteration, checked. Raises InputError.

    All before the iteration is kept, and of the iteration what comes before `stage`, by default the first stage that
    the changed options affect; or, with `attempt`, that attempt and what it was made from.
    """
    changes = dict(overrides or {})
    store = _free(parent, name)
    number = _number(parent, iteration)
    _refuse(changes)
    chosen = attempt_of(parent, number, attempt) if attempt else None
    if chosen and stage:
        raise InputError("--from-attempt says by itself where the fork begins: leave --stage out")
    made = made_from(parent, chosen) if chosen else {}
    changes = _options_of(made, config) | changes
    forked = absolute(_config_of(config, parent, name, number, changes))
    inputs = inputs_of_run(parent, forked, changes)
    meaning = (parent.record() or {})["meaning"]
    changed = differences(meaning, meaning_of(forked, inputs))
    if "checkpoint" in changed:
        raise InputError(
            "--hf-checkpoint names another model than the one whose policy a fork keeps: start another run"
        )
    first = _after(chosen.stage) if chosen else _first(stage, changed, in_waves=forked.in_waves)
    if chosen:
        _refuse_other_inputs(chosen, inputs)
    else:
        made = _of_line(parent, number, first)
    kept = _before(parent, number)
    _check_whole(parent, made, kept, number)
    slots = {slot(m.stage, m.iteration): m for m in (*kept, *made.values())}
    return Fork(parent, store, forked, inputs, number, first, chosen, slots, changed)


def told_of(fork: Fork) -> list[str]:
    """What a fork keeps, goes on from, and differs in, in words."""
    own = [name for name in ITERATION_STAGES if slot(name, fork.iteration) in fork.kept]
    of = f", and of iteration {fork.iteration} {', '.join(own)}" if own else ""
    kept = {0: "no iteration", 1: "iteration 0"}.get(fork.iteration, f"iterations 0 to {fork.iteration - 1}")
    lines = [f"run {fork.store.run} is a fork of {fork.parent.run}: it keeps {kept}{of}"]
    if fork.attempt:
        chosen = fork.attempt
        lines.append(f"{chosen.stage} {chosen.attempt}: {figures_of(chosen.stage, chosen.summary)}")
        others = [m for m in fork.parent.committed(chosen.stage, fork.iteration) if m.attempt != chosen.attempt]
        lines += [f"not {m.attempt}: {figures_of(m.stage, m.summary)}" for m in others]
    return lines + told(fork.differences, fork.config.flat())


def begin_fork(fork: Fork) -> None:
    """Write the fork's record, one file; a failure leaves nothing. Raises InputError where its name was taken since."""
    files, name = fork.store.files, fork.store.run
    parent = fork.parent.record() or {}
    holders: dict[str, dict[str, str]] = {}
    for place, manifest in fork.kept.items():
        holders.setdefault(manifest.held_by, {})[place] = manifest.attempt
    with contextlib.ExitStack() as stack:
        for holder, slots in holders.items():
            note_fork(files, holder, name, slots)
            stack.callback(drop_note, files, holder, name)
        record = {
            "recipe": parent["recipe"],
            "config": fork.config.model_dump(mode="json"),
            "meaning": meaning_of(fork.config, fork.inputs),
            "code_path": parent.get("code_path"),
            "versions": library_versions(),
            "line": {place: entry(manifest, name) for place, manifest in fork.kept.items()},
            **_passed(parent, fork.iteration),
            "parent": {
                "run": fork.parent.run,
                "iteration": fork.iteration,
                "stage": fork.stage,
                "attempt": fork.attempt.attempt if fork.attempt else None,
                "differences": fork.differences,
                "kept": {place: manifest.content_digest for place, manifest in fork.kept.items()},
            },
        }
        made = fork.store.create_record(record)
        # Where another command made a fork of this name, the notes are that one's.
        stack.pop_all()
    if not made:
        raise _taken(fork.store)


def _passed(parent: dict[str, Any], iteration: int) -> dict[str, int]:
    """Where the guard begins, if the parent was resumed past what it found there and the fork keeps that."""
    first = parent.get("guard_from", 0)
    return {"guard_from": first} if 0 < first <= iteration else {}


def _taken(store: RunStore) -> InputError:
    return InputError(f"run {store.run} exists already under {store.files.root}: give another --run-id")


def _free(parent: RunStore, name: str) -> RunStore:
    store = parent.of(check_run_id(name))
    if store.record() is not None or store.begun():
        raise _taken(store)
    return store


def _number(parent: RunStore, given: str) -> int:
    end = 1 + max(parent.line_iterations("update"), default=-1)
    if not given.isdecimal() or len(given) > 9 or int(given) > end:
        raise InputError(
            f"run {parent.run} cannot be forked at iteration {given!r}: give a number from 0 to "
            f"{end}, which keeps all that is finished"
        )
    return int(given)


def _refuse(changes: dict[str, Any]) -> None:
    for name in changes:
        assert name in FIELDS
        if name in ("run_id", "new", "artifact_root"):
            raise InputError(f"{flag(name)} has no meaning among a fork's options: leave it out")
        # The model itself is compared by its content.
        if "policy" in affects(name) and name != "hf_checkpoint":
            raise InputError(
                f"{flag(name)} belongs to the policy that a fork keeps: start another run with `miles train`"
            )


def _options_of(made: dict[StageName, Manifest], config: RunConfig) -> dict[str, Any]:
    """The options that the chosen attempt was made with and the run was not: the fork goes on with them."""
    found: dict[str, Any] = {}
    for stage, manifest in made.items():
        now = config.affecting(stage)
        found |= {n: v for n, v in manifest.affecting_config.items() if n in now and now[n] != v}
    return found


def _config_of(config: RunConfig, parent: RunStore, name: str, number: int, changes: dict[str, Any]) -> RunConfig:
    own = {"run_id": name, "new": False, "artifact_root": parent.files.root}
    # The parent's wandb run goes on with the parent.
    total = {"num_rollout": max(config.run.num_rollout, number + 1), "wandb_run_id": None}
    return config.replace(**(total | changes | own))


def _first(stage: str | None, changed: dict[str, list[Any]], *, in_waves: bool) -> StageName:
    """The first stage to be made again: the one asked for, or the first that a change affects, or all of them. In waves the
    prompts are chosen by what is generated and scored."""
    affected = {name for field in changed for name in (affects(field) if field in FIELDS else _readers(field))}
    earliest = next((name for name in ITERATION_STAGES if name in affected), None)
    if earliest in ("rollout", "rewards") and in_waves:
        earliest = "prompts"
    if stage is None:
        return earliest or "prompts"
    asked = next((name for name in ITERATION_STAGES if name == stage), None)
    if asked is None:
        raise InputError(f"there is no stage {stage!r}: choose one of {', '.join(ITERATION_STAGES)}")
    if earliest and ITERATION_STAGES.index(earliest) < ITERATION_STAGES.index(asked):
        raise InputError(f"the changed options affect {earliest}, which comes before {stage}: give --stage {earliest}")
    return asked


def _readers(role: str) -> tuple[StageName, ...]:
    """The stages that read the input of this role."""
    return ("rewards",) if role in ("ocr_models", "pickscore") else ("rollout",)


def _after(stage: StageName) -> StageName:
    return ITERATION_STAGES[min(ITERATION_STAGES.index(stage) + 1, len(ITERATION_STAGES) - 1)]


def _refuse_other_inputs(chosen: Manifest, inputs: Inputs) -> None:
    for role, digest in inputs.affecting(chosen.stage).items():
        if chosen.inputs.get(role, digest) != digest:
            raise InputError(
                f"attempt {chosen.attempt} was made from another {role} than these options name: give the same "
                f"{' or '.join(map(flag, ROLES[role]))} again"
            )


def _before(parent: RunStore, number: int) -> list[Manifest]:
    """policy/init and all stages of all iterations before. Raises InputError where one is missing."""
    places: list[tuple[StageName, int]] = [("policy", -1)]
    places += [(stage, i) for i in range(number) for stage in ITERATION_STAGES]
    return _standing(parent, places)


def _of_line(parent: RunStore, number: int, first: StageName) -> dict[StageName, Manifest]:
    """What the line has of the iteration before `first`; nothing where it has not begun the iteration."""
    stages = ITERATION_STAGES[: ITERATION_STAGES.index(first)]
    if number not in parent.iterations():
        return {}
    return {m.stage: m for m in _standing(parent, [(stage, number) for stage in stages])}


def _standing(parent: RunStore, places: list[tuple[StageName, int]]) -> list[Manifest]:
    line = (parent.record() or {})["line"]

    def read(place: tuple[StageName, int]) -> Manifest:
        stage, iteration = place
        holder, attempt = standing(line.get(slot(stage, iteration), ""), parent.run)
        manifest = parent.of(holder).manifest(stage, iteration, attempt) if attempt else None
        where = f"{stage} of iteration {iteration}" if iteration >= 0 else "policy/init"
        if manifest is None:
            raise InputError(
                f"run {parent.run}: {where} is not on its line, and a fork would stand on it: `miles train` makes it, or "
                "fork at an earlier iteration"
            )
        if damage := parent.damage(manifest):
            raise InputError(
                f"run {parent.run}: {where} is damaged ({damage}): `miles train` makes it again, then fork"
            )
        return manifest

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(read, places))


def _check_whole(parent: RunStore, made: dict[StageName, Manifest], before: list[Manifest], number: int) -> None:
    """Raises InputError where the fork could not go on from what it keeps."""
    line = {(m.stage, m.iteration): m.content_digest for m in before}
    for manifest in made.values():
        for upstream in manifest.upstream.values():
            there = line.get((upstream.stage, upstream.iteration))
            if there not in (None, upstream.content_digest):
                raise InputError(
                    f"run {parent.run}: {manifest.stage} {manifest.attempt} of iteration {number} was made from an "
                    f"{upstream.stage} of iteration {upstream.iteration} that is not on the line: choose another attempt"
                )
    rollout = made.get("rollout")
    if rollout and "update" not in made and not parent.holding(rollout, "latents"):
        stone = parent.pruned(rollout)
        assert stone is not None
        raise InputError(f"{pruned_error(rollout.folder, stone)}, then fork")
