"""Joining a Ray cluster."""

import signal
import subprocess
import sys

SENT_WHILE_CONNECTING = """
import os, signal, sys
import ray, ray._private.utils
from miles_core.runtime import cluster

def init(**options):
    # As Ray does, which then ends the process in the middle of its connection.
    ray._private.utils.set_sigterm_handler(lambda *_: os.abort())
    os.kill(os.getpid(), signal.SIGTERM)
    connected.append(options["address"])

connected = []
ray.init = init
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7 if connected else 8))
cluster._connect("127.0.0.1:1", None, own=True)
"""


def test_a_sigterm_that_comes_while_ray_connects_reaches_the_commands_own_handler() -> None:
    done = subprocess.run([sys.executable, "-c", SENT_WHILE_CONNECTING], capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, (done.returncode, -signal.SIGABRT, done.stderr)
