"""The Ray cluster of a command: RAY_ADDRESS, or a head of its own on loopback."""

import contextlib
import logging
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from miles_core.errors import InputError, StageError
from miles_core.runtime.heads import Head, adopt_head, end_head, end_left_heads, leave_head, start_head


@contextlib.contextmanager
def ray_cluster(
    state: Path, *, run: str = "", namespace: str | None = None, keep: bool = False, idle_seconds: float = 1800.0
) -> Iterator[Callable[[], bool]]:
    """Join RAY_ADDRESS, or the head that a killed command of the same `run` left, or start one. Gives a function that
    says whether the head, where it is an own one, is still kept.

    An own head is ended at the end unless `keep` says to leave it to the next command; a keeper ends one that nobody
    has used for `idle_seconds`. Raises InputError where RAY_ADDRESS does not answer.
    """
    address = os.environ.get("RAY_ADDRESS")
    head: Head | None = None
    with contextlib.ExitStack() as stack:
        if address:
            _connect(address, namespace, own=False)
        else:
            note, head = _own_head(state, run, idle_seconds, namespace)
            stack.callback(lambda: leave_head(note) if keep and run else end_head(note))
        import ray

        stack.callback(ray.shutdown)
        yield lambda: head is None or head.kept


def _own_head(state: Path, run: str, idle_seconds: float, namespace: str | None) -> tuple[Path, Head]:
    """A connected head: one that was left, where it answers, else a new one."""
    end_left_heads(state, unkept_only=True)
    left = adopt_head(state, run) if run else None
    if left:
        note, head = left
        try:
            _use_token(head.token)
            _connect(head.address, namespace, own=True)
            return note, head
        except StageError:
            end_head(note)
    token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(16)
    _use_token(token)
    note, head = start_head(state, token, run, idle_seconds)
    try:
        _connect(head.address, namespace, own=True)
    except BaseException:
        end_head(note)
        raise
    return note, head


def _use_token(token: str) -> None:
    kept = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    changed = any(os.environ.get(name) != value for name, value in kept.items())
    os.environ.update(kept)
    if changed and "ray" in sys.modules:
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        # Ray reads them once; a process may have joined another cluster before.
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


def _connect(address: str, namespace: str | None, *, own: bool) -> None:
    # A call after the end must fail, not start or seek a cluster.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    import ray

    # Workers start in the thread of the task that first needs them; Ray warns about that on the terminal.
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        with _own_sigterm():
            ray.init(
                address=address,
                namespace=namespace,
                log_to_driver=False,
                logging_level="error",
                configure_logging=False,
            )
    except (ConnectionError, ValueError, RuntimeError) as fault:
        if own:
            raise StageError(f"the Ray head at {address} does not answer: {fault}") from fault
        raise InputError(
            f"no Ray cluster answers at RAY_ADDRESS {address}: start one there, or unset RAY_ADDRESS"
        ) from fault


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's own SIGTERM handler over a connection: Ray sets one that exits in the middle of it, which aborts.
    A signal that comes meanwhile is handled at the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    import ray._private.utils as of_ray

    came: list[int] = []
    own, set_by_ray = signal.signal(signal.SIGTERM, lambda number, _: came.append(number)), of_ray.set_sigterm_handler
    of_ray.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        of_ray.set_sigterm_handler = set_by_ray
        signal.signal(signal.SIGTERM, own or signal.SIG_DFL)
        if came:
            os.kill(os.getpid(), signal.SIGTERM)


def end_named_actors(namespace: str) -> int:
    """End what commands left on the cluster at RAY_ADDRESS under this name; returns how many actors."""
    _connect(os.environ["RAY_ADDRESS"], namespace, own=False)
    import ray

    try:
        names = ray.util.list_named_actors()
        for name in names:
            # It may have ended since it was listed.
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(name))
        return len(names)
    finally:
        ray.shutdown()
