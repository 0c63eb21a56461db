"""A run in the store: its attempts by stage and iteration, its line, its record.

<root>/<run>/run.json
<root>/<run>/policy/{init,evaluation}/<fingerprint, 12 hex>/...
<root>/<run>/iteration=000012/stage=rollout/<fingerprint, 12 hex>[.2]/{attempt.json, data/*.parquet, manifest.json}
"""

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from miles_core.errors import InputError, StageError
from miles_core.store import line
from miles_core.store.digest import canonical_json
from miles_core.store.files import DamagedError, Files
from miles_core.store.lock import LockLost
from miles_core.store.manifest import Manifest, Upstream, read_manifest, stage_digest
from miles_core.store.parts import Part, read_bytes
from miles_core.store.stages import STAGES, StageName
from miles_core.store.tombstone import TOMBSTONE, Tombstone, read_tombstone

RUN_SCHEMA_VERSION = 1
_ATTEMPT = re.compile(r"[0-9a-f]{12}(\.\d+)?")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


def check_run_id(run: str) -> str:
    """The run's name, if it is one. Raises InputError for a name that could lead outside the artifact root."""
    if not _RUN_ID.fullmatch(run):
        raise InputError(
            f"run id {run!r} is no name: use letters, digits, dot, dash and underscore, starting with a letter or digit"
        )
    return run


@dataclass(frozen=True)
class Attempt:
    """An open folder that parts are written into until its manifest commits it."""

    stage: StageName
    iteration: int
    name: str
    folder: str
    fingerprint: str

    def path(self, name: str) -> str:
        return f"{self.folder}/{name}"


@dataclass(frozen=True)
class RunStore:
    """All artifacts of one run. `epoch` is the lock's where this process holds it: only then the line moves."""

    files: Files
    run: str
    epoch: int | None = None

    def __post_init__(self) -> None:
        check_run_id(self.run)

    # The run's record

    @property
    def record_path(self) -> str:
        return f"{self.run}/run.json"

    def record(self) -> dict[str, Any] | None:
        """run.json, or None where the run does not exist yet. Raises InputError for what is no run record."""
        try:
            return self._parse_record(self.files.read(self.record_path))
        except FileNotFoundError:
            return None

    def _parse_record(self, data: bytes) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads(data)
            version = int(record["schema_version"])
            if not all(isinstance(record[key], dict) for key in ("config", "meaning", "line")):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{self.files.url(self.record_path)} is no run record: restore it from a copy, or use another --run-id"
            ) from None
        if version > RUN_SCHEMA_VERSION:
            raise InputError(
                f"{self.files.url(self.record_path)} has schema version {version}, this program knows up to "
                f"{RUN_SCHEMA_VERSION}: use the newer program that wrote it"
            )
        return record

    def create_record(self, record: dict[str, Any]) -> bool:
        """Write run.json for a new run; False where the run exists."""
        body = {"schema_version": RUN_SCHEMA_VERSION, "run": self.run, "line": {}, "created_at": time.time()} | record
        return self.files.create(self.record_path, json.dumps(body, indent=1).encode())

    def update_record(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Change run.json as one: of several writers none loses another's change.

        Raises LockLost where a command of a later epoch has the run, StageError where the record has gone.
        """

        def edit(data: bytes | None) -> bytes | None:
            if data is None:
                where = self.files.url(self.record_path)
                raise StageError(f"{where} has gone: restore it and run the same command again")
            record = self._parse_record(data)
            if self.epoch is not None and record.get("epoch", 0) > self.epoch:
                raise LockLost(
                    f"run {self.run} was taken over by another command; nothing more of this one is committed"
                )
            changed = change(record)
            return None if changed == record else json.dumps(changed, indent=1).encode()

        self.files.edit(self.record_path, edit)

    # The line

    def on_line(self, stage: StageName, iteration: int) -> Manifest | None:
        """The attempt that the run's line names, if it is committed and readable; a fork's may be its parent's."""
        named = ((self.record() or {}).get("line") or {}).get(line.slot(stage, iteration))
        if not named:
            return None
        run, attempt = line.standing(named, self.run)
        return self.of(run).manifest(stage, iteration, attempt)

    def of(self, run: str) -> "RunStore":
        """Another run under the same root, to read."""
        return self if run == self.run else RunStore(self.files, run)

    def kept(self, stage: StageName, iteration: int) -> line.Kept | None:
        """What this run, if it is a fork, keeps of another run in this place of its line."""
        record = self.record()
        return line.kept(record, stage, iteration) if record else None

    def move_line(self, manifest: Manifest) -> None:
        """Name this attempt on the run's line; run.json's `moved_at` says when that last changed it."""
        moved = {line.slot(manifest.stage, manifest.iteration): line.entry(manifest, self.run)}

        def change(record: dict[str, Any]) -> dict[str, Any]:
            slots = record["line"] | moved
            return record if slots == record["line"] else record | {"line": slots, "moved_at": time.time()}

        self.update_record(change)

    def line_iterations(self, stage: StageName) -> list[int]:
        """Iterations for which the line names an attempt at `stage`, ascending."""
        return line.iterations(self.record() or {}, stage)

    # Attempts

    def stage_folder(self, stage: StageName, iteration: int) -> str:
        if stage == "policy":
            return f"{self.run}/policy/init"
        if stage == "evaluation" and iteration < 0:
            return f"{self.run}/policy/evaluation"
        return f"{self.run}/iteration={iteration:06d}/stage={stage}"

    def attempts(self, stage: StageName, iteration: int) -> list[str]:
        """Names of all attempts, committed or not, oldest number first."""
        listed = self.files.list(self.stage_folder(stage, iteration))
        names = [name for name in listed if _ATTEMPT.fullmatch(name)]
        return sorted(names, key=lambda n: (n.split(".")[0], int(n.split(".")[1]) if "." in n else 1))

    def manifest(self, stage: StageName, iteration: int, attempt: str) -> Manifest | None:
        """The manifest of an attempt, or None where it is not committed or cannot be read."""
        folder = f"{self.stage_folder(stage, iteration)}/{attempt}"
        try:
            return read_manifest(self.files.read(f"{folder}/manifest.json"), folder)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as fault:
            if isinstance(fault, InputError):
                raise
            return None

    def product(self, consumed: Upstream) -> Manifest | None:
        """What a stage consumed: the attempt it names, or another whole one of the same content."""
        named = self.of(consumed.run).manifest(consumed.stage, consumed.iteration, consumed.attempt)
        for manifest in (named, *self.beside(consumed.stage, consumed.iteration, consumed.run)):
            if manifest and manifest.content_digest == consumed.content_digest and not self.damage(manifest):
                return manifest
        return None

    def committed(self, stage: StageName, iteration: int) -> list[Manifest]:
        found = (self.manifest(stage, iteration, name) for name in self.attempts(stage, iteration))
        return [m for m in found if m is not None]

    def beside(self, stage: StageName, iteration: int, run: str) -> list[Manifest]:
        """The committed attempts of another run, then this one's own."""
        return [m for name in dict.fromkeys((run, self.run)) for m in self.of(name).committed(stage, iteration)]

    def find(
        self, stage: StageName, iteration: int, fingerprint: str, upstream: dict[str, Manifest]
    ) -> Manifest | None:
        """A committed, whole attempt with this fingerprint that consumed these very products: the Cached rule."""
        same = self.matching(stage, iteration, fingerprint, upstream)
        return next((manifest for manifest in same if not self.damage(manifest)), None)

    def matching(
        self, stage: StageName, iteration: int, fingerprint: str, upstream: dict[str, Manifest]
    ) -> Iterator[Manifest]:
        """The committed attempts, whole or not, with this fingerprint that consumed these very products; the one on
        the line first, and the others read only where that is not enough."""
        digests = {name: m.content_digest for name, m in upstream.items()}
        first = self.on_line(stage, iteration)
        if first and first.fingerprint == fingerprint and consumed(first) == digests:
            yield first
        for manifest in self.committed(stage, iteration):
            if manifest != first and manifest.fingerprint == fingerprint and consumed(manifest) == digests:
                yield manifest

    def pruned(self, manifest: Manifest) -> Tombstone | None:
        """What was pruned from an attempt, if anything was."""
        return read_tombstone(self.files, manifest.folder)

    def holding(self, manifest: Manifest, folder: str) -> Manifest | None:
        """This attempt, or another whole one of the same content, from which `folder` was not pruned."""
        for candidate in (manifest, *self.beside(manifest.stage, manifest.iteration, manifest.held_by)):
            if candidate.content_digest == manifest.content_digest and not self.damage(candidate):
                stone = self.pruned(candidate)
                if stone is None or folder not in stone.what:
                    return candidate
        return None

    def damage(self, manifest: Manifest) -> str | None:
        """Why a committed attempt cannot be used: a part that is missing or of another length, or one whose content
        was found altered before; None if whole. What was pruned is no damage."""
        try:
            return str(json.loads(self.files.read(f"{manifest.folder}/damaged.json"))["why"])
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError):
            return f"{self.files.url(manifest.folder)}/damaged.json is there"
        faults = {part.path: fault for part in manifest.parts if (fault := self._fault(part))}
        pruned = self._pruned_paths(manifest) if faults else set()
        return next((fault for path, fault in faults.items() if path not in pruned), None)

    def _fault(self, part: Part) -> str | None:
        try:
            size = self.files.size(part.path)
        except FileNotFoundError:
            return f"{self.files.url(part.path)} is missing"
        return (
            None
            if size == part.bytes
            else f"{self.files.url(part.path)} has {size} bytes, its manifest says {part.bytes}"
        )

    def verify(self, manifest: Manifest) -> None:
        """Read every part; what is altered is noted beside the manifest, so that the stage is made again."""
        pruned = self._pruned_paths(manifest)
        for part in manifest.parts:
            if part.path in pruned:
                continue
            try:
                read_bytes(self.files, part)
            except DamagedError as damage:
                self.files.create(f"{manifest.folder}/damaged.json", canonical_json({"why": str(damage)}))

    def _pruned_paths(self, manifest: Manifest) -> set[str]:
        stone = self.pruned(manifest)
        return {f"{manifest.folder}/{path}" for path in stone.parts} if stone else set()

    def open_attempt(
        self, stage: StageName, iteration: int, fingerprint: str, upstream: dict[str, Manifest], *, resumable: bool
    ) -> Attempt:
        """The folder to write into. A resumable stage goes on in the unfinished attempt at the same work if there
        is one; any other gets a fresh folder, so that nothing half-made is ever mixed in.

        `upstream` may lack products that are not committed yet (rewards behind a running rollout).
        """
        digests = {n: m.content_digest for n, m in upstream.items()}
        # Who trains and who makes a stage again beside the line never write into one folder.
        begun = {"fingerprint": fingerprint, "upstream": digests, "line": self.epoch is not None}
        number = 0
        while True:
            number += 1
            name = fingerprint[:12] + (f".{number}" if number > 1 else "")
            attempt = Attempt(stage, iteration, name, f"{self.stage_folder(stage, iteration)}/{name}", fingerprint)
            if self.files.exists(attempt.path("manifest.json")) or self.files.exists(attempt.path(TOMBSTONE)):
                continue
            if self.files.create(attempt.path("attempt.json"), canonical_json(begun)):
                return attempt
            try:
                if resumable and json.loads(self.files.read(attempt.path("attempt.json"))) == begun:
                    return attempt
            except ValueError:
                continue

    def commit(
        self,
        attempt: Attempt,
        *,
        parts: list[Part],
        upstream: dict[str, Manifest],
        affecting_config: dict[str, Any],
        inputs: dict[str, str],
        versions: dict[str, str],
        started_at: float,
        summary: dict[str, Any],
        flow_run_id: str | None,
    ) -> Manifest:
        """Commit the attempt by its manifest; who loses a race gets the winner's."""
        ordered = tuple(sorted(parts, key=lambda p: p.path))
        manifest = Manifest(
            stage=attempt.stage,
            run=self.run,
            iteration=attempt.iteration,
            attempt=attempt.name,
            folder=attempt.folder,
            fingerprint=attempt.fingerprint,
            content_digest=stage_digest(attempt.folder, ordered),
            parts=ordered,
            upstream={name: m.as_upstream() for name, m in upstream.items()},
            affecting_config=affecting_config,
            inputs=inputs,
            versions=versions,
            times={"started_at": started_at, "committed_at": time.time()},
            summary=summary,
            flow_run_id=flow_run_id,
        )
        if self.files.create(attempt.path("manifest.json"), manifest.to_bytes()):
            return manifest
        winner = self.manifest(attempt.stage, attempt.iteration, attempt.name)
        if winner is None:
            raise DamagedError(
                f"{self.files.url(attempt.path('manifest.json'))} cannot be read: delete the folder {attempt.name} "
                "and run the same command again"
            )
        return winner

    def begun(self) -> bool:
        """Whether stages lie under this name, committed or not, with or without run.json."""
        return any(name == "policy" or name.startswith("iteration=") for name in self.files.list(self.run))

    def iterations(self) -> list[int]:
        """Iterations that have a folder or, in a fork, are kept of another run, ascending."""
        names = (n.removeprefix("iteration=") for n in self.files.list(self.run) if n.startswith("iteration="))
        return sorted({*(int(n) for n in names if n.isdigit()), *line.iterations(self.record() or {})})


def consumed(manifest: Manifest) -> dict[str, str]:
    """Content digests of the products a stage consumed, by name."""
    return {name: u.content_digest for name, u in manifest.upstream.items()}


def runs(files: Files) -> list[str]:
    """Names of the runs under an artifact root."""
    return [name for name in files.list("") if _RUN_ID.fullmatch(name) and files.exists(f"{name}/run.json")]


__all__ = ["STAGES", "Attempt", "RunStore", "Upstream", "check_run_id", "consumed", "runs"]
