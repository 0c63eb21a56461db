"""What a rollout keeps of an earlier try: microgroups whose rows, latents and conditioning are all there."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from deployments.recipes import recipe
from miles_core.data.sample import Sample
from miles_core.pipeline.inputs import Inputs
from miles_core.pipeline.rollout import _existing, _kept, _kept_conditioning, _new_name
from miles_core.pipeline.stage import Step
from miles_core.rollout.microgroup import Microgroup
from miles_core.runtime.workers import Workers
from miles_core.store.digest import with_row_digests
from miles_core.store.files import Files
from miles_core.store.parts import write_table
from miles_core.store.run_store import Attempt, RunStore
from miles_core.store.schemas import CONDITIONING, latents_schema, rollout_schema

INPUTS = Inputs(Path(), "base", "sd3", Path(), "prompts", (), ("jpeg_compressibility",), None, None)
SIZE = 2


@pytest.fixture
def step(tmp_path: Path) -> Step:
    return Step(recipe("tiny"), INPUTS, RunStore(Files(str(tmp_path)), "r"), cast(Workers, None), 0)


@pytest.fixture
def attempt(step: Step) -> Attempt:
    """An unfinished attempt with the conditioning of its samples."""
    made = step.store.open_attempt("rollout", 0, "f" * 64, {}, resumable=True)
    row = {"conditioning_id": "c", "prompt": "p", "negative_prompt": None, "name": "n", "dtype": "uint8", "shape": [1]}
    table = pa.Table.from_pylist([row | {"data": b"1", "row_digest": ""}], schema=CONDITIONING)
    write_table(step.store.files, made.path("conditioning/c.parquet"), table)
    return made


def latents(step: Step, attempt: Attempt, name: str, first: int = 0, value: float = 1.0) -> list[str]:
    """Write the trajectories of SIZE samples; their row digests."""
    schema = latents_schema(latent_shape=(1, 2, 2), positions=2, latent_dtype=pa.float32())
    rows = [
        {"sample_index": i, "latent_steps": [0, 1], "latents": [value] * 8, "row_digest": ""}
        for i in range(first, first + SIZE)
    ]
    table = with_row_digests(pa.Table.from_pylist(rows, schema=schema))
    write_table(step.store.files, attempt.path(f"latents/{name}"), table)
    return table.column("row_digest").to_pylist()


def data(step: Step, attempt: Attempt, name: str, digests: list[str], first: int = 0) -> None:
    """Write the rows that belong to trajectories of these digests."""
    values = {
        "prompt": "p",
        "negative_prompt": None,
        "conditioning_id": "c",
        "request_seed": 0,
        "num_outputs": SIZE,
        "image": {"bytes": b"", "path": None},
        "height": 16,
        "width": 16,
        "guidance_scale": 1.0,
        "noise_level": 0.7,
        "sde_type": "sde",
        "sigmas": [1.0, 0.5, 0.0],
        "timesteps": [1000.0, 500.0],
        "sde_step_indices": [0],
        "log_probs": [-1.0, 0.0],
        "policy_digest": "p",
        "policy_version": -1,
        "engine": "e",
        "started_at": 0,
        "seconds": 0.1,
        "row_digest": "",
    }
    rows = [
        values | {"sample_index": first + i, "group_index": 0, "seed": first + i, "latents_digest": digest}
        for i, digest in enumerate(digests)
    ]
    table = pa.Table.from_pylist(rows, schema=rollout_schema(sde_steps=1, steps=2))
    write_table(step.store.files, attempt.path(f"data/{name}"), table)


def kept(step: Step, attempt: Attempt) -> dict[int, Microgroup]:
    groups = [[Sample(group_index=0, index=i, prompt="p", seed=i) for i in range(4)]]
    return _kept(step, attempt, _existing(step, attempt), groups, SIZE, _kept_conditioning(step, attempt))


def test_a_whole_microgroup_is_kept(step: Step, attempt: Attempt) -> None:
    data(step, attempt, "00000001-1.parquet", latents(step, attempt, "00000001-1.parquet", 2), 2)
    found = kept(step, attempt)
    assert list(found) == [1]
    assert (found[1].rows, found[1].latents.rows) == (2, 2)


def test_a_parser_killed_between_latents_and_rows_leaves_nothing_that_counts(step: Step, attempt: Attempt) -> None:
    """And the name that its latents have taken is not given again."""
    digests = latents(step, attempt, "00000000-1.parquet")
    assert kept(step, attempt) == {}
    existing = _existing(step, attempt)
    assert _new_name(0, existing) == "00000000-2.parquet"
    data(step, attempt, "00000000-1.parquet", digests)
    assert list(kept(step, attempt)) == [0]


def test_rows_without_their_latents_do_not_count(step: Step, attempt: Attempt, tmp_path: Path) -> None:
    data(step, attempt, "00000000-1.parquet", latents(step, attempt, "00000000-1.parquet"))
    assert list(kept(step, attempt)) == [0]
    path = tmp_path / attempt.path("latents/00000000-1.parquet")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert kept(step, attempt) == {}
    path.unlink()
    assert kept(step, attempt) == {}
    path.write_bytes(whole)
    assert list(kept(step, attempt)) == [0]


@pytest.mark.parametrize("change", [{"prompt": "another"}, {"seed": 7}, {"index": 4}])
def test_rows_of_other_samples_under_the_same_number_do_not_count(
    step: Step, attempt: Attempt, change: dict[str, Any]
) -> None:
    """A data source that does not draw the same again costs a microgroup, and trains on none that was not drawn."""
    data(step, attempt, "00000000-1.parquet", latents(step, attempt, "00000000-1.parquet"))
    samples = [Sample(group_index=0, index=i, prompt="p", seed=i) for i in range(2)]
    found = _existing(step, attempt), [samples], SIZE, _kept_conditioning(step, attempt)
    assert list(_kept(step, attempt, *found)) == [0]
    samples[1] = replace(samples[1], **change)
    assert _kept(step, attempt, *found) == {}


@pytest.mark.parametrize(("first", "value"), [(2, 1.0), (0, 2.0)])
def test_rows_beside_latents_of_others_do_not_count(step: Step, attempt: Attempt, first: int, value: float) -> None:
    own = latents(step, attempt, "00000000-1.parquet")
    latents(step, attempt, "00000000-2.parquet", first, value)
    data(step, attempt, "00000000-2.parquet", own)
    assert kept(step, attempt) == {}
    data(step, attempt, "00000000-1.parquet", own)
    assert list(kept(step, attempt)) == [0]
