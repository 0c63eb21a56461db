"""A process that ends with the one that wanted it, however that ends: `Guarded`, and what it runs as
python -m miles_core.runtime.guard COMMAND….

The guard reads from a pipe whose other end its parent holds: when that is gone, also by kill -9, it ends the command and
all below it. It is no child of its parent's: Ray kills those of a worker at once, and theirs would be left.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_core.runtime.heads import end_process_group


class Guarded:
    """A command that was started under a guard; its output is appended to `log`."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._ended, told = os.pipe()
        with log.open("ab") as out:
            # The launcher leaves the guard behind and is gone.
            launcher = subprocess.Popen(
                [sys.executable, "-m", "miles_core.runtime.guard", *command],
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(told,),
            )
        os.close(told)
        assert launcher.stdin is not None
        self._leash = launcher.stdin
        launcher.wait()

    def ended(self, seconds: float | None = 0.0) -> bool:
        """Whether the command and all below it have ended, waiting so long; None: until they have."""
        ready, _, _ = select.select([self._ended], [], [], seconds)
        return bool(ready)

    def end(self) -> None:
        """End the command and all below it, and wait until they are gone."""
        with contextlib.suppress(OSError):
            self._leash.close()
        self.ended(None)


def main(*command: str) -> None:
    """Leave a guard behind, which runs the command in a session of its own."""
    if os.fork():
        os._exit(0)
    os.setsid()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: _end(child))

    def watch() -> None:
        while os.read(0, 1024):
            pass
        _end(child)

    threading.Thread(target=watch, daemon=True).start()
    child.wait()
    # Its helpers may outlive it.
    _end(child)


def _end(child: "subprocess.Popen[bytes]") -> None:
    end_process_group(child.pid, patience=5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
