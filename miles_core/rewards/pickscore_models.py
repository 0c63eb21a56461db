"""PickScore's folders: a CLIP in safetensors and its processor, as transformers' save_pretrained writes them."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from miles_core.errors import InputError
from miles_core.store.digest import content_digest

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json")
_PROCESSOR = ("*.json", "*.txt")


class PickFolders(NamedTuple):
    """Folders of the CLIP and of its processor, and the digest of what they hold."""

    model: str
    processor: str
    digest: str


def pick_folders(model: str | None, processor: str | None) -> PickFolders:
    """The folders, found to hold a CLIP in safetensors and a processor. Raises InputError."""
    found = []
    for option, given, needed in (
        ("--pickscore-model-path", model, ("config.json", "*.safetensors")),
        ("--pickscore-processor-path", processor, ("*processor_config.json", "tokenizer*.json")),
    ):
        if given is None:
            raise InputError(f"rm_type pickscore needs {option}: give a local folder")
        folder = Path(given).expanduser().absolute()
        if not folder.is_dir():
            raise InputError(f"{option} {given} is not a folder: give a local one, nothing is downloaded")
        missing = [pattern for pattern in needed if not list(folder.glob(pattern))]
        if missing:
            raise InputError(
                f"{option} {given} holds no {missing[0]}: give a folder as transformers' save_pretrained writes it"
            )
        found.append(folder)
    files = [("model", path) for pattern in _WEIGHTS for path in found[0].glob(pattern)]
    files += [("processor", path) for pattern in _PROCESSOR for path in found[1].glob(pattern)]
    named = sorted({(f"{kind}/{path.name}", path) for kind, path in files})
    digest = content_digest([], [(name, _sha256(path)) for name, path in named])
    return PickFolders(str(found[0]), str(found[1]), digest)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
