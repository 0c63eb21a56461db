"""Names of an update's files under the stage's folder."""

from miles_core.store.parts import file_part

ADAPTER_FILE = "adapter/pytorch_lora_weights.safetensors"
ROWS_FILE = "data/steps.parquet"
ALIGNMENT_FILE = "alignment.json"
PROBE_FILE = "probe.safetensors"


def content_of(name: str, data: bytes) -> str:
    """The content digest that a part of this name and these bytes has."""
    return file_part(name, data).content


def short_name(path: str) -> str:
    """Folder and file name of a part, whatever stage folder it lies in."""
    return "/".join(path.split("/")[-2:])
