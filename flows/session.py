"""What a computing command holds while it runs: configuration, inputs, store, workers."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from deployments.recipes import recipe as build_recipe
from miles_core.config import RunConfig
from miles_core.config.folders import home
from miles_core.config.overrides import from_mapping
from miles_core.observe.terminal import Terminal
from miles_core.pipeline.inputs import Inputs
from miles_core.pipeline.run import Plan, begin_run, inputs_of_run, line_lock, open_run, plan_run
from miles_core.pipeline.stage import Step
from miles_core.runtime.workers import Workers
from miles_core.store.run_store import RunStore

TERMINAL = Terminal()


class Session:
    """One run in this process. Workers start when a stage first needs them and end with the session."""

    def __init__(self, config: RunConfig, inputs: Inputs, store: RunStore, workers: Workers) -> None:
        self.config, self.inputs, self.store, self.workers = config, inputs, store, workers
        self.terminal = TERMINAL

    def step(self, iteration: int, *, moves_line: bool = True, flow_run_id: str | None = None) -> Step:
        return Step(
            self.config,
            self.inputs,
            self.store,
            self.workers,
            iteration,
            moves_line=moves_line,
            flow_run_id=flow_run_id,
            progress=self.terminal.progress,
        )


_OPEN: dict[tuple[str, str], Session] = {}


def plan(recipe: str, overrides: dict[str, Any]) -> Plan:
    """Recipe and changes to a checked plan; nothing is written. Raises InputError."""
    return plan_run(build_recipe(recipe).replace(**from_mapping(overrides)), recipe)


@contextlib.contextmanager
def train_session(recipe: str, overrides: dict[str, Any]) -> Iterator[Session]:
    """The session of a train run; run.json is written here."""
    planned = plan(recipe, overrides)
    with line_lock(planned.store):
        yield from _train(planned, recipe)


def _train(planned: Plan, recipe: str) -> Iterator[Session]:
    begin_run(planned, recipe, planned.config.run.code_path or os.getcwd())
    with Workers(planned.config, planned.inputs, home() / "state", TERMINAL.say) as workers:
        session = Session(planned.config, planned.inputs, planned.store, workers)
        key = (planned.store.files.root, planned.store.run)
        _OPEN[key] = session
        try:
            yield session
        finally:
            del _OPEN[key]


@contextlib.contextmanager
def run_session(
    run: str, root: str | None, overrides: dict[str, Any] | None = None, *, moves_line: bool
) -> Iterator[Session]:
    """A session of an existing run: the one that is open in this process, or one of its own.

    With overrides it is always one of its own, and nothing of it enters the run's record.
    """
    store, config = open_run(run, root)
    shared = _OPEN.get((store.files.root, run))
    if shared and not overrides:
        yield shared
        return
    with line_lock(store) if moves_line else contextlib.nullcontext():
        yield from _own(store, config.replace(**from_mapping(overrides or {})), overrides or {})


def _own(store: RunStore, config: RunConfig, overrides: dict[str, Any]) -> Iterator[Session]:
    inputs = inputs_of_run(store, config, overrides)
    with Workers(config, inputs, home() / "state", TERMINAL.say) as workers:
        yield Session(config, inputs, store, workers)
