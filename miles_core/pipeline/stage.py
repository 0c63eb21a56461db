"""How any stage runs: fingerprint, look for a committed attempt, else compute and commit, and say why."""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import miles_core
from miles_core.config import RunConfig
from miles_core.errors import StageError
from miles_core.pipeline.inputs import Inputs
from miles_core.runtime.faults import fault_point
from miles_core.runtime.workers import Workers
from miles_core.store.manifest import Manifest, fingerprint
from miles_core.store.parts import Part
from miles_core.store.run_store import Attempt, RunStore, consumed
from miles_core.store.stages import StageName
from miles_core.store.tombstone import pruned_error

Upstreams = dict[str, Manifest]
RESUMABLE: tuple[StageName, ...] = ("rollout", "rewards", "evaluation")
_LIBRARIES = ("torch", "diffusers", "transformers", "peft", "ray", "pyarrow", "paddleocr", "onnxruntime", "pillow")


def _no_progress(stage: str, done: int, total: int) -> None:
    return None


class Step:
    """All that the stages of one iteration share. `moves_line` is true for train alone; `fence` raises where this
    command may not commit any more; `force` makes stages again that are committed.

    A plain class: Prefect walks through dataclasses among a task's parameters.
    """

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        store: RunStore,
        workers: Workers,
        iteration: int,
        *,
        moves_line: bool = True,
        flow_run_id: str | None = None,
        progress: Callable[[str, int, int], None] = _no_progress,
        fence: Callable[[], None] = lambda: None,
        force: bool = False,
    ) -> None:
        self.config, self.inputs, self.store, self.workers = config, inputs, store, workers
        self.iteration, self.moves_line, self.flow_run_id, self.progress = iteration, moves_line, flow_run_id, progress
        self.fence, self.force = fence, force

    def at(self, iteration: int) -> "Step":
        """The same step at another iteration."""
        other = copy(self)
        other.iteration = iteration
        return other


@dataclass(frozen=True)
class Product:
    """What a stage made: its files, and small figures for people."""

    parts: list[Part]
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a stage: reused or computed, why, and how long it took (seconds)."""

    manifest: Manifest
    reused: bool
    reason: str
    seconds: float


Compute = Callable[[Step, Attempt, Upstreams], Product]


def stage_fingerprint(step: Step, stage: StageName, upstream_fingerprints: dict[str, str]) -> str:
    """The fingerprint of a stage of this step; policy/init stands at iteration -1. What a fork keeps has the one it was
    made under."""
    kept = kept_of_parent(step, stage)
    return kept.fingerprint if kept else _fingerprint(step, stage, upstream_fingerprints)


def _fingerprint(step: Step, stage: StageName, upstream_fingerprints: dict[str, str]) -> str:
    return fingerprint(
        stage,
        -1 if stage == "policy" else step.iteration,
        config=step.config.affecting(stage),
        inputs=step.inputs.affecting(stage),
        hooks={},
        upstream=upstream_fingerprints,
    )


def find_stage(step: Step, stage: StageName, upstream: Upstreams) -> Manifest | None:
    """The committed attempt that answers this very question, the one on the line before others.

    Raises StageError where a fork keeps an attempt of another run there and it cannot be used.
    """
    kept = kept_of_parent(step, stage)
    if kept or step.force:
        return kept
    wanted = stage_fingerprint(step, stage, {n: m.fingerprint for n, m in upstream.items()})
    same = step.store.matching(stage, step.iteration, wanted, upstream)
    return next((manifest for manifest in same if _answers(step, manifest)), None)


def kept_of_parent(step: Step, stage: StageName) -> Manifest | None:
    """The attempt of another run that a fork's line keeps in this place, whatever the fork's own options say; None
    where it keeps none, and for a rerun, which makes what its options say.

    Where that attempt is damaged another of its content serves. Raises StageError where there is none.
    """
    kept = step.store.kept(stage, step.iteration) if step.moves_line else None
    if kept is None:
        return None
    named = step.store.of(kept.run).manifest(stage, step.iteration, kept.attempt)
    for manifest in (named, *step.store.beside(stage, step.iteration, kept.run)):
        if manifest and manifest.content_digest == kept.content_digest and _answers(step, manifest):
            return manifest
    where = f"{stage} of iteration {step.iteration}" if stage != "policy" else "policy/init"
    told = f"run {step.store.run} keeps {where} of run {kept.run} (attempt {kept.attempt})"
    if named is None:
        raise StageError(f"{told}, and it is gone: put it back, or make it again there with `miles train`")
    if damage := step.store.damage(named):
        raise StageError(f"{told}, and it is damaged ({damage}): `miles train` of run {kept.run} makes it again")
    stone = step.store.pruned(named)
    raise pruned_error(named.folder, stone) if stone else StageError(f"{told}, and it holds something else now")


def _answers(step: Step, manifest: Manifest) -> bool:
    """Whether a committed attempt is whole and holds what it is asked for.

    A rerun asks for the files themselves, so that one that was pruned is made again. Train asks for a rollout's latents
    only where the update that was made from them has gone.
    """
    if step.store.damage(manifest):
        return False
    if step.store.pruned(manifest) is None:
        return True
    return step.moves_line and (manifest.stage != "rollout" or _trained_on(step, manifest))


def _trained_on(step: Step, rollout: Manifest) -> bool:
    update = step.store.on_line("update", rollout.iteration)
    if update is None or step.store.damage(update):
        return False
    return update.upstream["rollout"].content_digest == rollout.content_digest


def run_stage(step: Step, stage: StageName, upstream: Upstreams, compute: Compute) -> Outcome:
    """Reuse the committed attempt or make one. A computed stage is committed before this returns."""
    started = time.time()
    found = find_stage(step, stage, upstream)
    if found:
        changed = versions_told(found.versions, library_versions())
        if changed and step.config.run.refuse_other_versions:
            raise StageError(
                f"{found.folder} was made by other versions ({', '.join(changed)}): --refuse-other-versions"
            )
        if step.moves_line:
            step.store.move_line(found)
        told = f", other versions: {', '.join(changed)}" if changed else ""
        return Outcome(found, True, "same fingerprint, same inputs" + told, time.time() - started)
    reason = why(step, stage, upstream)
    wanted = stage_fingerprint(step, stage, {n: m.fingerprint for n, m in upstream.items()})
    known = begun_with(step, stage, upstream)
    attempt = step.store.open_attempt(stage, step.iteration, wanted, known, resumable=stage in RESUMABLE)
    fault_point(f"{stage}:start")
    with checked_on_failure(step, upstream):
        product = compute(step, attempt, upstream)
    manifest = commit_stage(step, attempt, upstream, product, started)
    return Outcome(manifest, False, reason, time.time() - started)


def begun_with(step: Step, stage: StageName, upstream: Upstreams) -> Upstreams:
    """What a stage's attempt says that it was begun with: what was committed when its first part was made. In waves a rollout
    begins before its prompts are."""
    if stage == "rollout" and step.config.in_waves:
        return {"policy": upstream["policy"]}
    return upstream


@contextlib.contextmanager
def checked_on_failure(step: Step, upstream: Upstreams) -> Iterator[None]:
    """Where a stage fails, look whether what it consumed is damaged: then the next try makes that again."""
    try:
        yield
    except Exception:
        for manifest in upstream.values():
            step.store.verify(manifest)
        raise


def commit_stage(step: Step, attempt: Attempt, upstream: Upstreams, product: Product, started: float) -> Manifest:
    """Commit what a stage made and, for train, put it on the line."""
    fault_point(f"{attempt.stage}:before_commit")
    step.fence()
    manifest = step.store.commit(
        attempt,
        parts=product.parts,
        upstream=upstream,
        affecting_config=step.config.affecting(attempt.stage),
        inputs=step.inputs.affecting(attempt.stage),
        versions=library_versions(),
        started_at=started,
        summary=product.summary,
        flow_run_id=step.flow_run_id,
    )
    fault_point(f"{attempt.stage}:after_commit")
    if step.moves_line:
        step.store.move_line(manifest)
    fault_point(f"{attempt.stage}:end")
    return manifest


def why(step: Step, stage: StageName, upstream: Upstreams) -> str:
    """Why a stage has to run, in words: what differs from the attempt nearest to the one that is needed."""
    record = step.store.record() or {}
    named = record.get("line", {}).get("policy" if stage == "policy" else f"{step.iteration:06d}/{stage}")
    line = step.store.on_line(stage, step.iteration)
    if named and line is None:
        return f"its attempt {named} is missing or unreadable"
    if line and (damage := step.store.damage(line)):
        return f"its attempt is damaged: {damage}"
    previous = line or next(iter(reversed(step.store.committed(stage, step.iteration))), None)
    if previous is None:
        return "not made yet"
    now, then = step.config.affecting(stage), previous.affecting_config
    reasons = [f"{n} {_show(then.get(n))} → {_show(now[n])}" for n in now if then.get(n) != now[n]]
    files = step.inputs.affecting(stage)
    reasons += [f"{n} has another content" for n in files if previous.inputs.get(n) != files[n]]
    digests = consumed(previous)
    reasons += [
        f"{n} changed ({digests.get(n, 'none')[:8]} → {m.content_digest[:8]})"
        for n, m in upstream.items()
        if digests.get(n) != m.content_digest
    ]
    if not reasons and (stone := step.store.pruned(previous)):
        return f"its {', '.join(stone.what)} {'was' if len(stone.what) == 1 else 'were'} pruned"
    if not reasons and step.force:
        return "asked for again"
    return ", ".join(reasons) or "an upstream stage was asked for differently"


def versions_told(then: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two records of versions, in words."""
    names = sorted(then.keys() & now.keys())
    return [f"{name} {then[name]} → {now[name]}" for name in names if then[name] != now[name]]


def library_versions() -> dict[str, str]:
    """Versions of the libraries a result may depend on, and of this program with a digest of its source; recorded, not
    part of the fingerprint."""
    found = {"miles": program_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@lru_cache(maxsize=1)
def program_version() -> str:
    """The installed version and a digest of the source of miles_core, so that a changed scorer or trainer is seen."""
    root = Path(miles_core.__path__[0])
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    try:
        number = version("miles-flows")
    except PackageNotFoundError:
        number = "unpacked"
    return f"{number}+{digest.hexdigest()[:8]}"


def _show(value: Any) -> str:
    return "unset" if value is None else str(value)
