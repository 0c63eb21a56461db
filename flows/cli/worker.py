"""The worker that runs deployments on this machine, and what the server knows of them."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from deployments import recipes
from flows.cli.background import Background
from miles_core.config.folders import home
from miles_core.errors import InputError, StageError

POOL = "miles"
WORKER = Background("worker")
PREFECT_YAML = Path(recipes.__file__).parents[1] / "prefect.yaml"
AUTOMATIONS_YAML = PREFECT_YAML.with_name("automations.yaml")
_START_SECONDS = 180
# A process worker gives a flow so long to end after SIGTERM.
_PATIENCE_SECONDS = 45


def deploy(api: str) -> list[str]:
    """Register the deployments of prefect.yaml with the server, whose pool a worker has made; their names.

    Raises StageError with Prefect's own words.
    """
    _prefect(api, "--no-prompt", "deploy", "--all", "--prefect-file", str(PREFECT_YAML))
    return [one["name"] for one in yaml.safe_load(PREFECT_YAML.read_text())["deployments"]]


def ensure_automations() -> list[str]:
    """Make the server's automations those of automations.yaml, and leave switched off what somebody switched off; the names
    of all."""
    from prefect.automations import Automation
    from prefect.client.orchestration import get_client

    wanted = yaml.safe_load(AUTOMATIONS_YAML.read_text())
    with get_client(sync_client=True) as client:
        for one in wanted:
            there = client.read_automations_by_name(one["name"])
            if not there:
                Automation(**one).create()
            elif _meaning(Automation(**one)) != _meaning(there[0]):
                Automation(**one, id=there[0].id, enabled=there[0].enabled).update()
    return [one["name"] for one in wanted]


def _meaning(automation: Any) -> dict[str, Any]:
    """What an automation does, without what the server adds. Not as JSON: the events of a trigger are a set, which has no
    order there; an update that changes nothing makes the server forget whom it was waiting for."""
    told: dict[str, Any] = automation.model_dump(include={"description": True, "trigger": True, "actions": True})
    told["trigger"].pop("id", None)
    return told


def ensure_worker(api: str) -> bool:
    """A worker of this home that polls the server; True if it was started now.

    Raises InputError where one polls another server, StageError where it does not start.
    """
    WORKER.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(WORKER.folder / "worker.lock"):
        record = WORKER.record()
        if record is not None:
            if record["api"] != api:
                raise InputError(f"a worker of this home polls {record['api']}: end it with `miles down` first")
            return False
        command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
        command += ["--create-pool-if-not-found"]
        said = WORKER.log.stat().st_size if WORKER.log.exists() else 0
        worker = WORKER.start(command, _environment(api), api=api)
        _wait_until_it_polls(worker, said)
        return True


def end_worker() -> bool:
    """End the worker of this home and the flows that it runs; False where none lives."""
    return WORKER.end(_PATIENCE_SECONDS)


def _wait_until_it_polls(worker: "subprocess.Popen[bytes]", said: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and worker.poll() is None:
        with WORKER.log.open("rb") as log:
            log.seek(said)
            if b"started!" in log.read():
                return
        time.sleep(0.1)
    WORKER.end()
    raise StageError(f"the worker did not start within {_START_SECONDS} s: see {WORKER.log}")


def _environment(api: str) -> dict[str, str]:
    """What the worker and its flows see: this command's environment, and where server and home are."""
    return os.environ | {
        "PREFECT_API_URL": api,
        "PREFECT_HOME": os.environ.get("PREFECT_HOME") or str(WORKER.folder),
        "PREFECT_RESULTS_DEFAULT_SERIALIZER": "json",
        # So often a flow says that it lives; three times without, and an automation marks it Crashed.
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
        "PYTHONUNBUFFERED": "1",
        "MILES_HOME": str(home()),
        "MILES_CODE_PATH": os.environ.get("MILES_CODE_PATH") or os.getcwd(),
    }


def _prefect(api: str, *arguments: str) -> None:
    # In an empty folder: what lies where the command was given does not become part of a deployment.
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "prefect", *arguments],
            env=_environment(api),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    if done.returncode:
        raise StageError(f"`prefect {' '.join(arguments)}` failed: {' '.join(done.stdout.split())[-600:]}")
