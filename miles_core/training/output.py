"""Files of an update under the stage's folder: written once; what an interrupted try left there is never touched."""

import hashlib
from collections.abc import Callable
from itertools import count

import pyarrow as pa

from miles_core.store.digest import content_digest, tensor_digests
from miles_core.store.files import Files
from miles_core.store.parts import Part, write_file, write_table

ADAPTER_FILE = "adapter/pytorch_lora_weights.safetensors"
ROWS_FILE = "data/steps.parquet"
PROBE_FILE = "probe.safetensors"


def store_file(files: Files, out_dir: str, name: str, data: bytes) -> Part:
    """Write `<out_dir>/<name>`, or take the file there when its bytes are these.

    Where an interrupted try left other bytes, the name is `<out_dir>/retry-2/<name>` and so on.
    """

    def write(path: str) -> Part:
        try:
            return write_file(files, path, data)
        except FileExistsError:
            if files.read(path) != data:
                raise
        return Part(path, 0, len(data), hashlib.sha256(data).hexdigest(), content_of(name, data))

    return _first_free(out_dir, name, write)


def store_rows(files: Files, out_dir: str, table: pa.Table) -> Part:
    """Write the rows as `<out_dir>/data/steps.parquet`, or under retry-2 and so on where that name is taken."""
    return _first_free(out_dir, ROWS_FILE, lambda path: write_table(files, path, table))


def content_of(name: str, data: bytes) -> str:
    """The content digest that a part of this name and these bytes has."""
    if name.endswith(".safetensors"):
        return content_digest([], tensor_digests(data).items())
    return hashlib.sha256(data).hexdigest()


def short_name(path: str) -> str:
    """Folder and file name of a part, whatever stage folder and retry it lies in."""
    return "/".join(path.split("/")[-2:])


def _first_free(out_dir: str, name: str, write: Callable[[str], Part]) -> Part:
    for attempt in count(1):
        folder = out_dir if attempt == 1 else f"{out_dir}/retry-{attempt}"
        try:
            return write(f"{folder}/{name}")
        except FileExistsError:
            continue
    raise AssertionError("count() ends never")
