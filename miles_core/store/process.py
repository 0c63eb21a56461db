"""Which process is which: on this boot of this machine, in this process space, by number and start."""

import os
import socket
from pathlib import Path

import psutil


def machine() -> str:
    """Where process numbers mean something: this boot of this machine and its process space."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()}-{psutil.boot_time():.0f}"


def start_of(pid: int) -> float | None:
    """When a process of this machine started, on a clock that nobody sets; None where there is no such process, or
    only what is left of one that ended."""
    try:
        # man 5 proc: after the name in brackets the state is the 1st field and the start, in ticks since boot, the 20th.
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return None if fields[0] == "Z" else float(fields[19])
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except ProcessLookupError:
        return None
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
