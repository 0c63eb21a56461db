"""The worker and the hub on JPEG rewards: real rollout parts in, real rewards parts out."""

import asyncio
import io
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from miles_core.data.sample import Sample
from miles_core.errors import InputError, StageError
from miles_core.rewards.rm_hub import Scorers, batched_async_rm
from miles_core.rewards.rm_types import check_rm_type, components_of, metadata_of
from miles_core.rewards.scores import Score, rgb_hwc_uint8, with_retries
from miles_core.rewards.worker import RewardWorker, decode_png
from miles_core.store.files import DamagedError, Files
from miles_core.store.parts import Part, read_table, write_table
from miles_core.store.schemas import PROMPTS, rewards_schema, rollout_schema

JPEG = ["jpeg_compressibility", "jpeg_incompressibility"]
ARGS: dict[str, Any] = {"rm_type": "jpeg_incompressibility", "reward_max_retries": 2, "ocr_min_confidence": 0.5}


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()


def noise(seed: int, height: int = 32, width: int = 48) -> np.ndarray:
    """Noise whose amplitude grows with the seed, so that no two images have one JPEG size."""
    values = np.random.default_rng(seed).integers(0, 20 * (seed + 1), (height, width, 3))
    return values.astype(np.uint8)


def jpeg_bytes(image: np.ndarray) -> int:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=95)
    return buffer.tell()


def rollout_part(files: Files, images: list[bytes], *, first: int = 20, path: str = "rollout/0.parquet") -> Part:
    count = len(images)
    schema = rollout_schema(sde_steps=1, steps=2)
    rows = {
        "sample_index": range(first, first + count),
        "group_index": [i // 2 for i in range(first, first + count)],
        "prompt": [f'a sign "W{i}"' for i in range(count)],
        "negative_prompt": [None] * count,
        "conditioning_id": ["0" * 16] * count,
        "seed": range(count),
        "request_seed": [0] * count,
        "num_outputs": [count] * count,
        "image": [{"bytes": image, "path": f"{i}.png"} for i, image in enumerate(images)],
        "height": [32] * count,
        "width": [48] * count,
        "guidance_scale": [1.0] * count,
        "noise_level": [0.7] * count,
        "sde_type": ["sde"] * count,
        "sigmas": [[1.0, 0.5, 0.0]] * count,
        "timesteps": [[1000.0, 500.0]] * count,
        "sde_step_indices": [[0]] * count,
        "log_probs": [[-1.0, 0.0]] * count,
        "latents_digest": ["l"] * count,
        "policy_digest": ["p"] * count,
        "policy_version": [-1] * count,
        "engine": ["e"] * count,
        "started_at": [0] * count,
        "seconds": [0.1] * count,
        "row_digest": [""] * count,
    }
    return write_table(files, path, pa.table({k: list(v) for k, v in rows.items()}, schema=schema))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(str(tmp_path))


def no_rewards(files: Files) -> bool:
    return files.list("rewards") == []


class TestWorker:
    def test_scores_a_part_row_by_row(self, files: Files) -> None:
        images = [noise(i) for i in range(4)]
        sizes = [jpeg_bytes(image) for image in images]
        assert len(set(sizes)) == 4
        part = rollout_part(files, [png(image) for image in images])
        own = {20: None, 21: {"rm_type": "jpeg_compressibility"}, 22: None, 23: {"rm_type": "jpeg_compressibility"}}
        worker = RewardWorker(pickle.loads(pickle.dumps(ARGS)), name="reward-0")
        worker.warm_up()
        made = worker.score(files, part, "rewards/0.parquet", JPEG, own)
        assert (made.path, made.rows) == ("rewards/0.parquet", 4)
        table = read_table(files, made)
        assert table.schema.equals(rewards_schema(JPEG), check_metadata=True)
        expected = [sizes[0] / 1000, -sizes[1] / 1000 / 500, sizes[2] / 1000, -sizes[3] / 1000 / 500]
        rollout_rows = read_table(files, part)
        assert table.column("reward").to_pylist() == expected
        assert table.column("score_jpeg_incompressibility").to_pylist() == [expected[0], None, expected[2], None]
        assert table.column("score_jpeg_compressibility").to_pylist() == [None, expected[1], None, expected[3]]
        assert table.column("rm_type").to_pylist() == [(own[i] or ARGS)["rm_type"] for i in range(20, 24)]
        assert table.column("rm_version").to_pylist() == ["jpeg-1:quality95"] * 4
        assert table.column("recognized").to_pylist() == table.column("target").to_pylist() == [None] * 4
        assert table.column("tries").to_pylist() == [1] * 4
        assert table.column("worker").to_pylist() == ["reward-0"] * 4
        for column in ("sample_index", "group_index"):
            assert table.column(column).to_pylist() == rollout_rows.column(column).to_pylist()
        assert table.column("rollout_digest").to_pylist() == rollout_rows.column("row_digest").to_pylist()
        assert all(len(d) == 64 for d in table.column("row_digest").to_pylist())

    def test_who_scored_does_not_change_the_content(self, files: Files) -> None:
        part = rollout_part(files, [png(noise(i)) for i in range(2)])
        own = {20: None, 21: None}
        made = [
            RewardWorker(ARGS, name=name).score(files, part, f"rewards/{name}.parquet", JPEG, own)
            for name in ("a", "b")
        ]
        other = RewardWorker(ARGS | {"rm_type": "jpeg_compressibility"})
        assert made[0].content == made[1].content
        assert other.score(files, part, "rewards/c.parquet", JPEG, own).content != made[0].content

    def test_pitfall_22_n_samples_get_n_scores_each_of_its_own_image(self, files: Files) -> None:
        images = [noise(i) for i in range(6)]
        args = SimpleNamespace(**ARGS)
        samples = [
            Sample(group_index=0, index=i, prompt="the same", seed=i, generated_output=decode_png(png(image), i))
            for i, image in enumerate(images)
        ]
        scores: dict[int, Score] = {}
        rewards = asyncio.run(batched_async_rm(args, samples, scorers=Scorers(), scores=scores))
        assert rewards == [jpeg_bytes(image) / 1000 for image in images]
        assert len(set(rewards)) == 6
        assert [scores[i].reward for i in range(6)] == rewards
        assert asyncio.run(batched_async_rm(args, samples[3:4], scorers=Scorers())) == rewards[3:4]


class TestPitfall36:
    """verl-omni #366: a scorer's failure is an error after its tries, never a reward."""

    # PNG holds an image 65501 pixels wide, JPEG does not: the scorer itself fails.
    TOO_WIDE = np.zeros((1, 65_501, 3), np.uint8)

    def test_pitfall_36_a_scorer_that_fails_writes_no_part(self, files: Files) -> None:
        part = rollout_part(files, [png(noise(1)), png(self.TOO_WIDE), png(noise(2))])
        own = {20: None, 21: None, 22: None}
        with pytest.raises(
            StageError, match="rm_type jpeg_incompressibility failed on sample 21 in each of 3 tries: OSError"
        ):
            RewardWorker(ARGS).score(files, part, "rewards/0.parquet", JPEG, own)
        assert no_rewards(files)

    def test_pitfall_36_the_tries_are_counted(self) -> None:
        calls = []

        def fails_twice() -> Score:
            calls.append(1)
            if len(calls) < 3:
                raise RuntimeError(f"fault {len(calls)}")
            return Score(0.25, "jpeg_compressibility", "v")

        score, tries = with_retries(fails_twice, 2, "scoring")
        assert (score.reward, tries, len(calls)) == (0.25, 3, 3)
        calls.clear()
        with pytest.raises(StageError, match="scoring in each of 2 tries: RuntimeError: fault 2") as fault:
            with_retries(fails_twice, 1, "scoring")
        assert len(calls) == 2
        assert isinstance(fault.value.__cause__, RuntimeError)
        calls.clear()
        with pytest.raises(StageError, match="in each of 1 tries"):
            with_retries(fails_twice, 0, "scoring")
        assert len(calls) == 1

    @pytest.mark.parametrize("damage", [b"", b"not a picture", None])
    def test_pitfall_36_an_image_that_cannot_be_decoded(self, files: Files, damage: bytes | None) -> None:
        data = png(noise(1))[:-60] if damage is None else damage
        part = rollout_part(files, [png(noise(1)), data])
        with pytest.raises(StageError, match="image of sample 21 cannot be decoded"):
            RewardWorker(ARGS).score(files, part, "rewards/0.parquet", JPEG, {20: None, 21: None})
        assert no_rewards(files)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_pitfall_36_a_reward_that_is_not_finite(self, files: Files, value: float) -> None:
        class Wild(Scorers):
            def score(self, rm_type: str, image: np.ndarray, prompt: str) -> Score:
                return Score(value, rm_type, "wild-1")

        worker = RewardWorker(ARGS)
        worker.scorers = Wild()
        part = rollout_part(files, [png(noise(1))])
        with pytest.raises(StageError, match="gave sample 20 the reward .*, which is not finite"):
            worker.score(files, part, "rewards/0.parquet", JPEG, {20: None})
        assert no_rewards(files)

    def test_pitfall_36_an_image_that_is_not_finite(self) -> None:
        sample = Sample(group_index=0, index=7, prompt="", seed=0, generated_output=torch.full((3, 4, 4), float("nan")))
        with pytest.raises(StageError, match="sample 7 holds values that are not finite"):
            asyncio.run(batched_async_rm(SimpleNamespace(**ARGS), [sample], scorers=Scorers()))

    def test_pitfall_36_a_damaged_rollout_part(self, files: Files) -> None:
        part = rollout_part(files, [png(noise(1))])
        data = bytearray(files.read(part.path))
        data[40] ^= 1
        files.replace(part.path, bytes(data))
        with pytest.raises(DamagedError, match="SHA-256"):
            RewardWorker(ARGS).score(files, part, "rewards/0.parquet", JPEG, {20: None})
        assert no_rewards(files)


class TestRefusals:
    def test_pitfall_23_ocr_without_a_target_names_the_sample(self) -> None:
        image = torch.zeros(3, 32, 32)
        for prompt in ("a sign", 'a sign ""'):
            sample = Sample(group_index=0, index=9, prompt=prompt, seed=0, generated_output=image)
            with pytest.raises(StageError, match="prompt of sample 9 has no"):
                asyncio.run(batched_async_rm(SimpleNamespace(**ARGS | {"rm_type": "ocr"}), [sample], scorers=Scorers()))

    @pytest.mark.parametrize(
        ("run", "own", "components", "says"),
        [
            (None, {20: None}, JPEG, "sample 20 names no rm_type"),
            (
                "jpeg_compressibility",
                {20: {"rm_type": "sharpness"}},
                JPEG,
                "sample 20 has the unknown rm_type 'sharpness'",
            ),
            ("jpeg_compressibility", {}, JPEG, "sample 20 of the rollout is not among the prompts"),
            ("jpeg_compressibility", {20: None}, JPEG[1:], "sample 20 has rm_type jpeg_compressibility, not among"),
            ("ocr", {20: None}, ["ocr"], "started without OCR models"),
        ],
    )
    def test_each_in_one_sentence(
        self, files: Files, run: str | None, own: dict[int, dict[str, str] | None], components: list[str], says: str
    ) -> None:
        part = rollout_part(files, [png(noise(1))])
        with pytest.raises(StageError, match=says):
            RewardWorker(ARGS | {"rm_type": run}).score(files, part, "rewards/0.parquet", components, own)
        assert no_rewards(files)

    def test_a_taken_name(self, files: Files) -> None:
        part = rollout_part(files, [png(noise(1))])
        worker = RewardWorker(ARGS)
        first = worker.score(files, part, "rewards/0.parquet", JPEG, {20: None})
        with pytest.raises(FileExistsError):
            worker.score(files, part, "rewards/0.parquet", JPEG, {20: None})
        assert read_table(files, first).num_rows == 1


class TestImages:
    def test_png_to_tensor_and_back_keeps_every_value(self) -> None:
        image = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, axis=2)
        image[..., 1] = 255 - image[..., 1]
        tensor = decode_png(png(image), 0)
        assert (tensor.shape, tensor.dtype) == ((3, 16, 16), torch.float32)
        assert (float(tensor.min()), float(tensor.max())) == (0.0, 1.0)
        assert (
            rgb_hwc_uint8(Sample(group_index=0, index=0, prompt="", seed=0, generated_output=tensor)) == image
        ).all()

    def test_values_outside_the_range_are_clamped(self) -> None:
        sample = Sample(
            group_index=0, index=0, prompt="", seed=0, generated_output=torch.tensor([-0.5, 0.5, 1.5]).view(3, 1, 1)
        )
        assert rgb_hwc_uint8(sample).tolist() == [[[0, 128, 255]]]


class TestRmTypes:
    def test_components(self) -> None:
        assert components_of("ocr", [None, None]) == ["ocr"]
        assert components_of("ocr", ["jpeg_compressibility", None, ""]) == ["jpeg_compressibility", "ocr"]
        assert components_of(None, ["jpeg_compressibility"]) == ["jpeg_compressibility"]
        assert components_of("ocr", ["jpeg_compressibility"]) == ["jpeg_compressibility"]
        with pytest.raises(InputError, match="give --rm-type"):
            components_of(None, ["ocr", None])

    def test_from_a_prompts_table(self) -> None:
        rows = [
            {"sample_index": i, "group_index": 0, "prompt": "", "seed": 0, "prompt_index": 0, "epoch": 0}
            | {"metadata": own, "rm_type": None, "row_digest": ""}
            for i, own in ((4, "{}"), (3, '{"rm_type": "ocr", "mood": 1}'))
        ]
        assert metadata_of(pa.Table.from_pylist(rows, schema=PROMPTS)) == {4: {}, 3: {"rm_type": "ocr", "mood": 1}}

    def test_names(self) -> None:
        for name in ("pickscore", "ocr", "remote_rm", *JPEG):
            check_rm_type(name, "here")
        with pytest.raises(InputError, match="here: unknown rm_type 'aesthetic'"):
            check_rm_type("aesthetic", "here")
