"""The command `miles`. Exit codes: 0 done, 2 refused input, 1 failed (resumable, says how)."""

import os
import signal
import sys
import traceback
from typing import Any, NoReturn

import httpx
import typer

from flows.cli import (
    config,
    doctor,
    down,
    evaluate,
    fork,
    gallery,
    lineage,
    make_tiny,
    query,
    remove,
    rerun,
    rescore,
    runs,
    show,
    stop,
    train,
    up,
)
from miles_core.errors import InputError, StageError
from miles_core.store.files import DamagedError

app = typer.Typer(
    name="miles",
    help="RL post-training for image diffusion models as a pipeline with checkpointed stages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Typer brings its own click and exports of its usage errors only this one.
USAGE_ERROR: Any = typer.BadParameter.__base__
# What Typer makes of KeyboardInterrupt.
_INTERRUPTED = 130
ANY_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
app.command("train", context_settings=ANY_FLAGS)(train.train)
app.command("doctor", context_settings=ANY_FLAGS)(doctor.doctor)
app.command("rerun", context_settings=ANY_FLAGS)(rerun.rerun)
app.command("rescore", context_settings=ANY_FLAGS)(rescore.rescore)
app.command("fork", context_settings=ANY_FLAGS)(fork.fork)
app.command("evaluate", context_settings=ANY_FLAGS)(evaluate.evaluate)
app.command("show")(show.show)
app.command("runs")(runs.runs)
app.command("gallery")(gallery.gallery)
app.command("query")(query.query)
app.command("lineage")(lineage.lineage)
app.command("config", context_settings=ANY_FLAGS)(config.config)
app.command("make-tiny")(make_tiny.make_tiny)
app.command("stop")(stop.stop)
app.command("remove")(remove.remove)
app.command("up")(up.up)
app.command("down")(down.down)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command; every refusal is one sentence and exit code 2, every failure names the way on."""
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(_run(app, sys.argv[1:] if arguments is None else arguments))


def _run(command: Any, arguments: list[str]) -> int:
    try:
        result = command(arguments, standalone_mode=False)
    except InputError as fault:
        return _say(str(fault), 2)
    except USAGE_ERROR as fault:
        sentence = " ".join(str(fault.format_message()).split())
        return _say(f"{sentence} See `miles --help`.", 2)
    except (KeyboardInterrupt, typer.Abort):
        return _say("interrupted; run the same command again to resume", 1)
    except (StageError, DamagedError, OSError) as fault:
        return _say(f"{fault}" if "again" in str(fault) else f"{fault}; run the same command again to resume", 1)
    except httpx.HTTPError as fault:
        code = _say(
            f"the Prefect server stopped answering ({type(fault).__name__}); what was committed is kept, run the same "
            "command again to resume",
            1,
        )
        # Prefect's own threads would go on trying to send the rest to it.
        sys.stdout.flush()
        os._exit(code)
    except Exception as fault:
        traceback.print_exc()
        return _say(f"{type(fault).__name__}: {fault}; run the same command again to resume", 1)
    if result == _INTERRUPTED:
        return _say("interrupted; run the same command again to resume", 1)
    return result if isinstance(result, int) else 0


def _say(sentence: str, code: int) -> int:
    # A path that is no text may be part of the sentence.
    print(f"miles: {sentence}".encode(errors="backslashreplace").decode(), file=sys.stderr, flush=True)
    return code


def _terminate(number: int, frame: Any) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
