"""The process that starts a Ray head and ends it when nobody has used it for a while: python -m …keeper NOTE."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from miles_core.runtime.heads import Head, end_process_group, identity, read_note, write_note
from miles_core.runtime.ports import free_ports

_UP = b"Ray runtime started"


def main(note: Path) -> None:
    """Start the head that the note asks for, say in the note that it is up, and stay with it until its end."""
    signal.signal(signal.SIGTERM, _end)
    head = read_note(note)
    assert head is not None
    write_note(note, head := replace(head, keeper=identity(os.getpid())))
    address = f"127.0.0.1:{free_ports()[0]}"
    log = Path(head.folder) / "ray.log"
    with log.open("wb") as out:
        ray = subprocess.Popen(_command(head, address), stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        while _UP not in log.read_bytes():
            if ray.poll() is not None:
                sys.exit(log.read_text(errors="replace"))
            time.sleep(0.05)
        write_note(note, replace(read_note(note) or head, address=address))
        _stay(note, ray, head.idle_seconds)
    finally:
        end_process_group(ray.pid)
        shutil.rmtree(head.folder, ignore_errors=True)
        left = read_note(note)
        if left and left.keeper == identity(os.getpid()):
            note.unlink(missing_ok=True)


def _stay(note: Path, ray: subprocess.Popen, idle_seconds: float) -> None:
    used = time.monotonic()
    while ray.poll() is None:
        head = read_note(note)
        if head is None:
            return
        if head.used:
            used = time.monotonic()
        elif time.monotonic() - used > idle_seconds:
            return
        time.sleep(1.0)


def _command(head: Head, address: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        "--node-ip-address=127.0.0.1",
        f"--port={address.rsplit(':', 1)[1]}",
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--no-monitor",
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--temp-dir={head.folder}",
        "--disable-usage-stats",
    ]


def _end(number: int, frame: object) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
