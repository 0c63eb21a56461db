"""What a run reads enters by what it holds, and a run goes on with what it began with."""

import shutil
from pathlib import Path
from typing import cast

import pytest

from deployments.recipes import recipe
from miles_core.config import RunConfig
from miles_core.errors import InputError, StageError
from miles_core.pipeline import prompts
from miles_core.pipeline.inputs import Inputs, resolve_inputs
from miles_core.pipeline.rerun import check_overrides
from miles_core.pipeline.run import inputs_of_run, meaning_of
from miles_core.pipeline.stage import Step, run_stage, stage_fingerprint
from miles_core.runtime.workers import Workers
from miles_core.store.files import Files
from miles_core.store.run_store import RunStore


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that counts as a checkpoint; no stage of this module loads it."""
    folder = tmp_path / "model"
    (folder / "transformer").mkdir(parents=True)
    (folder / "model_index.json").write_text(
        '{"_class_name": "StableDiffusion3Pipeline", "transformer": ["diffusers", "SD3Transformer2DModel"]}'
    )
    (folder / "transformer" / "w.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def config(tmp_path: Path, model: Path) -> RunConfig:
    (tmp_path / "p.txt").write_text("a red cat\na blue dog\na green pig\na grey cow\n")
    return recipe("tiny").replace(prompt_data=str(tmp_path / "p.txt"), hf_checkpoint=str(model))


def step(config: RunConfig, inputs: Inputs, tmp_path: Path, iteration: int = 0) -> Step:
    store = RunStore(Files(str(tmp_path / "runs")), "r")
    return Step(config, inputs, store, cast(Workers, None), iteration, moves_line=False)


def test_prompts_edited_while_a_run_goes_on_stop_it(config: RunConfig, tmp_path: Path) -> None:
    inputs = resolve_inputs(config)
    run_stage(step(config, inputs, tmp_path), "prompts", {}, prompts.draw)
    (tmp_path / "p.txt").write_text("a red cat\na blue dog\na green pig\na GREY COW\n")
    other = config.replace(rollout_seed=7)
    with pytest.raises(StageError, match="changed while the run went on"):
        run_stage(step(other, inputs, tmp_path), "prompts", {}, prompts.draw)


def test_the_same_bytes_read_another_way_are_other_prompts(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"input": "a red cat"}\n')
    shutil.copy(tmp_path / "q.jsonl", tmp_path / "q.txt")
    found = [resolve_inputs(config.replace(prompt_data=str(tmp_path / n))).prompts_digest for n in ("q.jsonl", "q.txt")]
    assert found[0] != found[1]


def test_a_moved_file_means_the_same(config: RunConfig, tmp_path: Path) -> None:
    before = meaning_of(config, resolve_inputs(config))
    shutil.move(tmp_path / "p.txt", tmp_path / "elsewhere.txt")
    shutil.move(tmp_path / "model", tmp_path / "other-name")
    moved = config.replace(prompt_data=str(tmp_path / "elsewhere.txt"), hf_checkpoint=str(tmp_path / "other-name"))
    assert meaning_of(moved, resolve_inputs(moved)) == before


@pytest.mark.parametrize("stage", ["policy", "rollout", "update"])
def test_another_base_model_is_another_fingerprint(config: RunConfig, model: Path, tmp_path: Path, stage: str) -> None:
    first = resolve_inputs(config)
    (model / "transformer" / "w.safetensors").write_bytes(b"other weights")
    second = resolve_inputs(config)
    found = [stage_fingerprint(step(config, i, tmp_path), stage, {}) for i in (first, second)]  # type: ignore[arg-type]
    assert found[0] != found[1]


def test_weights_that_are_pickles_are_refused(config: RunConfig, model: Path) -> None:
    (model / "transformer" / "w.safetensors").rename(model / "transformer" / "w.bin")
    with pytest.raises(InputError, match=r"w\.bin is a pickle"):
        resolve_inputs(config)


def test_a_rerun_takes_no_other_base_model() -> None:
    with pytest.raises(InputError, match="belongs to the whole run"):
        check_overrides({"hf_checkpoint": "x", "diffusion_noise_level": 0.8}, ("rollout",))
    with pytest.raises(InputError, match="--prompt-data affects prompts"):
        check_overrides({"prompt_data": "x"}, ("rewards",))


def test_a_run_whose_inputs_changed_is_not_gone_on_with(config: RunConfig, model: Path, tmp_path: Path) -> None:
    store = RunStore(Files(str(tmp_path / "runs")), "r")
    store.create_record({"recipe": "tiny", "config": {}, "meaning": meaning_of(config, resolve_inputs(config))})
    assert inputs_of_run(store, config, {}).checkpoint == model
    (tmp_path / "p.txt").write_text("another\n")
    with pytest.raises(InputError, match="--prompt-data has another content"):
        inputs_of_run(store, config, {})
    inputs_of_run(store, config, {"prompt_data": str(tmp_path / "p.txt")})
    (model / "transformer" / "w.safetensors").write_bytes(b"other weights")
    with pytest.raises(InputError, match="--hf-checkpoint has another content"):
        inputs_of_run(store, config, {"prompt_data": str(tmp_path / "p.txt")})


def test_half_a_surrogate_pair_in_a_prompt_is_refused(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text('{"input": "ok"}\n{"input": "\\ud800"}\n')
    with pytest.raises(InputError, match="line 2 holds half of a surrogate pair"):
        resolve_inputs(config.replace(prompt_data=str(tmp_path / "s.jsonl")))
