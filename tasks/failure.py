"""What a flow that fails leaves in the UI: what broke, what is kept, the way on."""

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from prefect.artifacts import create_markdown_artifact
from prefect.context import FlowRunContext

from miles_core.errors import InputError
from miles_core.pipeline import log
from miles_core.store.stages import STAGES
from tasks.publish import key_of

_TASKS = Path(__file__).parent
_LOG = Path(log.__file__)


@contextlib.contextmanager
def told(what: str, run: str, command: str, key: str = "failure") -> Iterator[None]:
    """Leave the artifact `RUN-key` where the block fails, and let the failure pass. `command` carries the work on."""
    try:
        yield
    except Exception as fault:
        if FlowRunContext.get() is not None and not getattr(fault, "told", False):
            with contextlib.suppress(Exception):
                _publish(what, run, command, fault, key)
                fault.told = True  # type: ignore[attr-defined]
        raise


def _publish(what: str, run: str, command: str, fault: Exception, key: str) -> None:
    where = _where(fault)
    sentence = " ".join(str(fault).split()) or type(fault).__name__
    if isinstance(fault, InputError):
        way = f"Start it again with other parameters. The same on a command line: `{command}`."
    else:
        way = f"Press **Retry**, or give the same again: `{command}`. What was committed is reused."
    text = f"## {what} failed {where}\n\n> {sentence}\n\n{way}\n\nAll stages: `miles show {run}`\n"
    create_markdown_artifact(text, key=key_of(run, key), description=f"{what} failed {where}: {sentence}"[:500])


def _where(fault: BaseException) -> str:
    if stage := _stage_of(fault):
        return f"in {stage}"
    modules = {Path(frame.filename) for frame in traceback.extract_tb(fault.__traceback__)}
    return "in logging, after its stages" if _LOG in modules else "before a stage began"


def _stage_of(fault: BaseException) -> str | None:
    """The stage in whose task it was raised, by the frames that it passed."""
    frames = traceback.extract_tb(fault.__traceback__)
    names = [Path(frame.filename).stem for frame in frames if Path(frame.filename).parent == _TASKS]
    return next((name for name in reversed(names) if name in STAGES), None)
