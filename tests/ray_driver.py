"""Drivers of their own for a real Ray head: short programs that tell what they saw."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PRELUDE = """
import os, sys, time
from pathlib import Path
from miles_core.pipeline.inputs import resolve_inputs
from miles_core.runtime.workers import ProcessDied, Workers
from deployments.recipes import recipe

def tell(*words):
    with open(os.environ["TOLD"], "a") as told:
        print(*words, file=told)

def workers(epoch=1, name="tiny", **changes):
    config = recipe(name).replace(**changes)
    return Workers(config, resolve_inputs(config), Path(os.environ["MILES_HOME"]) / "state", run="miles-test", epoch=epoch)
"""


def environment(home: Path) -> dict[str, str]:
    """Ours without what would lead a driver elsewhere."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MILES_", "RAY_"))}
    return kept | {"MILES_HOME": str(home)}


def driver(home: Path, code: str, *arguments: str, returncode: int = 0) -> list[list[str]]:
    """Run a driver to the end expected; the words of each line that it told, in a file, since a thread of Ray's writes
    the actors' logs into the middle of what a driver prints."""
    with tempfile.NamedTemporaryFile("r", dir=home) as told:
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + code, *arguments],
            env=environment(home) | {"TOLD": told.name},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == returncode, done.stdout + done.stderr
        return [line.split() for line in told]
