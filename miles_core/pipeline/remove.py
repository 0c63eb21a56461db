"""Remove a run and all that it holds, unless somebody works on it or stands on it."""

from collections.abc import Callable

from miles_core.errors import InputError
from miles_core.store.forks import drop_note, forks_of
from miles_core.store.line import standing
from miles_core.store.lock import RunLock, read_lock
from miles_core.store.run_store import RunStore

_LAST = ("run.json", "lock.json")


def refuse_removal(store: RunStore) -> None:
    """Raises InputError where a run must not be removed: forks stand on it, or a command trains it."""
    _refuse_forks(store)
    held = read_lock(store.files, store.run)
    if held and not held.released and held.holder.lives_here():
        raise InputError(f"run {store.run} is being trained: end that by `miles stop {store.run}` first")


def remove_run(store: RunStore, say: Callable[[str], None] = print) -> None:
    """Remove a run; its record goes last, so that a removal that was interrupted can be given again.

    Raises InputError as `refuse_removal` does; a holder on another machine is watched for as long as its lease.
    """
    refuse_removal(store)
    record = store.record() or {}
    lock = RunLock(store.files, store.run)
    lock.take(say, above=record.get("epoch") or 0)
    try:
        # One may have been made since.
        _refuse_forks(store)
        for name in store.files.list(store.run):
            if name not in _LAST:
                store.files.remove_tree(f"{store.run}/{name}")
        for holder in sorted({standing(named, store.run)[0] for named in record.get("line", {}).values()}):
            if holder != store.run:
                drop_note(store.files, holder, store.run)
        store.files.delete(f"{store.run}/run.json")
    finally:
        lock.release()
    store.files.remove_tree(store.run)


def _refuse_forks(store: RunStore) -> None:
    if forks := forks_of(store):
        raise InputError(
            f"run {store.run} holds what its forks {', '.join(sorted(forks))} begin with: remove these first, or keep it"
        )
