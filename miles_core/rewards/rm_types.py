"""Names of the scorers, and which scorer a sample gets."""

import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from miles_core.errors import InputError

RM_TYPES = ("pickscore", "ocr", "remote_rm", "jpeg_compressibility", "jpeg_incompressibility")
# What a user's own function gives (--custom-rm-path), in the place of all others.
CUSTOM = "custom"


def check_rm_type(name: object, where: str) -> None:
    """Raises InputError unless `name` is a scorer; `where` begins the sentence."""
    if name not in RM_TYPES:
        raise InputError(f"{where}: unknown rm_type {name!r}: choose {', '.join(RM_TYPES)}")


def metadata_of(prompts: pa.Table) -> dict[int, dict[str, Any]]:
    """sample_index -> the sample's own metadata, from a prompts table."""
    indices, texts = prompts.column("sample_index").to_pylist(), prompts.column("metadata").to_pylist()
    return {index: json.loads(text) for index, text in zip(indices, texts, strict=True)}


def components_of(rm_type: str | None, overrides: Iterable[str | None]) -> list[str]:
    """Scorers in use, sorted: each sample's own, or the run's `rm_type` where it names none.

    Raises InputError where a sample has neither.
    """
    used = {override or rm_type for override in overrides}
    if None in used:
        raise InputError("a sample names no rm_type and the run has none: give --rm-type")
    return sorted(name for name in used if name is not None)
