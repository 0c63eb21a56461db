"""From what the user calls a checkpoint to a local pipeline folder, its family and its digest.

Nothing heavy is imported here, so that a driver can ask without loading torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from miles_core.config.folders import local_path
from miles_core.errors import InputError, StageError
from miles_core.words import CHECKPOINT

if TYPE_CHECKING:
    from miles_core.families.base import TrainPipelineConfig

TINY_SD3 = "tiny:sd3"
TINY_SD3_FOLDER = "tiny-stable-diffusion-3.5-medium"
TINY_WORDS = "tiny:words"
"""The packaged checkpoint that draws words (miles_core/words)."""
PACKAGED = (TINY_SD3, TINY_WORDS)

_FAMILIES = {"StableDiffusion3Pipeline": "sd3"}
_SUFFIXES = {".safetensors", ".json", ".txt", ".model", ".jinja"}
_PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_BLOCK = 1 << 22


def resolve_checkpoint(hf_checkpoint: str, data_folder: Path) -> Path:
    """The pipeline folder, absolute. `tiny:sd3` is made under `data_folder`/models at its first use; `tiny:words` comes
    with the package.

    Raises InputError where there is no such folder or it holds no pipeline, StageError where `tiny:sd3` could
    not be made.
    """
    if hf_checkpoint == TINY_SD3:
        return _tiny_sd3(data_folder / "models")
    if hf_checkpoint == TINY_WORDS:
        return CHECKPOINT
    if not hf_checkpoint:
        raise InputError(f"--hf-checkpoint is empty: give a diffusers pipeline folder, {TINY_SD3} or {TINY_WORDS}.")
    folder = local_path(hf_checkpoint, "--hf-checkpoint")
    if not folder.is_dir():
        if _HUB_ID.fullmatch(hf_checkpoint):
            raise InputError(
                f"--hf-checkpoint {hf_checkpoint} is no local folder and nothing is downloaded here: fetch it first with "
                f"`hf download {hf_checkpoint} --local-dir FOLDER` and give FOLDER."
            )
        raise InputError(
            f"--hf-checkpoint {hf_checkpoint} does not exist: give a diffusers pipeline folder, {TINY_SD3} or {TINY_WORDS}."
        )
    if not (folder / "model_index.json").is_file():
        raise InputError(
            f"--hf-checkpoint {hf_checkpoint} holds no model_index.json: give a diffusers pipeline folder."
        )
    for component in sorted(p for p in folder.iterdir() if p.is_dir()):
        pickled = sorted(p.name for p in component.iterdir() if p.suffix in _PICKLED)
        if pickled and not any(component.glob("*.safetensors")):
            raise InputError(
                f"--hf-checkpoint {hf_checkpoint}: {component.name}/{pickled[0]} is a pickle, which can run code when it is "
                "loaded: convert the pipeline to safetensors."
            )
    return folder


def family_of(folder: Path) -> str:
    """The family's name from the pipeline's class. Raises InputError that names the supported families."""
    kind = _model_index(folder).get("_class_name")
    if kind not in _FAMILIES:
        supported = ", ".join(f"{family} ({name})" for name, family in _FAMILIES.items())
        raise InputError(f"{folder} is a pipeline of class {kind}, which is not supported: choose one of {supported}.")
    return _FAMILIES[kind]


def train_pipeline_config(family: str) -> TrainPipelineConfig:
    """The family's code. Raises InputError."""
    if family == "sd3":
        from miles_core.families.sd3 import Sd3PipelineConfig

        return Sd3PipelineConfig()
    raise InputError(f"model family {family!r} is not supported: choose one of {', '.join(_FAMILIES.values())}.")


def checkpoint_digest(folder: Path) -> str:
    """SHA-256 over (relative path, SHA-256 of the content) of model_index.json and the components' files.

    Weights, configurations and tokenizer files count; hidden files, README and pictures do not, nor does where
    the folder lies or what it is called.
    """
    index = _model_index(folder)
    components = [name for name, entry in index.items() if isinstance(entry, list) and any(entry)]
    files = [folder / "model_index.json"]
    for name in components:
        files += [
            path
            for path in (folder / name).rglob("*")
            if path.suffix in _SUFFIXES
            and path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        ]
    hasher = hashlib.sha256()
    for relative, path in sorted((path.relative_to(folder).as_posix(), path) for path in files):
        hasher.update(f"{relative}\n{_sha256(path)}\n".encode())
    return hasher.hexdigest()


def _tiny_sd3(models: Path) -> Path:
    folder = (models / TINY_SD3_FOLDER).absolute()
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(models / f".{TINY_SD3_FOLDER}.lock"):
        if not (folder / "model_index.json").is_file():
            print(f"making the random tiny SD3 in {folder} …", flush=True)
            command = [sys.executable, "-m", "miles_core.families.tiny_sd3", str(folder)]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                raise StageError(f"{TINY_SD3} could not be made in {folder}: {made.stderr.strip()[-2000:]}")
    return folder


def _model_index(folder: Path) -> dict[str, Any]:
    path = folder / "model_index.json"
    try:
        index = json.loads(path.read_text())
    except (OSError, ValueError) as fault:
        raise InputError(f"{path} cannot be read ({fault}): give a diffusers pipeline folder.") from None
    if not isinstance(index, dict):
        raise InputError(f"{path} is no JSON object: give a diffusers pipeline folder.")
    return index


def _sha256(path: Path) -> str:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
    return hasher.hexdigest()
