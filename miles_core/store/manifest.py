"""The manifest of a committed stage: created exclusively, last. No manifest, no stage."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from miles_core.errors import InputError
from miles_core.store.digest import canonical_json, content_digest, sha256_hex
from miles_core.store.parts import Part
from miles_core.store.schemas import SCHEMA_VERSION
from miles_core.store.stages import STAGES, StageName


@dataclass(frozen=True)
class Upstream:
    """One consumed product: where it was, what it meant, what it held. `run` holds it; in the file it stands only where
    it is another than the consumer's, so that a copied run stays whole."""

    stage: StageName
    iteration: int
    attempt: str
    fingerprint: str
    content_digest: str
    run: str


@dataclass(frozen=True)
class Manifest:
    """What a stage committed. `attempt` is the folder's name; `folder` its path under the artifact root, known
    from where the manifest was read and not part of the file, so that a copied run stays whole.

    In the file part paths are relative to the folder; here they are relative to the artifact root.
    """

    stage: StageName
    run: str
    iteration: int
    attempt: str
    folder: str
    fingerprint: str
    content_digest: str
    parts: tuple[Part, ...]
    upstream: dict[str, Upstream]
    affecting_config: dict[str, Any]
    inputs: dict[str, str]
    versions: dict[str, str]
    times: dict[str, float]
    summary: dict[str, Any] = field(default_factory=dict)
    flow_run_id: str | None = None

    @property
    def held_by(self) -> str:
        """The run whose folder it was read from."""
        return self.folder.partition("/")[0]

    @property
    def data(self) -> tuple[Part, ...]:
        """The parts that hold the stage's rows, in sample order."""
        return self.under("data/")

    @property
    def latents(self) -> tuple[Part, ...]:
        """The parts that hold a rollout's trajectories, in sample order, one a part of `data`."""
        return self.under("latents/")

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.data)

    def under(self, prefix: str) -> tuple[Part, ...]:
        """The parts below a folder of the attempt, or the one file of that name, in name order."""
        start = f"{self.folder}/{prefix}"
        return tuple(sorted((p for p in self.parts if p.path.startswith(start)), key=lambda p: p.path))

    def as_upstream(self) -> Upstream:
        return Upstream(self.stage, self.iteration, self.attempt, self.fingerprint, self.content_digest, self.held_by)

    def to_bytes(self) -> bytes:
        body = {
            "schema_version": SCHEMA_VERSION,
            "stage": self.stage,
            "run": self.run,
            "iteration": self.iteration,
            "attempt": self.attempt,
            "fingerprint": self.fingerprint,
            "content_digest": self.content_digest,
            "parts": [p.to_json() | {"path": p.path.removeprefix(self.folder + "/")} for p in self.parts],
            "upstream": {name: self._written(u) for name, u in self.upstream.items()},
            "affecting_config": self.affecting_config,
            "inputs": self.inputs,
            "versions": self.versions,
            "times": self.times,
            "summary": self.summary,
            "flow_run_id": self.flow_run_id,
        }
        return json.dumps(body, indent=1, ensure_ascii=False).encode()

    def _written(self, upstream: Upstream) -> dict[str, Any]:
        return {key: value for key, value in vars(upstream).items() if key != "run" or value != self.held_by}


def read_manifest(data: bytes, folder: str) -> Manifest:
    """Raises InputError for a manifest of a newer schema, ValueError for one that is no manifest."""
    body = json.loads(data)
    version = body.pop("schema_version")
    if version > SCHEMA_VERSION:
        raise InputError(
            f"{folder}/manifest.json has schema version {version}, this program knows up to {SCHEMA_VERSION}: "
            "use the newer program that wrote it"
        )
    parts = tuple(replace(Part(**p), path=f"{folder}/{p['path']}") for p in body.pop("parts"))
    own = {"run": folder.partition("/")[0]}
    upstream = {name: Upstream(**own | u) for name, u in body.pop("upstream").items()}
    if not isinstance(body["summary"], dict):
        raise TypeError("summary")
    return Manifest(folder=folder, parts=parts, upstream=upstream, **body)


def fingerprint(
    stage: StageName,
    iteration: int,
    *,
    config: dict[str, Any],
    inputs: dict[str, str],
    hooks: dict[str, str],
    upstream: dict[str, str],
) -> str:
    """What a stage's result depends on, known before any data exists (hex SHA-256).

    config: the affecting fields; inputs: SHA-256 of input files by role; hooks: digests by flag; upstream:
    fingerprints by stage.
    """
    return sha256_hex(
        canonical_json(
            {
                "stage": stage,
                "version": STAGES[stage].version,
                "iteration": iteration,
                "config": config,
                "inputs": inputs,
                "hooks": hooks,
                "upstream": upstream,
            }
        )
    )


ROW_FOLDERS = ("data", "latents")


def stage_digest(folder: str, parts: tuple[Part, ...]) -> str:
    """Content digest of a stage from its parts: rows in sample order (part names sort so), then what stands beside.

    A part of rows counts by its place and content, never by its name, which says how often it was tried.
    """
    rows: dict[str, list[str]] = {name: [] for name in ROW_FOLDERS}
    beside = []
    for part in sorted(parts, key=lambda p: p.path):
        name = part.path.removeprefix(folder + "/")
        if (top := name.split("/")[0]) in rows:
            rows[top].append(part.content)
        else:
            beside.append((name, part.content))
    beside += [(f"{top}/", content_digest(rows[top])) for top in ROW_FOLDERS[1:] if rows[top]]
    return content_digest(rows["data"], beside)
