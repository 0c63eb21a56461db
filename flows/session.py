"""What a computing command holds while it runs: configuration, inputs, store, workers."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from deployments.recipes import recipe as build_recipe
from miles_core.config import RunConfig
from miles_core.config.folders import code_path, home
from miles_core.config.overrides import from_mapping
from miles_core.errors import InputError
from miles_core.observe.history import History
from miles_core.observe.terminal import Terminal
from miles_core.pipeline.inputs import Inputs, resolve_eval_set
from miles_core.pipeline.log import RunLog, check_logging
from miles_core.pipeline.rerun import check_overrides
from miles_core.pipeline.run import Plan, actors_of, begin_run, inputs_of_run, line_lock, open_run, plan_run
from miles_core.pipeline.stage import Step
from miles_core.runtime.faults import arm
from miles_core.runtime.workers import Workers
from miles_core.store.files import prove_conditional_put
from miles_core.store.lock import RunLock
from miles_core.store.run_store import RunStore

TERMINAL = Terminal()


class Session:
    """One run in this process. Workers start when a stage first needs them and end with the session. `lock` is the
    run's where this command moves its line; `rewards` holds the mean of each iteration that it computed, `history` what the UI
    shows of all."""

    def __init__(
        self, config: RunConfig, inputs: Inputs, store: RunStore, workers: Workers, lock: RunLock | None
    ) -> None:
        self.config, self.inputs, self.store, self.workers, self.lock = config, inputs, store, workers, lock
        self.terminal = TERMINAL
        self.rewards: dict[int, float] = {}
        self.history = History(store)
        self.log = RunLog(config, store, self.terminal.say)

    def step(
        self, iteration: int, *, moves_line: bool = True, flow_run_id: str | None = None, force: bool = False
    ) -> Step:
        return Step(
            self.config,
            self.inputs,
            self.store,
            self.workers,
            iteration,
            moves_line=moves_line,
            flow_run_id=flow_run_id,
            progress=self.terminal.progress,
            fence=self.lock.check if self.lock else lambda: None,
            force=force,
        )


_OPEN: dict[tuple[str, str], Session] = {}


SAME = "same"


def plan(recipe: str, overrides: dict[str, Any], begun_by: str | None = None) -> Plan:
    """Recipe and changes to a checked plan; nothing is written. The recipe `same` is what the run named by run_id was
    begun with. Raises InputError."""
    changes = from_mapping(overrides)
    if recipe != SAME:
        config = build_recipe(recipe).replace(**changes)
        check_logging(config)
        return plan_run(config, recipe, begun_by)
    if not changes.get("run_id") or changes.get("new") in (True, "true"):
        raise InputError("the recipe `same` carries a run on: give its name by --run-id, and no --new")
    store, config = open_run(str(changes["run_id"]), changes.get("artifact_root"))
    changes["artifact_root"] = store.files.root
    config = config.replace(**changes)
    check_logging(config)
    return plan_run(config, str((store.record() or {})["recipe"]), begun_by)


@contextlib.contextmanager
def train_session(recipe: str, overrides: dict[str, Any], flow_run_id: str | None = None) -> Iterator[Session]:
    """The session of a train run; run.json is written here."""
    faults = arm()
    planned = plan(recipe, overrides, flow_run_id)
    with line_lock(planned.store, TERMINAL.say) as (store, lock):
        planned = replace(planned, store=store)
        begin_run(planned, planned.recipe, code_path(planned.config), flow_run_id)
        with _holding(planned.config, planned.inputs, store, lock, faults) as session:
            key = (store.files.root, store.run)
            _OPEN[key] = session
            try:
                yield session
            finally:
                del _OPEN[key]


@contextlib.contextmanager
def _holding(
    config: RunConfig, inputs: Inputs, store: RunStore, lock: RunLock, faults: dict[str, str]
) -> Iterator[Session]:
    """The session of a command that moves the line: its actors are the run's, and end with its lock."""
    name = actors_of(store)
    workers = Workers(
        config, inputs, home() / "state", TERMINAL.say, run=name, epoch=lock.epoch, faults=faults, fence=lock.check
    )

    def lost(why: str) -> None:
        print(f"miles: {why}", file=sys.stderr, flush=True)
        workers.abort()
        os.kill(os.getpid(), signal.SIGTERM)

    with workers:
        lock.keep(on_beat=workers.renew, on_lost=lost)
        try:
            session = Session(config, inputs, store, workers, lock)
            with session.log:
                yield session
        finally:
            lock.rest()


@contextlib.contextmanager
def run_session(
    run: str, root: str | None, overrides: dict[str, Any] | None = None, *, moves_line: bool
) -> Iterator[Session]:
    """A session of an existing run: the one that is open in this process, or one of its own.

    What does not move the line has always one of its own, with processes that no training uses, and nothing of it
    enters the run's record.
    """
    store, config = open_run(run, root)
    if moves_line:
        prove_conditional_put(store.files)
    shared = _OPEN.get((store.files.root, store.run))
    if shared and moves_line:
        yield shared
        return
    config = config.replace(**from_mapping(overrides or {}))
    inputs = inputs_of_run(store, config, overrides or {}, evaluation=moves_line)
    if moves_line:
        with line_lock(store, TERMINAL.say) as (held, lock), _holding(config, inputs, held, lock, arm()) as session:
            yield session
    else:
        with Workers(config, inputs, home() / "state", TERMINAL.say, faults=arm()) as workers:
            yield Session(config, inputs, store, workers, None)


def evaluation_plan(run: str, root: str | None, overrides: dict[str, Any]) -> tuple[RunStore, RunConfig, Inputs]:
    """What an evaluation of an existing run is made with: the run's own inputs, and the evaluation set that its options
    and these changes name. Raises InputError."""
    changes = from_mapping(overrides)
    check_overrides(changes, ("evaluation",))
    store, config = open_run(run, root)
    inputs = inputs_of_run(store, config, {})
    changed = config.replace(**changes)
    check_logging(changed)
    evaluated = resolve_eval_set(changed)
    if evaluated is None:
        raise InputError(f"run {run} names no evaluation set: give --eval-prompt-data NAME PATH")
    return store, changed, replace(inputs, evaluation=evaluated)


@contextlib.contextmanager
def evaluation_session(run: str, root: str | None, overrides: dict[str, Any]) -> Iterator[Session]:
    """The session of an evaluation beside the run: processes of its own, no lock, whoever trains the run."""
    store, config, inputs = evaluation_plan(run, root, overrides)
    with Workers(config, inputs, home() / "state", TERMINAL.say, faults=arm()) as workers:
        session = Session(config, inputs, store, workers, None)
        with session.log:
            yield session
