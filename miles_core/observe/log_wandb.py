"""Weights & Biases: the run's wandb run, carried on by each command; the step axis is the iteration."""

import contextlib
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from miles_core.config import RunConfig
from miles_core.config.folders import home, local_path
from miles_core.observe.destination import IMAGES, Entry
from miles_core.observe.logged import Ledger
from miles_core.observe.pictures import open_frames
from miles_core.observe.redact import redacted
from miles_core.observe.wandb_file import RunFile
from miles_core.store.run_store import RunStore

ENTRY = "store/entry"
PROJECT = "miles-flows"
_INIT_SECONDS, _FINISH_SECONDS, _WRITE_SECONDS = 20.0, 60.0, 10.0


def wandb_wanted(config: RunConfig, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a run logs to wandb: --use-wandb, else where WANDB_API_KEY is set; not where the mode is disabled."""
    if config.logging.use_wandb is False or wandb_mode(config, environment) == "disabled":
        return False
    return bool(config.logging.use_wandb or environment.get("WANDB_API_KEY"))


def wandb_mode(config: RunConfig, environment: Mapping[str, str] = os.environ) -> str:
    """online, offline or disabled: --wandb-mode, else WANDB_MODE."""
    return config.logging.wandb_mode or environment.get("WANDB_MODE") or "online"


def wandb_folder(config: RunConfig, store: RunStore) -> Path:
    """The folder in which wandb makes its own folder `wandb`."""
    given = config.logging.wandb_dir or os.environ.get("WANDB_DIR")
    if given:
        return local_path(given, "--wandb-dir")
    return Path(store.files.url(store.run)) if store.files.local else home() / "wandb" / store.run


class Wandb:
    """The wandb run of a run. Nothing is imported before the first entry."""

    def __init__(self, config: RunConfig, store: RunStore, ledger: Ledger) -> None:
        self.config, self.store, self.ledger = config, store, ledger
        self.folder = wandb_folder(config, store)
        self._run: Any = None
        self._file: RunFile | None = None
        self._sent: set[str] = set()
        self._arrived: set[str] = set()

    @property
    def id(self) -> str:
        return self.config.logging.wandb_run_id or self.ledger.wandb_id()

    @property
    def name(self) -> str:
        return f"wandb {self.id}"

    def open(self) -> None:
        """Start or resume the wandb run. Raises what wandb raises, and RuntimeError where there is no key."""
        if self._run is not None:
            return
        import wandb

        given, mode = self.config.logging, wandb_mode(self.config)
        host = {"base_url": given.wandb_host} if given.wandb_host else {}
        settings = wandb.Settings(
            **host,
            silent=True,
            console="off",
            save_code=False,
            disable_git=True,
            # Metadata holds the words of the command, and what they may give away.
            x_disable_meta=True,
            x_save_requirements=False,
            init_timeout=_INIT_SECONDS,
            finish_timeout=_FINISH_SECONDS,
        )
        # The service of the process that gave this command may hold the run of a killed one, which counts as in use there.
        os.environ.pop("WANDB_SERVICE", None)
        wandb.setup(settings=wandb.Settings(silent=True))
        if mode == "online" and not wandb.login(host=given.wandb_host, prompt=False):
            raise RuntimeError("there is no API key: set WANDB_API_KEY, `wandb login`, or give --wandb-mode offline")
        self.folder.mkdir(parents=True, exist_ok=True)
        # A command that was killed between handing an entry over and noting it may have left it here.
        earlier = (RunFile(path) for path in sorted(self.folder.glob(f"wandb/*run-*-{self.id}*/run-{self.id}.wandb")))
        self._arrived = {entry for file in earlier for entry in _entries(file)}
        try:
            run = wandb.init(
                project=given.wandb_project or os.environ.get("WANDB_PROJECT") or PROJECT,
                entity=given.wandb_team,
                group=given.wandb_group,
                id=self.id,
                name=self.store.run,
                dir=str(self.folder),
                mode=cast(Any, mode),
                resume="allow",
                settings=settings,
            )
        except BaseException:
            # Else the id counts as in use for as long as this process lives.
            _end_service()
            raise
        run.config.update(redacted(self.config.flat()), allow_val_change=True)
        run.define_metric("iteration", hidden=True)
        run.define_metric("*", step_metric="iteration")
        if run.resumed and (last := run.summary.get(ENTRY)):
            self._arrived.add(str(last))
        self._run, self._file = run, RunFile(Path(run.settings.sync_file))

    def send(self, entry: Entry) -> None:
        """Log an entry that wandb was not given before, as one row."""
        if entry.key in self._sent | self._arrived:
            return
        import wandb

        row: dict[str, Any] = dict(entry.metrics)
        pictures = [(each, open_frames(each.frames)) for each in entry.read_rows()[0]]
        images = [wandb.Image(picture, caption=_caption(each)) for each, picture in pictures if picture]
        if images:
            row[IMAGES] = images
        if not row:
            self._arrived.add(entry.key)
            return
        try:
            self._run.log({"iteration": entry.iteration, ENTRY: entry.key, **row})
        except BaseException:
            self._run = None
            _end_service()
            raise
        self._sent.add(entry.key)

    def arrived(self) -> Collection[str]:
        """The entries that lie on the disk: wandb's process writes every 15 s, and dies with a command that is killed."""
        if self._file is not None:
            self._arrived |= set(_entries(self._file))
        return self._arrived

    def close(self) -> None:
        """Wait until it is uploaded, up to a minute; the rest stays in wandb's folder for `wandb sync`."""
        run, self._run = self._run, None
        if run is None:
            return
        try:
            run.finish()
        except BaseException:
            _end_service()
            raise
        patience = time.monotonic() + _WRITE_SECONDS
        while not self._sent <= set(self.arrived()) and time.monotonic() < patience:
            time.sleep(0.05)


def _end_service() -> None:
    """End wandb's own process, or forget one that has died."""
    import wandb

    # It exits with the code of its process.
    with contextlib.suppress(Exception, SystemExit):
        wandb.teardown()


def _entries(file: RunFile) -> set[str]:
    # What cannot be read says nothing, and the entry is sent again.
    with contextlib.suppress(Exception):
        return {str(row[ENTRY]) for row in file.new_rows() if row.get(ENTRY)}
    return set()


def _caption(row: Any) -> str:
    return row.prompt if row.reward is None else f"{row.prompt} · reward {row.reward:.4g}"
