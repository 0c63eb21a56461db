"""What a person looks at: the images on a run's line with all that is known of each, read stage by stage."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from miles_core.store.files import Files
from miles_core.store.line import standing
from miles_core.store.manifest import Manifest
from miles_core.store.parts import Part, read_bytes, read_table
from miles_core.store.run_store import RunStore
from miles_core.store.stages import StageName

_READERS = 16
_PICTURES = ("image", "images", "frames")
# A row's own fields, and who did it.
_APART = {
    "sample_index",
    "group_index",
    "prompt",
    "seed",
    "reward",
    "raw_reward",
    "advantage",
    "worker",
    "engine",
    "tries",
}
Line = dict[int, Manifest]


@dataclass(frozen=True)
class Row:
    """A sample on the line. `frames`: its encoded pictures, one for an image, several for a video, none where the
    engine gave none; `figures`: every further number and word of rollout, rewards and advantages by column name, and
    `engine_seconds` of the request and `scoring_seconds` of the sample for their columns `seconds`."""

    iteration: int
    sample_index: int
    group_index: int
    prompt: str
    seed: int
    frames: tuple[bytes, ...] = ()
    reward: float | None = None
    advantage: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """What rewards and advantages say of a sample; None before they are made."""

    reward: float | None
    advantage: float | None
    figures: Mapping[str, Any]


def on_line(store: RunStore, stage: StageName, iterations: Collection[int] | None = None) -> Line:
    """The committed manifests of a stage on the run's line by iteration, ascending; run.json is read once."""
    slots = ((*slot.partition("/"), attempt) for slot, attempt in (store.record() or {}).get("line", {}).items())
    named = sorted((int(number), attempt) for number, _, name, attempt in slots if name == stage)
    wanted = [(i, attempt) for i, attempt in named if iterations is None or i in iterations]
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(lambda place: _standing(store, stage, *place), wanted)
        return {i: manifest for (i, _), manifest in zip(wanted, found, strict=True) if manifest}


def _standing(store: RunStore, stage: StageName, iteration: int, entry: str) -> Manifest | None:
    holder, attempt = standing(entry, store.run)
    return store.of(holder).manifest(stage, iteration, attempt)


def read_scores(files: Files, rewards: Manifest | None, advantages: Manifest | None) -> dict[int, Score]:
    """Reward, advantage and all figures beside them by sample index. Raises DamagedError."""
    scored = _by_sample(files, rewards)
    normalized = _by_sample(files, advantages)
    return {
        index: Score(
            _finite(scored.get(index, {}).get("reward")),
            _finite(normalized.get(index, {}).get("advantage")),
            _figures(scored.get(index, {}), seconds="scoring_seconds") | _figures(normalized.get(index, {})),
        )
        for index in scored.keys() | normalized.keys()
    }


def read_groups(files: Files, prompts: Manifest) -> dict[int, int]:
    """The group of each sample by sample index, from the prompts of an iteration. Raises DamagedError."""
    tables = [read_table(files, part, ["sample_index", "group_index"]) for part in prompts.data]
    return {row["sample_index"]: row["group_index"] for row in pa.concat_tables(tables).to_pylist()}


def parts_with(manifest: Manifest, indices: Sequence[int], wanted: Collection[int]) -> list[Part]:
    """The parts that hold a sample of `wanted`; `indices` are all of the stage's samples, ascending, as its parts are."""
    found, first = [], 0
    for part in manifest.data:
        if any(index in wanted for index in indices[first : first + part.rows]):
            found.append(part)
        first += part.rows
    return found


def read_part(
    files: Files, iteration: int, part: Part, scores: Mapping[int, Score], wanted: Collection[int] | None = None
) -> Iterator[Row]:
    """The samples of one rollout part, pictures included; of those in `wanted` alone where given. Raises DamagedError."""
    reader = pq.ParquetFile(pa.BufferReader(read_bytes(files, part)))
    table = reader.read(columns=_worth_showing(reader.schema_arrow))
    if wanted is not None:
        table = table.filter(pa.array([i in wanted for i in table.column("sample_index").to_pylist()]))
    for values in table.to_pylist():
        index = values["sample_index"]
        score = scores.get(index, Score(None, None, {}))
        yield Row(
            iteration=iteration,
            sample_index=index,
            group_index=values["group_index"],
            prompt=values["prompt"],
            seed=values["seed"],
            frames=_frames(values),
            reward=score.reward,
            advantage=score.advantage,
            figures=dict(score.figures) | _figures(values, seconds="engine_seconds"),
        )


def spread_order(count: int) -> list[int]:
    """The positions 0 … count - 1 such that any first n of them are spread: both ends, the middle, then the middle of
    the widest gap that is left."""
    if count <= 2:
        return list(range(count))
    order, gaps = [0, count - 1], [(0, count - 1)]
    while gaps:
        gaps.sort(key=lambda gap: (gap[0] - gap[1], gap[0]))
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order


def ranked(indices: Sequence[int], scores: Mapping[int, Score]) -> list[int]:
    """Sample indices from the best reward to the worst; those without one last, in their own order."""

    def key(index: int) -> tuple[float, int]:
        reward = scores[index].reward if index in scores else None
        return (math.inf if reward is None else -reward, index)

    return sorted(indices, key=key)


def _by_sample(files: Files, manifest: Manifest | None) -> dict[int, dict[str, Any]]:
    if manifest is None:
        return {}
    return {row["sample_index"]: row for part in manifest.data for row in read_table(files, part).to_pylist()}


def _worth_showing(schema: pa.Schema) -> list[str]:
    pictures = {field.name for field in schema if field.name in _PICTURES}
    return [f.name for f in schema if f.name in pictures or not (pa.types.is_nested(f.type) or _hidden(f.name))]


def _hidden(name: str) -> bool:
    return name.endswith("_digest") or name == "conditioning_id"


def _figures(row: Mapping[str, Any], seconds: str = "seconds") -> dict[str, Any]:
    """Rollout and rewards have a column `seconds` each: it goes by another name."""
    return {
        (seconds if name == "seconds" else name): _finite(value) if isinstance(value, float) else value
        for name, value in row.items()
        if name not in _APART and not _hidden(name) and isinstance(value, bool | int | float | str)
    }


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _frames(row: Mapping[str, Any]) -> tuple[bytes, ...]:
    value = next((row[name] for name in _PICTURES if row.get(name) is not None), None)
    pictures = value if isinstance(value, list) else [value]
    held = (p["bytes"] if isinstance(p, dict) else p for p in pictures)
    return tuple(data for data in held if isinstance(data, bytes))
