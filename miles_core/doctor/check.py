"""What a check is, what it finds, and how a list of them is gone through."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from miles_core.errors import InputError, StageError
from miles_core.store.files import DamagedError

if TYPE_CHECKING:
    from miles_core.doctor.subject import Subject

Status = Literal["pass", "warn", "stop", "skip"]


class NotLooked(Exception):
    """What a check needs could not be had, and another check says why."""


@dataclass(frozen=True)
class Finding:
    """What a check found, in one sentence, and for warn and stop the way out: the flag or the command."""

    status: Status
    found: str
    way_out: str = ""


def passed(found: str) -> Finding:
    return Finding("pass", found)


def warned(found: str, way_out: str) -> Finding:
    return Finding("warn", found, way_out)


def stopped(found: str, way_out: str) -> Finding:
    return Finding("stop", found, way_out)


@dataclass(frozen=True)
class Check:
    """`look` writes nothing into the artifact root. loads_model: whether it needs the model in memory."""

    name: str
    look: Callable[[Subject], Finding]
    loads_model: bool = False


@dataclass(frozen=True)
class Report:
    """A check's finding, and how long it took."""

    name: str
    status: Status
    found: str
    way_out: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"seconds": round(self.seconds, 2)}


def examine(checks: Sequence[Check], subject: Subject) -> Iterator[Report]:
    """Each check's report as it comes. What a check raises is its own stop, and the others are still made."""
    for check in checks:
        started = time.monotonic()
        finding = _finding(check, subject)
        yield Report(check.name, finding.status, finding.found, finding.way_out, time.monotonic() - started)


def _finding(check: Check, subject: Subject) -> Finding:
    try:
        return check.look(subject)
    except NotLooked as fault:
        return Finding("skip", str(fault))
    except (InputError, StageError, DamagedError) as fault:
        return Finding("stop", _sentence(str(fault)))
    except Exception as fault:
        return Finding("stop", _sentence(f"{type(fault).__name__}: {fault}"))


def _sentence(text: str) -> str:
    return " ".join(text.split())


def counts(reports: Sequence[Report]) -> dict[str, int]:
    """How many reports have each status."""
    return {status: sum(r.status == status for r in reports) for status in ("pass", "warn", "stop", "skip")}


def exit_code(reports: Sequence[Report], strict: bool) -> int:
    """2 where a check says stop, or warn under `strict`; else 0."""
    refused = {"stop", "warn"} if strict else {"stop"}
    return 2 if any(report.status in refused for report in reports) else 0
