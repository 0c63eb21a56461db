"""Commands as a user gives them, in a home of their own, and what they left in the store."""

import contextlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from miles_core.store.files import Files
from miles_core.store.manifest import Manifest
from miles_core.store.parts import read_bytes
from miles_core.store.run_store import RunStore
from miles_core.store.stages import ITERATION_STAGES, StageName
from miles_core.weights.packing import from_safetensors

MILES = str(Path(sys.executable).parent / "miles")


@dataclass(frozen=True)
class Place:
    """A user's home for miles, and the runs in it. `root` is the artifact root, `variables` the environment's."""

    home: Path
    root: str = ""
    variables: dict[str, str] = field(default_factory=dict)

    def miles(self, *arguments: str, code: int = 0, **variables: str) -> str:
        """Run a command to its end; its whole output. Fails the test on another exit code."""
        process = self.start(*arguments, **variables)
        output, _ = process.communicate(timeout=500)
        assert process.returncode == code, output
        return output

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command; its output is in `stdout`."""
        return subprocess.Popen(
            [MILES, *arguments],
            env=self.environment() | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MILES_", "RAY_", "WANDB_"))}
        return kept | {"MILES_HOME": str(self.home), "PYTHONUNBUFFERED": "1"} | self.variables

    def ray_processes(self) -> set[int]:
        """Heads of this home's commands, others of this machine left out."""
        found = set()
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error):
                if process.info["name"] in ("raylet", "gcs_server") and self._is_home_of(process):
                    found.add(process.pid)
        return found

    def _is_home_of(self, process: psutil.Process) -> bool:
        return process.environ().get("MILES_HOME") == str(self.home)

    @property
    def artifacts(self) -> str:
        return self.root or str(self.home / "artifacts")

    def store(self, run: str) -> RunStore:
        return RunStore(Files(self.artifacts), run)

    def on_line(self, run: str, iteration: int, stage: StageName) -> Manifest:
        manifest = self.store(run).on_line(stage, iteration)
        assert manifest is not None
        return manifest

    def digests(self, run: str, iterations: int) -> dict[str, str]:
        """Content digests of all stages on the line."""
        return {f"{i}/{s}": self.on_line(run, i, s).content_digest for i in range(iterations) for s in ITERATION_STAGES}

    def checkpoint(self, run: str, iteration: int) -> dict[str, bytes]:
        """Every tensor of an update's checkpoint and adapter, as bytes by file and name."""
        update = self.on_line(run, iteration, "update")
        files = self.store(run).files
        found: dict[str, bytes] = {}
        for part in update.under("checkpoint/") + update.under("adapter/"):
            data, name = read_bytes(files, part), part.path.removeprefix(update.folder)
            if not name.endswith(".safetensors"):
                found[name] = data
                continue
            for tensor, value in from_safetensors(data).items():
                found[f"{name}:{tensor}"] = f"{value.dtype} {tuple(value.shape)}".encode() + value.numpy().tobytes()
        return found
