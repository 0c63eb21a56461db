"""Prompt files: JSONL, one object a line, or text, one prompt a line. Every fault is told before a run starts."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from miles_core.config.folders import local_path
from miles_core.errors import InputError
from miles_core.rewards.quoted import target_fault
from miles_core.rewards.rm_types import check_rm_type
from miles_core.store.digest import canonical_json, sha256_hex

DEFAULT_SET = "default"
_SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
PROMPT_SETS = {"tiny": "tiny.txt", "tiny-ocr": "tiny-ocr.jsonl", "tiny-ocr-eval": "tiny-ocr-eval.jsonl"}


@dataclass(frozen=True)
class Prompt:
    """A prompt; `index` counts the file's prompts from 0."""

    index: int
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)


def resolve_prompt_path(prompt_data: str, option: str = "--prompt-data") -> Path:
    """The file that `option` means: a set that comes with the package (tiny, tiny-ocr), or a path."""
    if not prompt_data:
        raise InputError(f"no prompts: give {option} a file, or one of {', '.join(PROMPT_SETS)}")
    if prompt_data in PROMPT_SETS:
        return Path(__file__).parent / "prompt_sets" / PROMPT_SETS[prompt_data]
    return local_path(prompt_data, option)


def named_set(eval_prompt_data: str) -> tuple[str, str]:
    """(name, file) of one set: NAME PATH, or the path alone. Raises InputError for a name that is none."""
    name, _, path = eval_prompt_data.partition(" ")
    if not path.strip() or os.path.isfile(eval_prompt_data):
        return DEFAULT_SET, eval_prompt_data.strip()
    if not _SET_NAME.fullmatch(name):
        raise InputError(
            f"--eval-prompt-data {eval_prompt_data!r}: {name!r} is no name of an evaluation set, use up to 64 letters, "
            "digits, dot, dash and underscore, and write NAME PATH"
        )
    return name, path.strip()


def named_sets(eval_prompt_data: str) -> list[tuple[str, str]]:
    """(name, file) of each set of --eval-prompt-data, a line each. Raises InputError as `named_set`, and for a name that
    is there twice."""
    sets = [named_set(line) for line in eval_prompt_data.splitlines() if line.strip()]
    names = [name for name, _ in sets]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"--eval-prompt-data names the set {twice[0]!r} twice: give each set a name of its own")
    return sets


def load_prompts(
    path: str | Path,
    *,
    input_key: str = "input",
    metadata_key: str = "metadata",
    rm_type: str | None,
    rm_types: Sequence[str] | None = None,
    custom: bool = False,
    option: str = "--prompt-data",
) -> list[Prompt]:
    """The prompts of a file, in its order; blank lines are skipped.

    A name that ends in .jsonl holds one JSON object a line: the prompt under `input_key`, optionally an object
    under `metadata_key` whose rm_type overrides the run's `rm_type`. Any other file holds one prompt a line.
    `rm_types`: these score them all, whatever they name; `custom`: an own reward does. UTF-8; a byte order mark and CRLF
    are accepted. Raises InputError that names file and line; `option` is the one that named the file.
    """
    path = Path(path)
    if rm_type is not None:
        check_rm_type(rm_type, "--rm-type")
    prompts: list[Prompt] = []
    for number, line in _lines(path, option):
        where = f"{path} line {number}"
        if path.suffix.lower() == ".jsonl":
            text, metadata = _from_json(line, where, input_key, metadata_key)
        else:
            text, metadata = line.strip(), {}
        _check_text(text, metadata, where)
        for name in rm_types or ():
            _check_scorer(text, None, name, where)
        if not custom and not rm_types:
            _check_scorer(text, metadata.get("rm_type"), rm_type, where)
        prompts.append(Prompt(len(prompts), text, metadata))
    if not prompts:
        raise InputError(f"{path} holds no prompt: write one a line")
    return prompts


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Digest of what a prompt file means: text and metadata of its prompts in order, however it spells them."""
    return sha256_hex(canonical_json([[prompt.text, prompt.metadata] for prompt in prompts]))


def _lines(path: Path, option: str) -> Iterator[tuple[int, str]]:
    """(line number from 1, text) of the lines that are not blank."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: give {option} a .jsonl or text file")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        sets = ", ".join(PROMPT_SETS)
        raise InputError(f"{path} does not exist: give {option} a .jsonl or text file, or one of {sets}") from None
    except OSError as fault:
        raise InputError(f"{path} cannot be read ({fault.strerror}): give {option} a readable file") from None
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = line.decode()
        except UnicodeDecodeError as fault:
            raise InputError(
                f"{path} line {number} is not UTF-8: byte {fault.start + 1} of the line is 0x{line[fault.start]:02x}; "
                "save the file as UTF-8"
            ) from None
        if text.strip():
            yield number, text


def _from_json(line: str, where: str, input_key: str, metadata_key: str) -> tuple[str, dict[str, Any]]:
    try:
        row = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as fault:
        raise InputError(f"{where} is not JSON ({fault}): write one JSON object a line") from None
    if not isinstance(row, dict):
        raise InputError(f'{where} is not a JSON object: write {{"{input_key}": "the prompt"}}')
    if input_key not in row:
        keys = ", ".join(row) or "none"
        raise InputError(
            f"{where} has no key {input_key!r} (keys there: {keys}): add it, or name the key by --input-key"
        )
    text, metadata = row[input_key], row.get(metadata_key)
    if not isinstance(text, str):
        raise InputError(f"{where}: {input_key!r} is not a string: write the prompt as text")
    if not text.strip():
        raise InputError(f"{where}: {input_key!r} is empty: write a prompt or take the line out")
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise InputError(f"{where}: {metadata_key!r} is not a JSON object: write it as {{...}} or leave it out")
    try:
        json.dumps([text, metadata], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError(
            f"{where} holds half of a surrogate pair (\\ud800 to \\udfff): write the character itself"
        ) from None
    return text, metadata


def _check_text(text: str, metadata: dict[str, Any], where: str) -> None:
    try:
        canonical_json([text, metadata])
    except UnicodeEncodeError:
        raise InputError(
            f"{where} holds half of a surrogate pair, which is no text: write the character itself"
        ) from None


def _check_scorer(text: str, own: object, run: str | None, where: str) -> None:
    if own:
        check_rm_type(own, where)
    elif run is None:
        raise InputError(f"{where} names no rm_type in its metadata and the run has none: give --rm-type")
    if (own or run) == "ocr" and (fault := target_fault(text)):
        raise InputError(f'{where} {fault}: put the text to be drawn between two ", or choose another rm_type')


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
