"""logged.json of a run: what was logged, and where to. A resumed run goes by it, so that nothing is logged twice or left out."""

import json
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from miles_core.errors import InputError
from miles_core.store.manifest import Manifest
from miles_core.store.run_store import RunStore

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Logged:
    """Where an entry went. `skipped`: a user's function said that the default has nothing to add."""

    to: frozenset[str] = frozenset()
    skipped: bool = False


def key_of(manifest: Manifest) -> str:
    """What an iteration (by its update) or an evaluation is logged as: the same content is the same entry."""
    return f"{manifest.iteration:06d}/{manifest.stage}/{manifest.content_digest[:12]}"


class Ledger:
    """The file, edited as one step each time; of several writers none loses another's entry."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self._body: dict[str, Any] | None = None

    @property
    def path(self) -> str:
        return f"{self.store.run}/logged.json"

    def of(self, key: str) -> Logged:
        """What became of an entry as this process last knew."""
        found = self._known()["entries"].get(key, {})
        return Logged(frozenset(found.get("to", ())), bool(found.get("skipped")))

    def record(self, keys: Collection[str], to: str, *, skipped: bool = False) -> None:
        """Note that entries went there, and whether their default was left out."""

        def change(body: dict[str, Any]) -> None:
            for key in keys:
                entry = body["entries"].setdefault(key, {"to": [], "skipped": False})
                entry["to"] = sorted({*entry["to"], to})
                entry["skipped"] = entry["skipped"] or skipped
                if to.startswith("wandb "):
                    body["waiting"].pop(key, None)

        if keys:
            self._edit(change)

    def wait(self, manifest: Manifest) -> None:
        """Leave an evaluation beside the line to whoever trains the run now."""
        self._edit(lambda body: body["waiting"].update({key_of(manifest): manifest.attempt}))

    def waiting(self) -> dict[str, str]:
        """The attempt of each evaluation that waits, by its key; read afresh."""
        self._body = None
        return dict(self._known()["waiting"])

    def wandb_id(self) -> str:
        """The id of the run's wandb run, made at the first call."""

        def change(body: dict[str, Any]) -> None:
            body["wandb_run_id"] = body.get("wandb_run_id") or uuid.uuid4().hex[:12]

        if not self._known().get("wandb_run_id"):
            self._edit(change)
        return str(self._known()["wandb_run_id"])

    def _known(self) -> dict[str, Any]:
        if self._body is None:
            try:
                self._body = self._parse(self.store.files.read(self.path))
            except FileNotFoundError:
                self._body = self._parse(None)
        return self._body

    def _edit(self, change: Callable[[dict[str, Any]], None]) -> None:
        def edit(data: bytes | None) -> bytes:
            body = self._parse(data)
            change(body)
            self._body = body
            return json.dumps(body, indent=1).encode()

        self.store.files.edit(self.path, edit)

    def _parse(self, data: bytes | None) -> dict[str, Any]:
        if data is None:
            return {"schema_version": SCHEMA_VERSION, "entries": {}, "waiting": {}}
        where = self.store.files.url(self.path)
        try:
            body: dict[str, Any] = json.loads(data)
            version = int(body["schema_version"])
            if not isinstance(body["entries"], dict) or not isinstance(body["waiting"], dict):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise InputError(
                f"{where} does not say what was logged: put it back from a copy, or delete it to have everything logged again"
            ) from None
        if version > SCHEMA_VERSION:
            raise InputError(f"{where} has schema version {version}, this program knows up to {SCHEMA_VERSION}")
        return body
