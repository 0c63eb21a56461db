"""Flags and environment variables as changes of a configuration: command line > MILES_SCRIPT_<FIELD> > recipe."""

import difflib
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any, get_args

from miles_core.config.reference import not_yet
from miles_core.config.run_config import FIELDS, RunConfig, flag
from miles_core.errors import InputError

ENVIRONMENT_PREFIX = "MILES_SCRIPT_"
ENGINE_OPTIONS = "sglang_options"
_PAIRS = {"eval_prompt_data"}
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}


def from_flags(tokens: Sequence[str]) -> dict[str, Any]:
    """Changes out of --any-flag value, --any-flag=value, --switch, --no-switch and --extra-args "...".

    The last one wins. Raises InputError naming the flag.
    """
    changes: dict[str, Any] = {}
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        if not token.startswith("--"):
            raise InputError(f"{token!r} is no flag: options are written --name value")
        text, equals, value = token[2:].partition("=")
        name = text.replace("-", "_")
        if name == "extra_args":
            more = from_flags(_split(value if equals else _take(token, rest, flags_allowed=True)))
            changes |= more | _engine_options(changes.get(ENGINE_OPTIONS, {}) | more.get(ENGINE_OPTIONS, {}))
        elif is_engine_option(name):
            # A switch of the server stands alone.
            alone = not equals and (not rest or rest[0].startswith("--"))
            given = "true" if alone else value if equals else rest.pop(0)
            changes |= _engine_options(changes.get(ENGINE_OPTIONS, {}) | {name.removeprefix("sglang_"): given})
        elif name in FIELDS and _is_switch(name):
            changes[name] = _switch(name, value) if equals else True
        elif name.startswith("no_") and name[3:] in FIELDS and _is_switch(name[3:]) and not equals:
            changes[name[3:]] = False
        else:
            check_known(name, token)
            changes[name] = value if equals else _take(token, rest)
            if name in _PAIRS and not equals:
                changes[name] = _pairs(token, changes[name], rest)
    return changes


def is_engine_option(name: str) -> bool:
    """Whether it is passed on to the sglang server as it stands."""
    return name.startswith("sglang_") and name not in FIELDS and not not_yet(name)


def _engine_options(options: Mapping[str, str]) -> dict[str, Any]:
    return {ENGINE_OPTIONS: dict(options)} if options else {}


def to_flags(base: RunConfig, config: RunConfig, *, without: Collection[str] = ()) -> list[str]:
    """The words of the command line that make `config` of `base`; fields that they cannot say (unset) are left out."""
    values = {name: (getattr(base, group), getattr(config, group)) for name, (group, _) in FIELDS.items()}
    pairs = {name: (getattr(then, name), getattr(now, name)) for name, (then, now) in values.items()}
    return as_flags(
        {n: now for n, (then, now) in pairs.items() if then != now and now is not None and n not in without}
    )


def as_flags(changes: Mapping[str, Any]) -> list[str]:
    """Changes as words of the command line; the inverse of `from_flags`."""
    words: list[str] = []
    for name, value in changes.items():
        if name == ENGINE_OPTIONS and isinstance(value, Mapping):
            words += [word for one, said in value.items() for word in (flag(f"sglang_{one}"), str(said))]
        elif _is_switch(name):
            words.append(flag(name) if str(value).lower() in _TRUE else flag(f"no_{name}"))
        else:
            words += [flag(name), ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)]
    return words


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Changes out of MILES_SCRIPT_<FIELD> variables. Raises InputError naming the variable."""
    changes: dict[str, Any] = {}
    for variable, value in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if is_engine_option(name):
            changes |= _engine_options(changes.get(ENGINE_OPTIONS, {}) | {name.removeprefix("sglang_"): value})
            continue
        check_known(name, f"environment variable {variable}")
        changes[name] = _switch(name, value) if _is_switch(name) else value
    return changes


def from_mapping(values: Mapping[str, Any]) -> dict[str, Any]:
    """Changes given as flow parameters, by field name."""
    for name in values:
        check_known(name.replace("-", "_"), f"override {name!r}")
    return {name.replace("-", "_"): value for name, value in values.items()}


def check_known(name: str, what: str) -> None:
    """Raises InputError, naming `what` and the nearest there is, where `name` is no field."""
    if name in FIELDS:
        return
    if not_yet(name) or (name.startswith("no_") and not_yet(name[3:])):
        raise InputError(f"{what}: the reference's option {flag(name)} is not there yet, leave it out")
    near = difflib.get_close_matches(name, FIELDS, n=1)
    hint = f"did you mean {flag(near[0])}?" if near else "`miles config` lists all options"
    raise InputError(f"{what}: there is no option {flag(name)}, {hint}")


def _is_switch(name: str) -> bool:
    annotation = FIELDS[name][1].annotation
    return annotation is bool or bool in get_args(annotation)


def _switch(name: str, value: str) -> bool:
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise InputError(f"{flag(name)} is a switch and {value!r} is neither true nor false: give one of them")


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as fault:
        raise InputError(f"--extra-args {text!r}: {fault}, check the quotes") from None


def _pairs(token: str, first: str, rest: list[str]) -> str:
    """One word, or NAME PATH NAME PATH ..., a pair a line."""
    words = [first]
    while rest and not rest[0].startswith("--"):
        words.append(rest.pop(0))
    if len(words) > 1 and len(words) % 2:
        raise InputError(f"{token} {shlex.join(words)}: a name lacks its file, write {token} NAME PATH NAME PATH")
    return "\n".join(" ".join(words[i : i + 2]) for i in range(0, len(words), 2))


def _take(token: str, rest: list[str], *, flags_allowed: bool = False) -> str:
    if not rest or (rest[0].startswith("--") and not flags_allowed):
        raise InputError(f"{token} needs a value: write {token} VALUE")
    return rest.pop(0)
