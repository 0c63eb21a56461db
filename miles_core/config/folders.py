"""Where things lie when nothing else is said: models made by code, artifacts, the local Prefect server's state."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

from platformdirs import user_data_path

from miles_core.config.run_config import RunConfig
from miles_core.errors import InputError

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_PREFIX = re.compile(r"(?!\.)[\w.=-]+", re.ASCII)


def local_path(text: str, what: str) -> Path:
    """The absolute path that a person wrote; `what` names where. Raises InputError for what is no path."""
    try:
        path = Path(text).expanduser().absolute()
        path.exists()
        os.fsencode(path)
    except (RuntimeError, OSError, ValueError) as fault:
        raise InputError(f"{what} {text!r} is no path that can be used: {fault}, give another") from None
    return path


def home() -> Path:
    """MILES_HOME, else the user's data folder for miles."""
    return local_path(os.environ.get("MILES_HOME") or str(user_data_path("miles")), "MILES_HOME")


def code_path(config: RunConfig) -> str:
    """The folder a user's own modules are found in: the configuration's, MILES_CODE_PATH (a worker has it: where `miles up`
    was given), else where the command was given."""
    return config.run.code_path or os.environ.get("MILES_CODE_PATH") or os.getcwd()


def own_args(config: RunConfig) -> SimpleNamespace:
    """The flat view that a user's functions receive, with the code path in force."""
    return SimpleNamespace(**config.flat() | {"code_path": code_path(config)})


def artifact_root(config: RunConfig | None = None, given: str | None = None) -> str:
    """The root of all runs, a folder's absolute path or s3://bucket[/prefix]: given, the configuration's, MILES_ARTIFACT_ROOT,
    else under home(). Raises InputError for what is neither."""
    root = given or (config.run.artifact_root if config else None) or os.environ.get("MILES_ARTIFACT_ROOT")
    root = root or str(home() / "artifacts")
    if "://" in root:
        return _bucket_root(root)
    path = local_path(root, "--artifact-root")
    standing = next(p for p in (path, *path.parents) if p.exists())
    if not standing.is_dir():
        raise InputError(f"--artifact-root {root}: {standing} is a file, give a folder")
    if not os.access(standing, os.W_OK | os.X_OK):
        raise InputError(f"--artifact-root {root}: {standing} cannot be written to, give another folder")
    return str(path)


def _bucket_root(root: str) -> str:
    if not root.startswith("s3://"):
        raise InputError(f"--artifact-root {root}: give a local folder or s3://BUCKET/PREFIX")
    bucket, *prefix = root.removeprefix("s3://").rstrip("/").split("/")
    if not _BUCKET.fullmatch(bucket):
        raise InputError(f"--artifact-root {root}: {bucket!r} is no name of a bucket, give s3://BUCKET/PREFIX")
    if not all(_PREFIX.fullmatch(name) for name in prefix):
        raise InputError(
            f"--artifact-root {root}: give a prefix of letters, digits, dot, dash, underscore and = between slashes"
        )
    return "/".join(["s3:/", bucket, *prefix])
