"""What was pruned from an attempt: `pruned.json`, written before the first file goes.

A file that it names and that is missing was deleted on purpose; one that it names and that is still there was left by a
pass that was interrupted. An attempt with a tombstone gets no new files.
"""

import json
import re
from dataclasses import asdict, dataclass

from miles_core.errors import StageError
from miles_core.store.digest import canonical_json
from miles_core.store.files import Files

TOMBSTONE = "pruned.json"
_PLACE = re.compile(r"(?P<run>[^/]+)/iteration=(?P<iteration>\d+)/stage=(?P<stage>\w+)/[^/]+")
_WAY = {"rollout": "generates them", "update": "makes it"}


class PrunedError(StageError):
    """What is to be read was pruned by the run's own rule; nothing is damaged."""


@dataclass(frozen=True)
class Tombstone:
    """what: folders of the attempt, e.g. latents. when: seconds since 1970. why: in words. option: the option that
    rules it, as it stood. parts: paths under the attempt. bytes: of all of them."""

    what: tuple[str, ...]
    when: float
    why: str
    option: str
    parts: tuple[str, ...]
    bytes: int


def write_tombstone(files: Files, folder: str, tombstone: Tombstone) -> bool:
    """False, and nothing changed, where the attempt has one."""
    return files.create(f"{folder}/{TOMBSTONE}", canonical_json(asdict(tombstone)))


def read_tombstone(files: Files, folder: str) -> Tombstone | None:
    """An attempt's tombstone; None where nothing was pruned, or what is there is no tombstone."""
    try:
        body = json.loads(files.read(f"{folder}/{TOMBSTONE}"))
        return Tombstone(**body | {"what": tuple(body["what"]), "parts": tuple(body["parts"])})
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def pruned_part(files: Files, path: str) -> PrunedError | None:
    """The error that says why a part is not there, if it was pruned."""
    if path.count("/") < 2:
        return None
    folder, top, name = path.rsplit("/", 2)
    tombstone = read_tombstone(files, folder)
    if tombstone is None or f"{top}/{name}" not in tombstone.parts:
        return None
    return pruned_error(folder, tombstone)


def pruned_error(folder: str, tombstone: Tombstone) -> PrunedError:
    """What was pruned from the attempt in `folder`, by which option, and how to have it again."""
    place = _PLACE.fullmatch(folder)
    if place is None:
        return PrunedError(f"{', '.join(tombstone.what)} of {folder} were pruned ({tombstone.option})")
    run, iteration, stage = place["run"], int(place["iteration"]), place["stage"]
    return PrunedError(
        f"run {run}: {', '.join(tombstone.what)} of {stage} of iteration {iteration} "
        f"{'was' if len(tombstone.what) == 1 else 'were'} pruned ({tombstone.option}): "
        f"`miles rerun {run} {iteration} {stage}` {_WAY[stage]} again"
    )
