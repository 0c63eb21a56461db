"""Named places where a test can make a run fail: MILES_FAULT=<point>:<n>:<action>, several with commas.

`update:after_step:2:kill9` ends the process that is the second to pass that point, counted over all processes of the
command, once. `@name` after the point counts one actor alone: `update:after_step@trainer-1:1:hang`. Actions: kill9,
stop (SIGSTOP), hang, error, slow (5 s) or slow=SECONDS, held (until <point>.go lies in the folder that MILES_FAULT_COUNTS
names, 10 minutes at most). With `armed` for n it is the next passage after the file
<point>.armed (a dash for the colon) lies in the folder that MILES_FAULT_COUNTS names; it is then called .reached.
"""

import atexit
import os
import re
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from miles_core.errors import InputError, StageError
from miles_core.store.stages import STAGES

VARIABLE = "MILES_FAULT"
_COUNTS = "MILES_FAULT_COUNTS"
_NAME = "MILES_FAULT_NAME"

BOUNDARIES = {
    "start": "the command: the attempt is open, nothing made",
    "before_commit": "the command: all is made, no manifest yet",
    "after_commit": "the command: the manifest is there, the line not moved",
    "end": "the command: the line names the attempt",
}
INSIDE = {
    "prompts:wave_drawn": "the command: a wave was drawn, nothing of it generated",
    "prompts:wave_scored": "the command: a wave was scored, the filter not asked",
    "prompts:wave_end": "the command: a wave's groups are counted",
    "rollout:landed": "the command: a microgroup's part was told of",
    "rollout:generate": "an engine: before it generates",
    "rollout:write": "a parser: before it writes",
    "rollout:written": "a parser: between the files of one microgroup",
    "rewards:landed": "the command: a part's scores were told of",
    "rewards:score": "a scorer: before it scores a part",
    "update:forward": "a trainer rank: before a forward",
    "update:after_step": "a trainer rank: after an optimizer step",
    "update:write": "a trainer rank: before a file of the new policy",
    "sync:push": "an engine: before it takes a policy",
    "sync:pushed": "an engine: after it took a policy",
    "evaluation:landed": "the command: a microgroup's part was told of",
    "evaluation:score": "a scorer: before it scores a microgroup",
    "logging:start": "the command: all is committed, nothing of it logged",
    "logging:sent": "the command: it went somewhere, and logged.json does not say so yet",
}
POINTS = {f"{stage}:{name}": doc for stage in STAGES for name, doc in BOUNDARIES.items()}
POINTS |= INSIDE
_PASSAGE = re.compile(r"armed|[1-9]\d*")
_ACTION = re.compile(r"kill9|stop|hang|error|held|slow(=\d+(\.\d+)?)?")


class FaultInjected(StageError):
    """What the action `error` raises."""


@dataclass(frozen=True)
class Fault:
    """One fault: the n-th passage of `point`, by the actor `name` alone where it is given; n 0: the next one after
    it was armed."""

    point: str
    name: str | None
    n: int
    action: str


def parse_faults(text: str) -> list[Fault]:
    """The faults that MILES_FAULT asks for. Raises InputError."""
    found = []
    for given in filter(None, text.split(",")):
        words = given.split(":")
        point, _, name = ":".join(words[:2]).partition("@")
        if len(words) != 4 or not _PASSAGE.fullmatch(words[2]) or not _ACTION.fullmatch(words[3]):
            raise InputError(f"{VARIABLE} {given!r} is no fault: give <stage>:<place>[@actor]:<n>:<action>")
        if point not in POINTS:
            raise InputError(f"{VARIABLE} names no point {point!r}: choose one of {', '.join(sorted(POINTS))}")
        found.append(Fault(point, name or None, 0 if words[2] == "armed" else int(words[2]), words[3]))
    return found


def arm() -> dict[str, str]:
    """Called once by a command: checks MILES_FAULT and returns the environment its actors need; empty without it."""
    if not os.environ.get(VARIABLE):
        return {}
    parse_faults(os.environ[VARIABLE])
    # Whoever watches the counts from outside names the folder.
    if not os.environ.get(_COUNTS):
        os.environ[_COUNTS] = tempfile.mkdtemp(prefix="miles-faults-")
        atexit.register(shutil.rmtree, os.environ[_COUNTS], ignore_errors=True)
    return {name: os.environ[name] for name in (VARIABLE, _COUNTS)}


def arm_actor(name: str, environment: dict[str, str]) -> None:
    """Called by an actor with what `arm` gave its command."""
    for variable in (VARIABLE, _COUNTS):
        os.environ.pop(variable, None)
    os.environ.update(environment)
    os.environ[_NAME] = name


def fault_point(point: str) -> None:
    """A named place. Does nothing unless MILES_FAULT asks for this passage of it."""
    if not os.environ.get(VARIABLE) or not os.environ.get(_COUNTS):
        return
    assert point in POINTS, point
    here = [
        f for f in parse_faults(os.environ[VARIABLE]) if f.point == point and f.name in (None, os.environ.get(_NAME))
    ]
    for name in sorted({f.name or "" for f in here}):
        numbered = [f for f in here if (f.name or "") == name and f.n]
        passage = _count(f"{point}@{name}".replace(":", "-")) if numbered else 0
        for fault in numbered:
            if fault.n == passage:
                _act(fault)
    for fault in here:
        if fault.n == 0 and _disarmed(point.replace(":", "-")):
            _act(fault)


def _count(key: str) -> int:
    """The number of this passage, from 1; each is given out once, whatever the process."""
    number = 0
    while True:
        number += 1
        try:
            Path(os.environ[_COUNTS], f"{key}-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return number


def _disarmed(key: str) -> bool:
    armed = Path(os.environ[_COUNTS], f"{key}.armed")
    try:
        armed.rename(armed.with_suffix(".reached"))
    except FileNotFoundError:
        return False
    return True


def _act(fault: Fault) -> None:
    if fault.action == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "hang":
        time.sleep(10**7)
    elif fault.action == "error":
        raise FaultInjected(f"{fault.point} failed because {VARIABLE} asks for it")
    elif fault.action == "held":
        go, started = Path(os.environ[_COUNTS], f"{fault.point.replace(':', '-')}.go"), time.monotonic()
        while not go.exists() and time.monotonic() < started + 600:
            time.sleep(0.05)
    else:
        time.sleep(float(fault.action.partition("=")[2] or 5))
