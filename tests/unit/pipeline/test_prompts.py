"""The prompts stage over iterations: each goes on where the one before left the data source, whoever makes it."""

from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest

from deployments.recipes import recipe
from miles_core.config import RunConfig
from miles_core.data.data_source import RolloutDataSourceWithBuffer
from miles_core.pipeline import prompts
from miles_core.pipeline.inputs import resolve_inputs
from miles_core.pipeline.stage import Step, run_stage
from miles_core.pipeline.upstream import previous_prompts
from miles_core.runtime.workers import Workers
from miles_core.store.files import Files
from miles_core.store.manifest import Manifest
from miles_core.store.parts import read_table
from miles_core.store.run_store import RunStore

PROMPTS, BATCH, ITERATIONS = 7, 3, 9


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    (tmp_path / "p.txt").write_text("".join(f"prompt {i}\n" for i in range(PROMPTS)))
    return recipe("tiny").replace(
        hf_checkpoint=str(folder), prompt_data=str(tmp_path / "p.txt"), rollout_batch_size=BATCH, n_samples_per_prompt=4
    )


def draw(config: RunConfig, root: Path, iteration: int) -> Manifest:
    """One iteration's prompts as a command of its own makes them: nothing is left from the one before but the store."""
    store = RunStore(Files(str(root)), "r")
    store.create_record({"recipe": "tiny", "config": {}, "meaning": {}})
    step = Step(config, resolve_inputs(config), store, cast(Workers, None), iteration)
    return run_stage(step, "prompts", previous_prompts(step), prompts.draw).manifest


def rows(manifest: Manifest, root: Path) -> list[dict]:
    return pa.concat_tables([read_table(Files(str(root)), p) for p in manifest.data]).to_pylist()


def test_every_iteration_resumes_the_stream_where_the_last_one_left_it(config: RunConfig, tmp_path: Path) -> None:
    """Not from its start, at the first resume or the eighth; no epoch begins with the batch of the one before
    (pitfalls 20, 46)."""
    found = [rows(draw(config, tmp_path / "runs", i), tmp_path / "runs") for i in range(ITERATIONS)]
    source = RolloutDataSourceWithBuffer(config.args())
    for batch in found:
        expected = [sample for group in source.get_samples(BATCH) for sample in group]
        assert [(r["sample_index"], r["seed"], r["prompt"]) for r in batch] == [
            (s.index, s.seed, s.prompt) for s in expected
        ]
    visits = [(r["epoch"], r["prompt_index"]) for batch in found for r in batch[::4]]
    assert len(set(visits)) == len(visits) == BATCH * ITERATIONS
    orders = [tuple(p for e, p in visits if e == epoch) for epoch in range(BATCH * ITERATIONS // PROMPTS)]
    assert len(set(orders)) == len(orders) == 3
    assert tuple(range(PROMPTS)) not in orders


def test_prompts_made_again_are_the_same_and_so_are_those_after(config: RunConfig, tmp_path: Path) -> None:
    """A lost stage in the middle of the stream changes nothing behind it (pitfall 46)."""
    root = tmp_path / "runs"
    before = [draw(config, root, i) for i in range(4)]
    for part in before[1].parts:
        (root / part.path).unlink()
    again = [draw(config, root, i) for i in range(4)]
    assert again[1].attempt == f"{before[1].attempt}.2"
    assert [m.content_digest for m in again] == [m.content_digest for m in before]
    assert [again[i] for i in (0, 2, 3)] == [before[i] for i in (0, 2, 3)]
