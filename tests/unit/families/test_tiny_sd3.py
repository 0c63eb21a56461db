"""The tiny pipeline: same bytes every time, whole or not at all, loadable by diffusers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from miles_core.errors import InputError
from miles_core.families.tiny_sd3 import make_tiny_sd3


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_sd3(tmp_path_factory.mktemp("models") / "tiny-stable-diffusion-3.5-medium")


def test_same_seed_gives_same_bytes_in_another_process(tiny: Path, tmp_path: Path):
    command = [sys.executable, "-m", "miles_core.families.tiny_sd3", str(tmp_path / "elsewhere")]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": "77"})
    assert contents(tmp_path / "elsewhere") == contents(tiny)


def test_another_seed_gives_other_weights(tiny: Path, tmp_path: Path):
    other, mine = contents(make_tiny_sd3(tmp_path / "other", seed=1)), contents(tiny)
    differing = {name for name in mine if mine[name] != other[name]}
    assert "transformer/diffusion_pytorch_model.safetensors" in differing
    assert all(name.endswith(".safetensors") for name in differing)


def test_making_leaves_the_random_state_alone(tmp_path: Path):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    make_tiny_sd3(tmp_path / "m")
    assert torch.equal(torch.rand(4), expected)


def test_diffusers_loads_it_and_makes_an_image(tiny: Path):
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline("a cat", num_inference_steps=2, height=32, width=32, output_type="np").images
    assert image.shape == (1, 32, 32, 3)
    assert image.std() > 0.01


def test_a_folder_that_is_not_empty_is_refused(tmp_path: Path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine.txt").write_text("keep")
    with pytest.raises(InputError, match="not an empty folder"):
        make_tiny_sd3(tmp_path / "m")
    assert (tmp_path / "m" / "mine.txt").read_text() == "keep"


def test_an_empty_folder_is_filled(tmp_path: Path):
    (tmp_path / "m").mkdir()
    assert json.loads((make_tiny_sd3(tmp_path / "m") / "model_index.json").read_text())


def test_a_failure_half_way_leaves_nothing(tmp_path: Path):
    """A limit on the size of a file stops the writing in the middle."""
    command = f'ulimit -f 100; exec "{sys.executable}" -m miles_core.families.tiny_sd3 "{tmp_path / "models" / "m"}"'
    made = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert made.returncode != 0
    assert "File too large" in made.stderr
    assert list((tmp_path / "models").iterdir()) == []
