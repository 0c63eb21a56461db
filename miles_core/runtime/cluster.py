"""The Ray cluster of a command: RAY_ADDRESS, or a head of its own on loopback, stopped at the end."""

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from miles_core.errors import InputError, StageError

_START_SECONDS = 90


@contextlib.contextmanager
def ray_cluster(state: Path, code_path: str | None = None) -> Iterator[None]:
    """Join RAY_ADDRESS, or start and stop a head of one's own.

    `state` is a folder where an own head leaves its pid, so that `miles down` finds one that a killed command
    left behind. Raises InputError where RAY_ADDRESS does not answer.
    """
    address = os.environ.get("RAY_ADDRESS")
    with contextlib.ExitStack() as stack:
        own = not address
        if not address:
            # Ray reads these once, when it is imported: one token for all heads of this process.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(16))
            address = stack.enter_context(_own_head(state))
        import ray

        # Workers start in the thread of the task that first needs them; Ray warns about that on the terminal.
        logging.getLogger("ray").setLevel(logging.ERROR)
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error", configure_logging=False)
        except (ConnectionError, ValueError) as fault:
            if own:
                raise StageError(f"the Ray head that was started does not answer: {fault}") from fault
            raise InputError(
                f"no Ray cluster answers at RAY_ADDRESS {address}: start one there, or unset RAY_ADDRESS"
            ) from fault
        stack.callback(ray.shutdown)
        if threading.current_thread() is threading.main_thread():
            # Ray ends the process on SIGTERM before anything is cleaned up.
            signal.signal(signal.SIGTERM, handler)
        yield


@contextlib.contextmanager
def _own_head(state: Path) -> Iterator[str]:
    end_left_heads(state)
    folder = Path(tempfile.mkdtemp(prefix="miles-ray-"))
    record = state / f"{folder.name.removeprefix('miles-')}.json"
    _remember(record, folder)
    port = _free_port()
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    log = (folder / "head.log").open("wb")
    head = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--block",
            "--node-ip-address=127.0.0.1",
            f"--port={port}",
            "--include-dashboard=false",
            "--min-worker-port=0",
            "--max-worker-port=0",
            f"--temp-dir={folder}",
            "--disable-usage-stats",
        ],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_until_up(head, port, folder)
        yield f"127.0.0.1:{port}"
    finally:
        end_process_group(head.pid)
        head.wait()
        log.close()
        shutil.rmtree(folder, ignore_errors=True)
        record.unlink(missing_ok=True)


def _remember(record: Path, folder: Path) -> None:
    """Note who starts a head in which folder, before it is started; whole or not at all."""
    record.parent.mkdir(parents=True, exist_ok=True)
    unfinished = record.with_suffix(".tmp")
    unfinished.write_text(json.dumps({"owner": _identity(os.getpid()), "folder": str(folder)}))
    unfinished.replace(record)


def _identity(pid: int) -> list[float]:
    """A process's number and start, which together are no other process's."""
    return [pid, psutil.Process(pid).create_time()]


def _alive(identity: list[float]) -> bool:
    try:
        return _identity(int(identity[0])) == identity
    except psutil.NoSuchProcess:
        return False


def end_left_heads(state: Path) -> int:
    """End heads whose owner is gone, known by the folder on their command line; returns how many."""
    ended = 0
    for record in state.glob("ray-*.json"):
        try:
            entry = json.loads(record.read_text())
            owner, folder = entry["owner"], str(entry["folder"])
            if _alive(owner):
                continue
        except (ValueError, KeyError, TypeError, IndexError):
            record.unlink(missing_ok=True)
            continue
        left = [pid for pid in psutil.pids() if _works_in(pid, folder)]
        for pid in left:
            end_process_group(pid)
        ended += bool(left)
        shutil.rmtree(folder, ignore_errors=True)
        record.unlink(missing_ok=True)
    return ended


def _works_in(pid: int, folder: str) -> bool:
    try:
        return pid != os.getpid() and any(
            word.startswith("--") and folder in word for word in psutil.Process(pid).cmdline()
        )
    except psutil.Error:
        return False


def end_process_group(pid: int, patience: float = 10) -> None:
    """End a process and all below it: politely first, then for good."""
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    _, alive = psutil.wait_procs(family, timeout=patience)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=patience)


def _wait_until_up(head: subprocess.Popen, port: int, folder: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if head.poll() is not None:
            break
        output = (folder / "head.log").read_bytes()
        if b"Ray runtime started" in output:
            return
        time.sleep(0.1)
    lines = (folder / "head.log").read_text(errors="replace").strip().splitlines()[-5:]
    raise StageError(f"the Ray head did not start within {_START_SECONDS} s on port {port}: " + " | ".join(lines))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
