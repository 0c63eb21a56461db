"""Ports that a server of ours can be given."""

import contextlib
import secrets
import socket
from pathlib import Path

from miles_core.errors import StageError

_LOWEST, _TRIES = 10_000, 1000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int = 1, host: str = "127.0.0.1") -> list[int]:
    """So many ports in a row that nobody holds now, at a random place below those that the kernel gives to outgoing
    connections: one of these could be taken by anybody before the server, which needs seconds to start, has bound it.

    Raises StageError where no such row is free.
    """
    end = _first_ephemeral()
    for _ in range(_TRIES):
        first = _LOWEST + secrets.randbelow(max(end - _LOWEST - count, 1))
        row = list(range(first, first + count))
        if all_free(row, host):
            return row
    raise StageError(f"no {count} ports in a row are free on {host} between {_LOWEST} and {end}: end what holds them")


def all_free(ports: list[int], host: str) -> bool:
    """Whether all of them can be bound at once."""
    with contextlib.ExitStack() as held:
        try:
            for port in ports:
                held.enter_context(socket.socket()).bind((host, port))
        except OSError:
            return False
        return True


def _first_ephemeral() -> int:
    try:
        first = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError):
        first = 32_768
    # A machine that gives out nearly all ports leaves none apart.
    return first if first > _LOWEST + 1000 else 65_000
