"""What an actor was made from, as a digest: another command with the same may take it over."""

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import miles_core
from miles_core.config import RunConfig
from miles_core.runtime.heads import environment_digest
from miles_core.store.digest import canonical_json, sha256_hex

if TYPE_CHECKING:
    from miles_core.pipeline.inputs import Inputs

# They say how long a run goes on and how it is called, not what its processes do.
_OF_THE_COMMAND = ("run_id", "new", "artifact_root", "num_rollout", "keep_actors")


def actor_identity(kind: str, config: RunConfig, inputs: "Inputs", device: str) -> str:
    """SHA-256 over the actor's class, its configuration, the files it reads, its device and this package's code."""
    fields = {name: value for name, value in config.flat().items() if name not in _OF_THE_COMMAND}
    told = {"kind": kind, "config": repr(sorted(fields.items())), "inputs": inputs.all(), "device": device}
    return sha256_hex(canonical_json(told | {"code": code_digest(), "environment": environment_digest()}))


@functools.cache
def code_digest() -> str:
    """SHA-256 over the package's sources as they were when this process first asked."""
    digest = hashlib.sha256()
    for source in sorted(Path(miles_core.__path__[0]).rglob("*.py")):
        digest.update(f"{source}\n".encode() + source.read_bytes())
    return digest.hexdigest()
