"""The Prefect server a command talks to: PREFECT_API_URL, or a local one on loopback, found or started."""

import os
import socket
import sys
import time
from urllib.parse import urlsplit

import httpx
from filelock import FileLock

from flows.cli.background import Background
from miles_core.errors import InputError, StageError
from miles_core.runtime.ports import free_ports
from miles_core.store.digest import sha256_hex

SERVER = Background("server")

_START_SECONDS = 180
_DATABASES = ("postgresql+asyncpg://", "sqlite+aiosqlite://")

QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
    "DO_NOT_TRACK": "1",
}


def ensure_server(database: str | None = None, host: str = "127.0.0.1", port: int | None = None) -> str:
    """The server's API address, put into the environment before Prefect is imported.

    `database` (an SQLAlchemy address, such as postgresql+asyncpg://user:password@host/name), `host` and `port` are those of
    a local server that is started; one that runs must have them. Raises InputError where PREFECT_API_URL does not answer or
    a running server differs, StageError where a local server does not start.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    given = os.environ.get("PREFECT_API_URL")
    if given:
        if database or port:
            raise InputError("--database and --port are a local server's: unset PREFECT_API_URL to start one")
        if not answers(given):
            raise InputError(
                f"no Prefect server answers at PREFECT_API_URL {given}: start it, or unset the variable to use a local one"
            )
        return given
    if database and not database.startswith(_DATABASES):
        raise InputError(
            f"--database {database.partition(':')[0]}:…: give an address that begins with {' or '.join(_DATABASES)}"
        )
    if SERVER.record() is None:
        free_port((port,) if port else (4200, 0), host)
    SERVER.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(SERVER.folder / "server.lock"):
        url = _running()
        if url:
            _check_as_asked(url, database, host, port)
        else:
            url = _start(database, host, port)
    os.environ["PREFECT_API_URL"] = url
    os.environ.setdefault("PREFECT_HOME", str(SERVER.folder))
    return url


def ui_address(api: str) -> str:
    """The UI of a server, from its API address."""
    return api.removesuffix("/").removesuffix("/api")


def end_server() -> bool:
    """End the local server that a command started; False where none runs."""
    return SERVER.end()


def running_server() -> str | None:
    """The API address of the local server that a command started and that answers; nothing is started or ended."""
    record = SERVER.record()
    return str(record["url"]) if record and answers(record["url"]) else None


def _check_as_asked(url: str, database: str | None, host: str, port: int | None) -> None:
    record = SERVER.record() or {}
    asked = sha256_hex(database.encode()) if database else None
    running = urlsplit(url)
    other_place = (port and port != running.port) or (host != "127.0.0.1" and record.get("host") != host)
    if other_place or (database and asked != record.get("database")):
        raise InputError(f"a local Prefect server runs at {url} with other settings: end it with `miles down` first")


def _running() -> str | None:
    record = SERVER.record()
    if record is None:
        return None
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if answers(record["url"]):
            return str(record["url"])
        if SERVER.record() is None:
            return None
        time.sleep(0.2)
    raise StageError(
        f"the local Prefect server at {record['url']} lives and has not answered for {_START_SECONDS} s: wait and try "
        f"again, or end it with `miles down`; its log is {SERVER.log}"
    )


def _start(database: str | None, host: str, port: int | None) -> str:
    print("starting a local Prefect server …", flush=True)
    port = free_port((port,), host) if port else free_port((4200, 0), host)
    url = f"http://{_reached_at(host)}:{port}/api"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    environment |= QUIET | {"PREFECT_HOME": str(SERVER.folder), "PREFECT_API_URL": url}
    if host != "127.0.0.1":
        # Browsers elsewhere reach the API where they reach the page.
        environment["PREFECT_UI_API_URL"] = "/api"
    if database:
        environment["PREFECT_API_DATABASE_CONNECTION_URL"] = database
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", str(port)]
    server = SERVER.start(
        command, environment, url=url, host=host, database=sha256_hex(database.encode()) if database else None
    )
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        if answers(url):
            return url
        time.sleep(0.1)
    SERVER.end()
    raise StageError(f"the local Prefect server did not start within {_START_SECONDS} s: see {SERVER.log}")


def _reached_at(host: str) -> str:
    return "127.0.0.1" if host == "0.0.0.0" else host


def answers(url: str) -> bool:
    """Whether a Prefect server is healthy there."""
    try:
        return httpx.get(f"{url.rstrip('/')}/health", timeout=5).status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def free_port(wanted: tuple[int, ...], host: str) -> int:
    """The first of the wanted ports that is free; 0 is any. Raises InputError."""
    for given in wanted:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, given or free_ports(host=host)[0]))
            except (OSError, OverflowError, StageError) as fault:
                failure = fault
                continue
            return int(probe.getsockname()[1])
    raise InputError(
        f"--host {host} --port {wanted[0]} cannot be listened on ({failure}): give another, or leave them out"
    )
