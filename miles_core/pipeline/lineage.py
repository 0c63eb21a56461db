"""An attempt, and what it was made from."""

from miles_core.errors import InputError, StageError
from miles_core.store.manifest import Manifest
from miles_core.store.run_store import RunStore
from miles_core.store.stages import ITERATION_STAGES, StageName


def attempt_of(store: RunStore, iteration: int, attempt: str) -> Manifest:
    """The committed attempt of an iteration, of any stage, that is called so or whose name alone begins so.

    Raises InputError where there is none, or more than one.
    """
    found: dict[str, Manifest] = {}
    for stage in ITERATION_STAGES:
        for manifest in (store.on_line(stage, iteration), *store.committed(stage, iteration)):
            if manifest and manifest.attempt.startswith(attempt):
                found[manifest.folder] = manifest
    exact = [manifest for manifest in found.values() if manifest.attempt == attempt]
    candidates = exact or list(found.values())
    where = f"`miles show {store.run} {iteration}` lists them"
    if not candidates or len(attempt) < 4:
        raise InputError(f"iteration {iteration} of run {store.run} has no committed attempt {attempt!r}: {where}")
    if len(candidates) > 1:
        raise InputError(f"{attempt} begins several attempts of iteration {iteration} of run {store.run}: {where}")
    return candidates[0]


def made_from(store: RunStore, attempt: Manifest) -> dict[StageName, Manifest]:
    """The attempt and all that it was made from in its own iteration, by stage.

    Raises StageError where one of these is gone or damaged.
    """
    found: dict[StageName, Manifest] = {}
    waiting = [attempt]
    while waiting:
        manifest = waiting.pop()
        found[manifest.stage] = manifest
        own = [u.stage for u in manifest.upstream.values() if u.iteration == attempt.iteration]
        waiting += [consumed_by(store, manifest, stage) for stage in own if stage not in found]
    return found


def consumed_by(store: RunStore, manifest: Manifest, name: str) -> Manifest:
    """What an attempt consumed under this name. Raises StageError where it is gone or damaged."""
    consumed = manifest.upstream[name]
    product = store.product(consumed)
    if product is None:
        where = f"{consumed.stage} of iteration {consumed.iteration}" if consumed.iteration >= 0 else "policy/init"
        raise StageError(
            f"run {store.run}: {where} (attempt {consumed.attempt}), which {manifest.stage} {manifest.attempt} was made "
            "from, is gone or damaged: `miles train` makes it again where it is on the line"
        )
    return product
