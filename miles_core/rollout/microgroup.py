"""A microgroup's two files: its rows, and its trajectories, which can be pruned alone. One stem, one order."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from miles_core.errors import StageError
from miles_core.store.digest import ROW_DIGEST, canonical_json
from miles_core.store.files import Files
from miles_core.store.parts import Part, read_table


@dataclass(frozen=True)
class Microgroup:
    """`data/<stem>.parquet`, a row a sample with everything but its trajectory, and `latents/<stem>.parquet`."""

    data: Part
    latents: Part

    @property
    def rows(self) -> int:
        return self.data.rows


def microgroups(data: Sequence[Part], latents: Sequence[Part]) -> list[Microgroup]:
    """Rows and trajectories of the same names, in the order of `data`. Raises StageError where a part stands alone."""
    named = {_name(part): part for part in latents}
    alone = [part.path for part in data if _name(part) not in named]
    if alone or len(named) != len(data):
        raise StageError(
            f"the rollout holds {len(data)} parts of rows and {len(latents)} of latents"
            + (f", and none of latents for {alone[0]}" if alone else "")
            + ": run the rollout again"
        )
    return [Microgroup(part, named[_name(part)]) for part in data]


def joined(files: Files, microgroup: Microgroup, columns: list[str]) -> pa.Table:
    """`columns` of the rows (sample_index and latents_digest among them), with latent_steps and latents, and the model's
    outputs where they were kept.

    Raises StageError where the latents are not those of these rows, PrunedError where they were pruned, DamagedError.
    """
    rows, latents = read_table(files, microgroup.data, columns), read_table(files, microgroup.latents)
    if mismatch := difference(rows, latents):
        raise StageError(
            f"{microgroup.latents.path} holds other latents than {microgroup.data.path} was written with: {mismatch}; "
            "run the rollout again"
        )
    for name in (n for n in ("latent_steps", "latents", "model_outputs") if n in latents.column_names):
        rows = rows.append_column(latents.schema.field(name), latents.column(name))
    return rows


def difference(rows: pa.Table, latents: pa.Table) -> str | None:
    """Why trajectories do not belong to rows, in words; None where they do, sample by sample, in order."""
    indices, others = (table.column("sample_index").to_pylist() for table in (rows, latents))
    if indices != others:
        return f"samples {others} beside {indices}"
    wanted, found = rows.column("latents_digest").to_pylist(), latents.column(ROW_DIGEST).to_pylist()
    wrong = [index for index, one, other in zip(indices, wanted, found, strict=True) if one != other]
    return f"the latents of sample {wrong[0]} have another digest" if wrong else None


def _name(part: Part) -> str:
    return part.path.rsplit("/", 1)[1]


def conditioning_id(prompt: str, negative_prompt: str | None, encoder_digest: str, dtype: str) -> str:
    """Name of a conditioning, known before it is computed: 16 hex digits."""
    return hashlib.sha256(canonical_json([prompt, negative_prompt, encoder_digest, dtype])).hexdigest()[:16]
