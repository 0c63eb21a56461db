"""Processes that outlive the command that starts them: the local Prefect server, the worker. One of a name and a home."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_core.config.folders import home
from miles_core.runtime.heads import end_process_group
from miles_core.store.process import start_of


@dataclass(frozen=True)
class Background:
    """A process by name: its record and its log lie under MILES_HOME."""

    name: str

    @property
    def folder(self) -> Path:
        """Where record and log lie."""
        return home() / "prefect"

    @property
    def log(self) -> Path:
        """What the process prints."""
        return self.folder / f"{self.name}.log"

    def record(self) -> dict[str, Any] | None:
        """What was noted of the process at its start; None where it does not live."""
        try:
            record: dict[str, Any] = json.loads(self._note.read_text())
            return record if start_of(record["pid"]) == record["started"] else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def start(self, command: Sequence[str], environment: Mapping[str, str], **facts: Any) -> "subprocess.Popen[bytes]":
        """Start it in a session of its own, its output appended to the log; `facts` go into the record."""
        self.folder.mkdir(parents=True, exist_ok=True)
        begin = [sys.executable, "-m", "flows.cli.begin", str(self._note), json.dumps(facts)]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*begin, *command],
                env=dict(environment),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=self.folder,
            )
        while process.poll() is None and (self.record() or {}).get("pid") != process.pid:
            time.sleep(0.01)
        return process

    def end(self, patience: float = 10) -> bool:
        """End it and all below it; False where it does not live."""
        record = self.record()
        if record is not None:
            end_process_group(record["pid"], patience)
        with contextlib.suppress(FileNotFoundError):
            self._note.unlink()
        return record is not None

    @property
    def _note(self) -> Path:
        return self.folder / f"{self.name}.json"
