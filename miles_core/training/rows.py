"""Rows of rollout and advantages as a trainer rank reads them: its own samples, and no image."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.rollout.microgroup import Microgroup, joined
from miles_core.store.digest import ROW_DIGEST
from miles_core.store.files import Files
from miles_core.store.parts import Part, read_table

_DYNAMICS = ("policy_digest", "noise_level", "sde_type", "guidance_scale")
_SAMPLE = (
    "sample_index",
    "group_index",
    "prompt",
    "negative_prompt",
    "conditioning_id",
    "seed",
    "sigmas",
    "timesteps",
    "sde_step_indices",
    "log_probs",
    "latents_digest",
)


@dataclass(frozen=True)
class AdvantageRow:
    """What training needs of one row of advantages."""

    sample_index: int
    advantage: float
    raw_reward: float
    remove_sample: bool


@dataclass(frozen=True)
class Dynamics:
    """How the rollout was made, the same for all its rows: what the rows say, not what the configuration now says."""

    policy_digest: str
    noise_level: float
    sde_type: str
    guidance_scale: float
    num_steps: int


@dataclass(frozen=True)
class RolloutIndex:
    """Which microgroup holds each sample."""

    part_of: dict[int, Microgroup]
    dynamics: set[Dynamics]


def read_advantages(files: Files, parts: Sequence[Part]) -> list[AdvantageRow]:
    """The kept rows in sample_index order. Raises StageError where a sample comes twice."""
    columns = ["sample_index", "advantage", "raw_reward", "kept", "remove_sample"]
    rows = [
        AdvantageRow(row["sample_index"], row["advantage"], row["raw_reward"], row["remove_sample"])
        for part in parts
        for row in read_table(files, part, columns).to_pylist()
        if row["kept"]
    ]
    rows.sort(key=lambda row: row.sample_index)
    for before, after in pairwise(rows):
        if before.sample_index == after.sample_index:
            raise StageError(f"the advantages hold sample {after.sample_index} twice")
    return rows


def read_pairs(files: Files, parts: Sequence[Part]) -> dict[str, list[Any]] | None:
    """Train pairs as advantages committed them, columns by name; None where there are none of a user's own."""
    if not parts:
        return None
    table = pa.concat_tables([read_table(files, part) for part in parts])
    columns: dict[str, list[Any]] = table.drop_columns([ROW_DIGEST]).to_pydict()
    return columns


def of_samples(pairs: Mapping[str, Sequence[Any]], samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """The pairs of these samples, with their positions among them."""
    position = {sample.index: place for place, sample in enumerate(samples)}
    chosen = [row for row, index in enumerate(pairs["sample_index"]) if index in position]
    found = {name: [values[row] for row in chosen] for name, values in pairs.items()}
    return found | {"sample": [position[index] for index in found["sample_index"]]}


def index_rollout(files: Files, parts: Sequence[Microgroup]) -> RolloutIndex:
    """Sample numbers and dynamics of these microgroups. Raises DamagedError."""
    part_of: dict[int, Microgroup] = {}
    dynamics: set[Dynamics] = set()
    for part in parts:
        table = read_table(files, part.data, ["sample_index", "timesteps", *_DYNAMICS])
        steps = table.schema.field("timesteps").type.list_size
        for row in table.drop_columns(["timesteps"]).to_pylist():
            index = row.pop("sample_index")
            if index in part_of:
                raise StageError(f"the rollout holds sample {index} twice")
            part_of[index] = part
            dynamics.add(Dynamics(num_steps=steps, **row))
    return RolloutIndex(part_of, dynamics)


def merge(indices: Sequence[RolloutIndex]) -> tuple[dict[int, Microgroup], Dynamics]:
    """One index of all ranks'. Raises StageError where a sample comes twice or rows were made in different ways."""
    part_of: dict[int, Microgroup] = {}
    for index in indices:
        twice = part_of.keys() & index.part_of.keys()
        if twice:
            raise StageError(f"the rollout holds sample {min(twice)} twice")
        part_of |= index.part_of
    dynamics = set().union(*(index.dynamics for index in indices))
    if len(dynamics) != 1:
        raise StageError(
            f"one update trains on rows of one kind and the rollout holds {len(dynamics)}: {sorted(map(str, dynamics))}"
        )
    return part_of, dynamics.pop()


def read_samples(files: Files, part_of: Mapping[int, Microgroup], rows: Sequence[AdvantageRow]) -> list[Sample]:
    """The samples of `rows`, in their order, with trajectories. Raises StageError for one without a rollout row, or
    whose trajectory is another's, PrunedError where the latents were pruned."""
    absent = [row.sample_index for row in rows if row.sample_index not in part_of]
    if absent:
        raise StageError(f"sample {absent[0]} has an advantage and no rollout row")
    wanted = {row.sample_index: row for row in rows}
    found: dict[int, Sample] = {}
    for part in {part_of[index].data.path: part_of[index] for index in wanted}.values():
        table = joined(files, part, list(_SAMPLE))
        table = table.filter(pc.is_in(table["sample_index"], pa.array(wanted, pa.int64())))
        for sample in _samples(table):
            row = wanted[sample.index]
            sample.reward, sample.remove_sample = row.raw_reward, row.remove_sample
            found[sample.index] = sample
    return [found[row.sample_index] for row in rows]


def _samples(table: pa.Table) -> list[Sample]:
    latents = _tensors(table, "latents")
    sigmas, timesteps, log_probs = (_tensors(table, name) for name in ("sigmas", "timesteps", "log_probs"))
    outputs = _tensors(table, "model_outputs") if "model_outputs" in table.column_names else None
    tensors = {"latents", "sigmas", "timesteps", "log_probs", "model_outputs"}
    plain = table.drop_columns([name for name in table.column_names if name in tensors]).to_pylist()
    return [
        Sample(
            group_index=row["group_index"],
            index=row["sample_index"],
            prompt=row["prompt"],
            negative_prompt=row["negative_prompt"],
            seed=row["seed"],
            latents=latents[i],
            latent_steps=row["latent_steps"],
            sigmas=sigmas[i],
            timesteps=timesteps[i],
            log_probs=log_probs[i],
            sde_step_indices=row["sde_step_indices"],
            conditioning_id=row["conditioning_id"],
            model_outputs=None if outputs is None else outputs[i],
        )
        for i, row in enumerate(plain)
    ]


def _tensors(table: pa.Table, name: str) -> torch.Tensor:
    """A fixed-size list column as (rows, *shape of the field's metadata)."""
    field = table.schema.field(name)
    shape: list[Any] = json.loads((field.metadata or {})[b"shape"])
    array = table.column(name).combine_chunks()
    values = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    flat = torch.from_numpy(values.flatten().to_numpy(zero_copy_only=False).copy())
    return flat.reshape(table.num_rows, *shape)
