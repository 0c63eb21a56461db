"""What logging makes of a configuration: real wandb offline, real event files, over a made-up run."""

import os
import sys
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[2]))

from consumers import Place
from synthetic_run import SyntheticRun

from miles_core.config import RunConfig
from miles_core.observe.log_wandb import Wandb, wandb_wanted
from miles_core.observe.logged import Ledger
from miles_core.observe.wandb_file import RunFile
from miles_core.pipeline.log import RunLog
from miles_core.pipeline.stage import Step
from miles_core.store.files import Files
from miles_core.store.run_store import RunStore


def is_on(c: RunConfig, place: Place) -> bool:
    return wandb_wanted(c, {})


def is_on_with_a_key(c: RunConfig, place: Place) -> bool:
    return wandb_wanted(c, {"WANDB_API_KEY": "x"})


def _run(c: RunConfig, place: Place, iterations: int) -> tuple[RunConfig, RunStore, Path]:
    root = place.root / "logged"
    made = SyntheticRun(Files(str(root)), "r")
    for iteration in range(iterations):
        made.iterate(iteration)
    return c, made.draw_line(), root


def _opened(c: RunConfig, place: Place) -> tuple[Any, Wandb]:
    for name in ("WANDB_PROJECT", "WANDB_DIR", "WANDB_ENTITY", "WANDB_RUN_GROUP", "WANDB_BASE_URL"):
        os.environ.pop(name, None)
    store = _run(c, place, 0)[1]
    made = Wandb(c, store, Ledger(store))
    made.open()
    return made._run, made


def started(what: str) -> Any:
    """A property of the wandb run that was started."""

    def shown(c: RunConfig, place: Place) -> str | None:
        run, made = _opened(c, place)
        found = {
            "project": run.project,
            "group": run.settings.run_group,
            "entity": run.settings.entity,
            "id": run.id if run.id == c.logging.wandb_run_id else "made" if len(run.id) == 12 else run.id,
            "dir": str(Path(run.settings.root_dir)).removeprefix(str(place)),
        }[what]
        made.close()
        return found

    return shown


def host(c: RunConfig, place: Place) -> str:
    run, made = _opened(c, place)
    found = str(run.settings.base_url)
    made.close()
    return found if found == c.logging.wandb_host else "wandb's own"


def images(c: RunConfig, place: Place) -> list[int]:
    """Of each of three iterations."""
    import wandb

    c = c.replace(use_wandb=True, wandb_mode="offline", wandb_dir=str(place.root / f"w{id(c)}"))
    _, store, _ = _run(c, place, 3)
    store.files.delete("r/logged.json")
    with RunLog(c, store, print) as log:
        for iteration in range(3):
            log.iteration(Step(c, cast(Any, None), store, cast(Any, None), iteration))
    wandb.teardown()
    (path,) = Path(str(c.logging.wandb_dir)).glob("wandb/offline-run-*/run-*.wandb")
    rows = [row for row in RunFile(path).new_rows() if "train/loss" in row]
    return [len(row.get("rollout_media/sample_images/captions", [])) for row in rows]


def event_folders(c: RunConfig, place: Place) -> str:
    _, store, _ = _run(c, place, 1)
    with RunLog(c, store, print) as log:
        log.iteration(Step(c, cast(Any, None), store, cast(Any, None), 0))
    found = sorted({str(path.parent) for path in place.root.rglob("events.out.tfevents.*")})
    made = " ".join(folder.removeprefix(str(place)) for folder in found)
    for path in list(place.root.rglob("events.out.tfevents.*")):
        path.unlink()
    return made
