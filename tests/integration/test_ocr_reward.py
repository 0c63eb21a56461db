"""The OCR reward through the real reader, on rendered words, and through the worker."""

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml
from PIL import Image, ImageDraw, ImageFont

from deployments.recipes import recipe
from miles_core.data.data_source import DrawnSample, samples_to_table
from miles_core.errors import StageError
from miles_core.pipeline.feed import replay
from miles_core.pipeline.inputs import Inputs
from miles_core.pipeline.rewards import score_behind
from miles_core.pipeline.stage import Product, Step, Upstreams, run_stage
from miles_core.rewards.ocr import OcrReader, ocr_reward
from miles_core.rewards.ocr_models import OcrDirs, ocr_model_dirs, ocr_models_digest
from miles_core.rewards.worker import RewardWorker
from miles_core.runtime.workers import Workers
from miles_core.store.files import Files
from miles_core.store.parts import Part, read_table, write_table
from miles_core.store.run_store import Attempt, RunStore
from miles_core.store.schemas import rollout_schema

pytestmark = pytest.mark.integration

ARGS = {"rm_type": "ocr", "reward_max_retries": 1, "ocr_min_confidence": 0.5}


def picture(*lines: str, size: int = 40) -> np.ndarray:
    """(H, W, 3) uint8: each line in black on white, one below the other."""
    height, width = (size + 28) * max(1, len(lines)), max(160, 30 * max((len(line) for line in lines), default=0))
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    for i, line in enumerate(lines):
        draw.text((14, 14 + i * (size + 20)), line, fill="black", font=ImageFont.load_default(size=size))
    return np.asarray(image)


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG")
    return buffer.getvalue()


def rollout_part(
    files: Files, prompts: list[str], images: list[np.ndarray], path: str = "rollout.parquet", first: int = 0
) -> Part:
    count = len(images)
    schema = rollout_schema(sde_steps=1, steps=2)
    constant = {
        "negative_prompt": None,
        "conditioning_id": "0" * 16,
        "request_seed": 0,
        "num_outputs": count,
        "guidance_scale": 1.0,
        "noise_level": 0.7,
        "sde_type": "sde",
        "sigmas": [1.0, 0.5, 0.0],
        "timesteps": [1000.0, 500.0],
        "sde_step_indices": [0],
        "log_probs": [-1.0, 0.0],
        "latents_digest": "l",
        "policy_digest": "p",
        "policy_version": -1,
        "engine": "e",
        "started_at": 0,
        "seconds": 0.1,
        "row_digest": "",
    }
    rows = {name: [value] * count for name, value in constant.items()} | {
        "sample_index": list(range(first, first + count)),
        "group_index": list(range(first, first + count)),
        "prompt": prompts,
        "seed": list(range(count)),
        "image": [{"bytes": png(image), "path": f"{i}.png"} for i, image in enumerate(images)],
        "height": [image.shape[0] for image in images],
        "width": [image.shape[1] for image in images],
    }
    return write_table(files, path, pa.table(rows, schema=schema))


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> OcrDirs:
    return ocr_model_dirs(tmp_path_factory.mktemp("ocr"))


@pytest.fixture(scope="module")
def reader(dirs: OcrDirs) -> OcrReader:
    return OcrReader(dirs.det, dirs.rec, 0.5)


@pytest.fixture(scope="module")
def worker(dirs: OcrDirs) -> RewardWorker:
    worker = RewardWorker(ARGS, dirs, "reward-ocr")
    worker.warm_up()
    return worker


EXAMPLES = [
    ("the word", ("MILES",), "MILES", 1.0),
    ("another case", ("miles",), "MILES", 1.0),
    ("a letter less", ("MILE",), "MILES", 0.8),
    ("a letter else", ("MIKES",), "MILES", 0.8),
    ("two letters less", ("MIL",), "MILES", 0.6),
    ("part of more", ("SMILESIDE",), "MILES", 1.0),
    ("two lines", ("STEP", "GOAL"), "Step Goal", 1.0),
    ("lines in the wrong order", ("GOAL", "STEP"), "STEPGOAL", 0.0),
    ("another word", ("QUARTZ",), "BOND", 0.0),
    ("no text", (), "MILES", 0.0),
]


class TestReader:
    @pytest.mark.parametrize(("lines", "target", "reward"), [e[1:] for e in EXAMPLES], ids=[e[0] for e in EXAMPLES])
    def test_rendered_words(self, reader: OcrReader, lines: tuple[str, ...], target: str, reward: float) -> None:
        read = reader.read(picture(*lines))
        assert read.replace(" ", "").lower() == "".join(lines).lower()
        assert ocr_reward(read, target) == pytest.approx(reward, abs=1e-12)

    def test_every_word_of_the_packaged_set(self, reader: OcrReader) -> None:
        from miles_core.data.prompts import load_prompts, resolve_prompt_path
        from miles_core.rewards.quoted import quoted_target

        words = [quoted_target(p.text) or "" for p in load_prompts(resolve_prompt_path("tiny-ocr"), rm_type=None)]
        rewards = [ocr_reward(reader.read(picture(word)), word) for word in words]
        assert len(rewards) == 32
        assert np.mean(rewards) > 0.97

    @pytest.mark.parametrize("shape", [(16, 16, 3), (64, 128, 3), (512, 512, 3)])
    def test_blank_and_noise_read_as_nothing(self, reader: OcrReader, shape: tuple[int, int, int]) -> None:
        noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        assert reader.read(np.full(shape, 255, np.uint8)) == ""
        assert reader.read(noise) == ""

    def test_what_is_no_image_is_an_error(self, reader: OcrReader) -> None:
        for image in (np.zeros((32, 32), np.uint8), np.zeros((32, 32, 3), np.float32), np.zeros((3, 32, 32), np.uint8)):
            with pytest.raises(ValueError, match="OCR reads"):
                reader.read(image)

    def test_min_confidence_leaves_lines_out(self, dirs: OcrDirs, reader: OcrReader) -> None:
        strict = OcrReader(dirs.det, dirs.rec, 1.0)
        assert reader.read(picture("MILES")) == "MILES"
        assert strict.read(picture("MILES")) == ""


class TestWorker:
    def test_scores_a_real_part(self, files: Files, worker: RewardWorker, dirs: OcrDirs) -> None:
        prompts = ['a sign "MILES"', 'a sign "MILES"', 'a sign "MILES"', "a plain sign"]
        images = [picture("MILES"), picture("MILE"), picture(), picture("MILES")]
        own = {0: None, 1: {"rm_type": "ocr"}, 2: None, 3: {"rm_type": "jpeg_compressibility"}}
        part = rollout_part(files, prompts, images)
        made = worker.score(files, part, "rewards.parquet", ["jpeg_compressibility", "ocr"], own)
        table = read_table(files, made)
        assert table.column("reward").to_pylist()[:3] == pytest.approx([1.0, 0.8, 0.0], abs=1e-12)
        assert table.column("score_ocr").to_pylist() == [*table.column("reward").to_pylist()[:3], None]
        assert table.column("score_jpeg_compressibility").to_pylist()[:3] == [None] * 3
        assert table.column("reward").to_pylist()[3] < 0
        assert table.column("recognized").to_pylist() == ["MILES", "MILE", "", None]
        assert table.column("target").to_pylist() == ["MILES", "MILES", "MILES", None]
        version = f"ocr-1:{ocr_models_digest(*dirs)[:12]}"
        assert table.column("rm_version").to_pylist() == [version] * 3 + ["jpeg-1:quality95"]
        assert table.column("tries").to_pylist() == [1] * 4
        assert table.column("worker").to_pylist() == ["reward-ocr"] * 4
        again = worker.score(files, part, "again.parquet", ["jpeg_compressibility", "ocr"], own)
        assert again.content == made.content

    def test_pitfall_23_a_prompt_without_a_target_is_an_error(self, files: Files, worker: RewardWorker) -> None:
        part = rollout_part(files, ['a sign "MILES"', "a plain sign"], [picture("MILES")] * 2)
        with pytest.raises(StageError, match="prompt of sample 1 has no text between two"):
            worker.score(files, part, "rewards.parquet", ["ocr"], {0: None, 1: None})
        assert not files.exists("rewards.parquet")

    def test_pitfall_36_a_fault_inside_ocr_is_an_error_never_a_zero(
        self, files: Files, dirs: OcrDirs, tmp_path: Path
    ) -> None:
        """A recognition model whose dictionary is too short fails as soon as it reads a letter."""
        rec = tmp_path / "rec"
        shutil.copytree(dirs.rec, rec)
        config = yaml.safe_load((rec / "inference.yml").read_text())
        config["PostProcess"]["character_dict"] = config["PostProcess"]["character_dict"][:3]
        (rec / "inference.yml").write_text(yaml.safe_dump(config))
        worker = RewardWorker(ARGS, (dirs.det, str(rec)))
        worker.warm_up()
        blank = worker.score(
            files, rollout_part(files, ['a "MILES"'], [picture()]), "blank.parquet", ["ocr"], {0: None}
        )
        assert read_table(files, blank).column("reward").to_pylist() == [0.0]
        part = rollout_part(Files(str(tmp_path / "b")), ['a "MILES"', 'a "MILES"'], [picture(), picture("MILES")])
        with pytest.raises(StageError, match="rm_type ocr failed on sample 1 in each of 2 tries: IndexError"):
            worker.score(Files(str(tmp_path / "b")), part, "rewards.parquet", ["ocr"], {0: None, 1: None})
        assert not Files(str(tmp_path / "b")).exists("rewards.parquet")

    def test_a_model_that_cannot_be_loaded_is_told_by_warm_up(self, dirs: OcrDirs, tmp_path: Path) -> None:
        rec = tmp_path / "rec"
        shutil.copytree(dirs.rec, rec)
        (rec / "inference.onnx").write_bytes((rec / "inference.onnx").read_bytes()[:100_000])
        with pytest.raises(StageError, match=r"the OCR models in .* cannot be loaded"):
            RewardWorker(ARGS, (dirs.det, str(rec))).warm_up()


def test_no_hub_is_reached(dirs: OcrDirs, tmp_path: Path) -> None:
    """A fresh process with an empty home and every socket refused reads the word all the same."""
    image = tmp_path / "word.png"
    image.write_bytes(png(picture("MILES")))
    program = f"""
import socket
def refuse(*args, **kwargs):
    raise AssertionError("a connection was tried")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
import numpy as np
from PIL import Image
from miles_core.rewards.ocr import OcrReader
print("READ", OcrReader({dirs.det!r}, {dirs.rec!r}, 0.5).read(np.asarray(Image.open({str(image)!r}))))
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PADDLE")} | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "READ MILES" in done.stdout.splitlines()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(str(tmp_path / "root"))


class TestStage:
    """The stage itself: a committed rollout of drawn words, Ray scorers, a committed product."""

    def test_known_partial_errors_through_the_real_stage(self, tmp_path: Path, dirs: OcrDirs) -> None:
        prompts = [f'a sign that says "{target}"' for _, _, target, _ in EXAMPLES]
        images = [picture(*lines) for _, lines, _, _ in EXAMPLES]
        config = recipe("tiny-ocr")
        inputs = Inputs(Path(), "m", "sd3", Path(), "p", (), ("ocr",), (dirs.det, dirs.rec), ocr_models_digest(*dirs))
        store = RunStore(Files(str(tmp_path)), "r")
        with Workers(config, inputs, tmp_path / "state") as workers:
            workers.connect()
            step = Step(config, inputs, store, workers, 0, moves_line=False)
            drawn = run_stage(step, "prompts", {}, lambda s, a, u: Product([prompt_rows(s, a, prompts)])).manifest
            parts = (0, 4, 8)

            def rollout(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
                made = [
                    rollout_part(
                        step.store.files,
                        prompts[i : i + 4],
                        images[i : i + 4],
                        attempt.path(f"data/{i:08d}-1.parquet"),
                        i,
                    )
                    for i in parts
                ]
                return Product(made)

            made = run_stage(step, "rollout", {"prompts": drawn}, rollout).manifest
            first = score_behind(step, replay(made, drawn))
            again = score_behind(step, replay(made, drawn))
        assert not first.reused
        assert again.reused
        rows = [row for part in first.manifest.data for row in read_table(store.files, part).to_pylist()]
        found = {name: round(row["reward"], 6) for (name, *_), row in zip(EXAMPLES, rows, strict=True)}
        assert found == {name: reward for name, _, _, reward in EXAMPLES}
        assert len({reward for *_, reward in EXAMPLES}) >= 4
        assert first.manifest.upstream["rollout"].content_digest == made.content_digest
        assert first.manifest.summary["samples"] == len(EXAMPLES)


def prompt_rows(step: Step, attempt: Attempt, prompts: list[str]) -> Part:
    groups = [[DrawnSample(group_index=i, index=i, prompt=p, seed=i)] for i, p in enumerate(prompts)]
    return write_table(step.store.files, attempt.path("data/prompts.parquet"), samples_to_table(groups))
