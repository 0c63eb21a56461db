"""miles stop RUN: end the command that trains a run, and what killed ones left of it."""

import os
import signal
import time

import typer

from miles_core.config.folders import home
from miles_core.pipeline.run import actors_of, open_run
from miles_core.runtime.cluster import end_named_actors
from miles_core.runtime.heads import end_left_heads
from miles_core.store.lock import Held, read_lock, request_stop
from miles_core.store.run_store import RunStore

_PATIENCE_SECONDS = 120


def stop(
    run: str = typer.Argument(help="Name of the run."),
    artifact_root: str | None = typer.Option(None, help="Folder of all runs."),
) -> int:
    """End the command that trains the run, wherever it runs, and its processes. What was committed stays; the same
    `miles train` resumes."""
    store, _ = open_run(run, artifact_root)
    held = read_lock(store.files, run)
    ended = False
    if held and not held.released and held.holder.lives_here() is not False:
        ended = _end(store, held)
        if not ended:
            print(f"process {held.holder.pid} on {held.holder.host} has not given the run back yet: try again later")
            return 1
    now = read_lock(store.files, run)
    free = now is None or now.released or now.epoch == (held.epoch if held else 0)
    actors = end_named_actors(actors_of(store)) if os.environ.get("RAY_ADDRESS") and free else 0
    heads = end_left_heads(home() / "state", actors_of(store))
    left = f"{heads} left Ray heads and {actors} left actors ended"
    print(f"run {run}: {'its command ended' if ended else 'no command was training it'}, {left}")
    return 0


def _end(store: RunStore, held: Held) -> bool:
    """Ask the holder to end and wait for it: whether it gave the run back, or is gone."""
    request_stop(store.files, store.run, held.epoch)
    if held.holder.lives_here():
        os.kill(held.holder.pid, signal.SIGTERM)
    deadline, beat, since = time.monotonic() + _PATIENCE_SECONDS, held.beat, time.monotonic()
    while time.monotonic() < deadline:
        now = read_lock(store.files, store.run)
        if now is None or now.released or now.epoch != held.epoch or now.holder.lives_here() is False:
            return True
        if now.beat != beat:
            beat, since = now.beat, time.monotonic()
        elif now.holder.lives_here() is None and time.monotonic() - since > now.lease_seconds:
            return True
        time.sleep(0.2)
    return False
