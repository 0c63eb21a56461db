"""From the name of a checkpoint to a folder, its family and its digest."""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from miles_core.errors import InputError, StageError
from miles_core.families import resolve
from miles_core.families.resolve import checkpoint_digest, family_of, resolve_checkpoint, train_pipeline_config


def pipeline_folder(folder: Path, kind: str = "StableDiffusion3Pipeline") -> Path:
    index = {"_class_name": kind, "transformer": ["diffusers", "T"], "image_encoder": [None, None]}
    (folder / "transformer").mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "transformer" / "weights.safetensors").write_bytes(b"w" * 1000)
    (folder / "transformer" / "config.json").write_text("{}")
    return folder


def test_nothing_heavy_is_imported():
    code = (
        "import sys, miles_core.families.resolve\n"
        "print([m for m in ('torch', 'diffusers', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_tiny_sd3_is_made_once_and_found_again(tmp_path: Path):
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve_checkpoint("tiny:sd3", tmp_path))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "models" / "tiny-stable-diffusion-3.5-medium"] * 2
    weights = found[0] / "transformer" / "diffusion_pytorch_model.safetensors"
    before = weights.stat().st_mtime_ns
    assert resolve_checkpoint("tiny:sd3", tmp_path) == found[0]
    assert weights.stat().st_mtime_ns == before
    assert family_of(found[0]) == "sd3"
    assert checkpoint_digest(found[0]) == checkpoint_digest(found[0])


def test_tiny_sd3_that_cannot_be_made_is_a_stage_error(tmp_path: Path):
    folder = tmp_path / "models" / resolve.TINY_SD3_FOLDER
    folder.mkdir(parents=True)
    (folder / "leftover").write_text("x")
    with pytest.raises(StageError, match="not an empty folder"):
        resolve_checkpoint("tiny:sd3", tmp_path)


def test_a_local_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pipeline_folder(tmp_path / "sub" / "model")
    monkeypatch.chdir(tmp_path / "sub")
    assert resolve_checkpoint("model", tmp_path) == tmp_path / "sub" / "model"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "--hf-checkpoint is empty"),
        ("stabilityai/stable-diffusion-3.5-medium", "hf download stabilityai/stable-diffusion-3.5-medium --local-dir"),
        ("/nowhere/at/all", "/nowhere/at/all does not exist"),
    ],
)
def test_what_is_not_there_is_refused(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        resolve_checkpoint(name, tmp_path)


def test_a_folder_without_a_pipeline_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"no model_index\.json"):
        resolve_checkpoint(str(tmp_path), tmp_path)


def test_another_pipeline_names_the_supported_families(tmp_path: Path):
    with pytest.raises(InputError, match=r"FluxPipeline.*sd3 \(StableDiffusion3Pipeline\)"):
        family_of(pipeline_folder(tmp_path / "m", "FluxPipeline"))
    (tmp_path / "m" / "model_index.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        family_of(tmp_path / "m")


def test_family_code_by_name():
    assert train_pipeline_config("sd3").family == "sd3"
    with pytest.raises(InputError, match="choose one of sd3"):
        train_pipeline_config("flux")


class TestDigest:
    def test_where_the_folder_lies_does_not_matter(self, tmp_path: Path):
        mine = pipeline_folder(tmp_path / "m")
        shutil.copytree(mine, tmp_path / "another" / "name")
        assert checkpoint_digest(mine) == checkpoint_digest(tmp_path / "another" / "name")

    @pytest.mark.parametrize(
        "extra",
        [
            "README.md",
            "picture.png",
            ".cache/x.json",
            "transformer/.hidden.json",
            "transformer/a.png",
            "stray.safetensors",
        ],
    )
    def test_what_is_not_the_model_does_not_matter(self, extra: str, tmp_path: Path):
        mine = pipeline_folder(tmp_path / "m")
        before = checkpoint_digest(mine)
        (mine / extra).parent.mkdir(exist_ok=True)
        (mine / extra).write_text("x")
        assert checkpoint_digest(mine) == before

    @pytest.mark.parametrize(
        "changed", ["model_index.json", "transformer/weights.safetensors", "transformer/config.json"]
    )
    def test_one_changed_byte_matters(self, changed: str, tmp_path: Path):
        mine = pipeline_folder(tmp_path / "m")
        before = checkpoint_digest(mine)
        (mine / changed).write_bytes((mine / changed).read_bytes() + b" ")
        assert checkpoint_digest(mine) != before

    def test_a_renamed_and_a_new_file_matter(self, tmp_path: Path):
        mine = pipeline_folder(tmp_path / "m")
        seen = {checkpoint_digest(mine)}
        (mine / "transformer" / "config.json").rename(mine / "transformer" / "other.json")
        seen.add(checkpoint_digest(mine))
        (mine / "transformer" / "vocab.txt").write_text("a")
        seen.add(checkpoint_digest(mine))
        assert len(seen) == 3
