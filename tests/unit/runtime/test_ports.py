"""Ports for servers that need seconds until they bind them."""

import socket
from pathlib import Path

from miles_core.runtime.ports import all_free, free_ports


def test_a_row_that_outgoing_connections_do_not_take() -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(50):
        row = free_ports(4)
        assert row == list(range(row[0], row[0] + 4))
        assert row[0] >= 10_000 and row[-1] < first_ephemeral


def test_a_row_is_free_as_a_whole() -> None:
    row = free_ports(3)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", row[2]))
        assert not all_free(row, "127.0.0.1")
        assert all_free(row[:2], "127.0.0.1")
    assert all_free(row, "127.0.0.1")
