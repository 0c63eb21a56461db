"""The Prefect server a command talks to: PREFECT_API_URL, or a local one on loopback, found or started."""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from filelock import FileLock

from miles_core.config.folders import home
from miles_core.errors import InputError, StageError
from miles_core.runtime.heads import end_process_group

_START_SECONDS = 90

QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "DO_NOT_TRACK": "1",
}


def ensure_server() -> str:
    """The server's API address, put into the environment before Prefect is imported.

    Raises InputError where PREFECT_API_URL does not answer, StageError where a local server does not start.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    given = os.environ.get("PREFECT_API_URL")
    if given:
        if not _answers(given):
            raise InputError(
                f"no Prefect server answers at PREFECT_API_URL {given}: start it, or unset the variable to use a local one"
            )
        return given
    folder = home() / "prefect"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "server.lock"):
        url = _running(folder) or _start(folder)
    os.environ["PREFECT_API_URL"] = url
    os.environ.setdefault("PREFECT_HOME", str(folder))
    return url


def ui_address(api: str) -> str:
    """The UI of a server, from its API address."""
    return api.removesuffix("/").removesuffix("/api")


def end_server() -> bool:
    """End the local server that a command started; False where none runs."""
    folder = home() / "prefect"
    record = _record(folder)
    if record is None:
        return False
    end_process_group(record["pid"])
    (folder / "server.json").unlink(missing_ok=True)
    return True


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((folder / "server.json").read_text())
        alive = psutil.Process(record["pid"]).create_time() == record["created"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, psutil.NoSuchProcess):
        return None
    return record if alive else None


def _running(folder: Path) -> str | None:
    record = _record(folder)
    if record is None:
        return None
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        if _answers(record["url"]):
            return str(record["url"])
        time.sleep(0.2)
    end_process_group(record["pid"])
    return None


def _start(folder: Path) -> str:
    print("starting a local Prefect server …", flush=True)
    port = _free_port()
    url = f"http://127.0.0.1:{port}/api"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    environment |= QUIET | {"PREFECT_HOME": str(folder), "PREFECT_API_URL": url, "MILES_SERVER": secrets.token_hex(4)}
    with (folder / "server.log").open("ab") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=folder,
        )
    entry = {"pid": server.pid, "created": psutil.Process(server.pid).create_time(), "url": url}
    (folder / "server.json").write_text(json.dumps(entry))
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        if _answers(url):
            return url
        time.sleep(0.1)
    end_process_group(server.pid)
    (folder / "server.json").unlink(missing_ok=True)
    raise StageError(f"the local Prefect server did not start within {_START_SECONDS} s: see {folder / 'server.log'}")


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url.rstrip('/')}/health", timeout=5).status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def _free_port() -> int:
    """4200 if it is free, as people expect it, else any."""
    for wanted in (4200, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", wanted))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise StageError("no free port for the local Prefect server")
