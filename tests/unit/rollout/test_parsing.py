"""From an engine's result to Parquet and back."""

import io
import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from miles_core.errors import StageError
from miles_core.rollout.microgroup import conditioning_id, joined
from miles_core.rollout.parsing import (
    ParserWorker,
    conditioning_table,
    image_png,
    read_conditioning,
    rollout_tables,
)
from miles_core.rollout.protocol import GeneratedOutput, GenerateRequest, GenerateResult
from miles_core.store.files import Files
from miles_core.store.parts import read_table
from miles_core.store.schemas import CONDITIONING

STEPS, SHAPE = 6, (16, 4, 6)
REQUEST = GenerateRequest(
    prompt="a red fox",
    negative_prompt="",
    seed=20,
    num_outputs=2,
    height=32,
    width=48,
    num_inference_steps=STEPS,
    guidance_scale=4.5,
    sde_type="sde",
    noise_level=0.7,
    log_prob_no_const=False,
    sde_step_indices=(1, 2, 4),
    generator_device="cpu",
)
SAMPLES = [{"sample_index": 8, "group_index": 2}, {"sample_index": 9, "group_index": 2}]
WHOSE = {"policy_digest": "d" * 64, "policy_version": -1, "conditioning_id": "c" * 16}


def result(count: int = 2, guided: bool = True, dtype: torch.dtype = torch.float32) -> GenerateResult:
    generator = torch.Generator().manual_seed(0)
    sigmas = torch.linspace(1, 0, STEPS + 1)
    outputs = [
        GeneratedOutput(
            seed=20 + i,
            image=torch.rand((3, 32, 48), generator=generator),
            log_probs=torch.randn(STEPS, generator=generator),
            latents=torch.randn((STEPS + 1, *SHAPE), generator=generator),
            timesteps=sigmas * 1000,
            sigmas=sigmas,
        )
        for i in range(count)
    ]
    conditioning = {
        f"{side}.{name}": torch.randn(shape, generator=generator).to(dtype)
        for side in (("pos", "neg") if guided else ("pos",))
        for name, shape in (("encoder_hidden_states", (333, 8)), ("pooled_projections", (12,)))
    }
    return GenerateResult(outputs, conditioning, "engine-1", 1.7e9, 2.5)


def write(worker: ParserWorker, files: Files, made: GenerateResult, name: str, conditioning: str | None = None):
    """The worker's parts of `made` under data/, latents/ and `conditioning`."""
    paths = f"data/{name}", f"latents/{name}", conditioning
    return worker.write(files, made, REQUEST, *paths, samples=SAMPLES, sde_steps=(1,), **WHOSE)


class TestImage:
    def test_every_level_survives(self):
        levels = torch.arange(3 * 16 * 16).remainder(256).reshape(3, 16, 16)
        read = np.asarray(Image.open(io.BytesIO(image_png(levels / 255))))
        assert np.array_equal(read, levels.permute(1, 2, 0).numpy())

    def test_values_are_rounded_not_cut(self):
        image = torch.tensor([0.499 / 255, 0.501 / 255, 254.6 / 255]).reshape(3, 1, 1)
        assert np.asarray(Image.open(io.BytesIO(image_png(image)))).tolist() == [[[0, 1, 255]]]

    def test_same_image_same_bytes(self):
        image = torch.rand((3, 64, 64), generator=torch.Generator().manual_seed(1))
        assert image_png(image) == image_png(image.clone())
        assert image_png(image) != image_png(1 - image)


class TestRolloutTable:
    def test_round_trip_through_a_part(self, tmp_path: Path):
        made, files = result(), Files(str(tmp_path))
        made_of, beside = ParserWorker().write(
            files,
            made,
            REQUEST,
            "data/0-0.parquet",
            "latents/0-0.parquet",
            "conditioning/c.parquet",
            samples=SAMPLES,
            sde_steps=(1, 2, 4),
            **WHOSE,
        )
        assert (made_of.rows, made_of.latents.rows, beside.rows) == (2, 2, 4)
        apart = read_table(files, made_of.latents)
        table = joined(files, made_of, read_table(files, made_of.data).column_names)
        assert not {"latents", "latent_steps"} & set(read_table(files, made_of.data).column_names)
        assert apart.column_names == ["sample_index", "latent_steps", "latents", "row_digest"]
        assert apart.column("row_digest").to_pylist() == table.column("latents_digest").to_pylist()
        for i, row in enumerate(table.to_pylist()):
            output = made.outputs[i]
            assert (row["sample_index"], row["group_index"]) == (8 + i, 2)
            assert (row["seed"], row["request_seed"], row["num_outputs"]) == (20 + i, 20, 2)
            assert (row["prompt"], row["negative_prompt"]) == ("a red fox", "")
            assert row["sde_step_indices"] == [1, 2, 4]
            assert row["latent_steps"] == [1, 2, 3, 4, 5]
            assert torch.equal(torch.tensor(row["latents"]).reshape(5, *SHAPE), output.latents[1:6])
            assert torch.equal(torch.tensor(row["log_probs"]), output.log_probs)
            assert torch.equal(torch.tensor(row["sigmas"]), output.sigmas)
            assert torch.equal(torch.tensor(row["timesteps"]), output.timesteps[:STEPS])
            assert row["image"]["bytes"] == image_png(output.image)
            assert row["policy_version"] == -1
            assert row["engine"] == "engine-1"
            assert row["started_at"].timestamp() == 1.7e9
            assert len(row["row_digest"]) == 64
        assert table.schema.field("latents").metadata[b"shape"] == b"[5, 16, 4, 6]"

    def test_only_positions_of_trained_steps_are_stored(self):
        table, latents = rollout_tables(result(), REQUEST, samples=SAMPLES, sde_steps=(4, 0), **WHOSE)
        assert latents.column("latent_steps").to_pylist() == [[0, 1, 4, 5]] * 2
        assert table.column("sde_step_indices").to_pylist() == [[0, 4]] * 2
        stored = torch.tensor(latents.column("latents").to_pylist()).reshape(2, 4, *SHAPE)
        assert torch.equal(stored[1], result().outputs[1].latents[[0, 1, 4, 5]])
        assert table.column("row_digest").to_pylist() == ["", ""]

    def test_times_and_engine_do_not_change_the_content(self, tmp_path: Path):
        files, made, later = Files(str(tmp_path)), result(), result()
        later.engine, later.started_at, later.seconds = "engine-7", time.time(), 99.0
        moved = result()
        moved.outputs[0].latents[1, 0, 0, 0] += 1
        parts = [write(ParserWorker(), files, r, f"{n}.parquet")[0] for n, r in enumerate((made, later, moved))]
        assert parts[0].data.sha256 != parts[1].data.sha256
        assert parts[0].data.content == parts[1].data.content != parts[2].data.content
        assert parts[0].latents.content == parts[1].latents.content != parts[2].latents.content

    def test_negative_prompt_is_null_without_guidance(self):
        table, _ = rollout_tables(
            result(guided=False), replace(REQUEST, guidance_scale=1.0), samples=SAMPLES, sde_steps=(1,), **WHOSE
        )
        assert table.column("negative_prompt").to_pylist() == [None, None]

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("what", ["log_probs", "latents", "image"])
    def test_nan_and_inf_stop_the_stage_with_the_sample(self, what: str, bad: float, tmp_path: Path):
        """Pitfall 6."""
        made, files = result(), Files(str(tmp_path))
        getattr(made.outputs[1], what).view(-1)[-1] = bad
        with pytest.raises(StageError, match=f"sample 9: {what} holds NaN or inf"):
            write(ParserWorker(), files, made, "a.parquet", "c.parquet")
        assert files.list("") == []

    def test_a_latent_of_another_dtype_is_refused(self):
        """Pitfall 3."""
        made = result()
        made.outputs[0].latents = made.outputs[0].latents.bfloat16()
        with pytest.raises(StageError, match=r"sample 8: latents came as torch.bfloat16"):
            rollout_tables(made, REQUEST, samples=SAMPLES, sde_steps=(1,), **WHOSE)

    @pytest.mark.parametrize(("count", "samples"), [(1, SAMPLES), (2, SAMPLES[:1]), (3, SAMPLES)])
    def test_a_missing_output_is_refused(self, count: int, samples: list):
        with pytest.raises(StageError, match=f"returned {count} outputs for 2 requested"):
            rollout_tables(result(count), REQUEST, samples=samples, sde_steps=(1,), **WHOSE)


class TestConditioning:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_round_trip(self, dtype: torch.dtype, tmp_path: Path):
        made, files = result(dtype=dtype), Files(str(tmp_path))
        _, beside = write(ParserWorker(), files, made, "a", "c")
        table = read_table(files, beside)
        assert table.schema.equals(CONDITIONING)
        found = read_conditioning(table)
        assert list(found) == ["c" * 16]
        assert found["c" * 16].keys() == made.conditioning.keys()
        for name, tensor in made.conditioning.items():
            assert found["c" * 16][name].dtype == dtype
            assert torch.equal(found["c" * 16][name], tensor)

    def test_two_prompts_in_one_table(self):
        one, two = result(), result(guided=False)
        tables = [conditioning_table(one, REQUEST, "a"), conditioning_table(two, replace(REQUEST, prompt="b"), "b")]
        found = read_conditioning(pa.concat_tables(tables))
        assert {key: len(tensors) for key, tensors in found.items()} == {"a": 4, "b": 2}

    def test_nan_is_refused(self):
        made = result()
        made.conditioning["pos.pooled_projections"][0] = math.nan
        with pytest.raises(StageError, match="pos.pooled_projections of prompt 'a red fox'"):
            conditioning_table(made, REQUEST, "a")

    def test_the_second_writer_finds_the_first_ones_file(self, tmp_path: Path):
        files, worker = Files(str(tmp_path)), ParserWorker()
        _, first = write(worker, files, result(), "a", "c")
        before = files.read("c")
        part, second = write(worker, files, result(), "b", "c")
        assert second == first
        assert files.read("c") == before
        assert files.exists(part.data.path)

    def test_a_damaged_file_is_made_again(self, tmp_path: Path):
        files = Files(str(tmp_path))
        files.create("c", b"half a par")
        _, beside = write(ParserWorker(), files, result(), "a", "c")
        assert read_conditioning(read_table(files, beside))

    def test_a_part_is_never_overwritten(self, tmp_path: Path):
        files, worker = Files(str(tmp_path)), ParserWorker()
        write(worker, files, result(), "a")
        with pytest.raises(FileExistsError):
            write(worker, files, result(), "a")

    def test_the_rows_come_last(self, tmp_path: Path):
        """Whoever finds a microgroup's rows finds its latents: a writer that stops between leaves no rows."""
        files, worker = Files(str(tmp_path)), ParserWorker()
        files.create("data/a", b"taken")
        with pytest.raises(FileExistsError, match="data/a"):
            write(worker, files, result(), "a", "c")
        assert files.exists("latents/a") and files.exists("c")
        files.create("latents/b", b"taken")
        with pytest.raises(FileExistsError, match="latents/b"):
            write(worker, files, result(), "b")
        assert not files.exists("data/b")

    def test_id_depends_on_each_part(self):
        ids = [
            conditioning_id(*parts)
            for parts in (
                ("a", "b", "e", "fp32"),
                ("a", "", "e", "fp32"),
                ("a", None, "e", "fp32"),
                ("ab", "", "e", "fp32"),
                ("a", "b", "f", "fp32"),
                ("a", "b", "e", "bf16"),
            )
        ]
        assert len(set(ids)) == 6
        assert ids[0] == conditioning_id("a", "b", "e", "fp32")
        assert all(len(i) == 16 and int(i, 16) >= 0 for i in ids)
