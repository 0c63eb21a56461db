"""How a configuration field declares itself: type, default, sentence, and the stages it affects."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from miles_core.store.stages import STAGES, StageName


def option(
    default: Any,
    doc: str,
    *,
    affects: tuple[StageName, ...] = (),
    by_content: bool = False,
    code: bool = False,
    **constraints: Any,
) -> Any:
    """A field with its documentation and the stages whose result depends on it.

    A field that affects none is operational: workers, time-outs, concurrency, how long to run. `by_content`: a
    path, which enters fingerprints by the digest of what it names and never by its spelling. `code`: the same for the
    dotted path of a user's own function.
    """
    unknown = set(affects) - set(STAGES)
    if unknown:
        raise TypeError(f"unknown stages {sorted(unknown)}")
    told: dict[str, Any] = {"affects": list(affects), "by_content": by_content or code, "code": code}
    return Field(default, description=doc, json_schema_extra=told, **constraints)


class Group(BaseModel):
    """A concern's fields. Frozen: a changed configuration is a new one, checked as a whole."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def _parts(value: Any) -> Any:
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value.strip()) if part]
    return value


def _pair(value: Any) -> Any:
    parts = _parts(value)
    if isinstance(parts, list | tuple) and len(parts) != 2:
        raise ValueError("two numbers are needed, written first,end")
    return parts


def _words(value: Any) -> Any:
    """Words as text, a pair a line."""
    if not isinstance(value, list | tuple):
        return value
    return "\n".join(" ".join(map(str, value[i : i + 2])) for i in range(0, len(value), 2))


def _written(value: Any) -> Any:
    if value == "":
        raise ValueError("it is empty, give a value or leave it out")
    return value


_OPTION_NAME = re.compile(r"[a-z][a-z0-9_]*")


def _named(value: Any) -> Any:
    """A mapping, or its words name=value."""
    if isinstance(value, str):
        value = dict(word.partition("=")[::2] for word in value.split())
    if not isinstance(value, dict):
        return value
    named = {str(name).replace("-", "_"): _value(one) for name, one in sorted(value.items())}
    for name in named:
        if not _OPTION_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no option's name")
    return named


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


Named = Annotated[dict[str, str], BeforeValidator(_named)]
Text = Annotated[str, BeforeValidator(_written)]
Words = Annotated[Text, BeforeValidator(_words)]
Ints = Annotated[tuple[int, ...], BeforeValidator(_parts)]
IntPair = Annotated[tuple[int, int], BeforeValidator(_pair)]
Floats = Annotated[tuple[float, ...], BeforeValidator(_parts)]
Names = Annotated[tuple[str, ...], BeforeValidator(_parts)]
