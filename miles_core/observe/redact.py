"""Options without what opens doors: what may be shown to a service that is not the run's own."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SECRET_WORDS = r"token|secret|passwd|password|passphrase|pwd|credentials?|auth|authorization|signature|bearer|jwt"
_KEYS = r"(?:api|access|private|secret|signing|service|account|license|auth|ssh)[_.-]?keys?"
_NAME = re.compile(rf"(?:^|[_.\-])(?:{_SECRET_WORDS})(?:$|[_.\-])|(?:^|[_.\-]){_KEYS}(?:$|[_.\-])|apikey", re.I)
_PARAMETER = re.compile(r"(?P<before>[?&#;])(?P<name>[^=&#;?\s]+)=(?P<value>[^&#;\s\"']*)")
_SHORT_PARAMETERS = {"key", "sig", "code", "pw", "pass"}
# The userinfo of an authority ends at its last @, and a password may hold a slash that nobody escaped.
_AUTHORITY = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^/?#\s\"']*@|(?P<scheme2>[a-z][a-z0-9+.-]*://)[^/?#@\s\"':]*:(?!\d+[/?#\s])[^\s\"'?#]*@",
    re.I,
)
_BARE_USERINFO = re.compile(r"(?<![\w/.:@*-])[\w.+-]+:[^\s@/\"']+@(?=[\w\[])")
_ASSIGNED = re.compile(r"(?P<name>--?[A-Za-z][\w.-]*|[A-Za-z][\w.-]*)(?P<sign>\s*[=:]\s*|\s+)(?P<value>[^\s,;&\"']+)")
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}"
    r"|wandb_v\d_\w{16,}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?)"
)
_HEADER = re.compile(r"\b(?P<kind>bearer|basic)\s+[\w.~+/=-]{8,}", re.I)


def redacted(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with every credential written as ***: values of options whose names say so, and within any text the userinfo
    of URLs, their secret parameters, and tokens of known forms."""
    return {name: HIDDEN if value and _is_secret(str(name)) else _value(value) for name, value in options.items()}


def redacted_text(text: str) -> str:
    """The same within one text, such as an error's."""
    text = _AUTHORITY.sub(lambda m: f"{m['scheme'] or m['scheme2']}{HIDDEN}@", text)
    text = _BARE_USERINFO.sub(f"{HIDDEN}@", text)
    text = _PARAMETER.sub(_parameter, text)
    text = _HEADER.sub(lambda m: f"{m['kind']} {HIDDEN}", text)
    text = _ASSIGNED.sub(_assigned, text)
    return _KNOWN.sub(HIDDEN, text)


def _value(value: Any) -> Any:
    if isinstance(value, str):
        return redacted_text(value)
    if isinstance(value, Mapping):
        return redacted(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_value(one) for one in value]
    return value


def _is_secret(name: str) -> bool:
    return _NAME.search(name) is not None


def _parameter(found: re.Match[str]) -> str:
    hidden = _is_secret(found["name"]) or found["name"].lower() in _SHORT_PARAMETERS
    return f"{found['before']}{found['name']}={HIDDEN if hidden else found['value']}"


def _assigned(found: re.Match[str]) -> str:
    name = found["name"].lstrip("-")
    # A word of a sentence is no name of an option: only what is assigned, or given as a flag, counts.
    given = found["sign"].strip() or found["name"].startswith("-")
    return f"{found['name']}{found['sign']}{HIDDEN}" if given and _is_secret(name) else found[0]
