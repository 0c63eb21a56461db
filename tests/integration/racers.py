"""What races in processes of their own: twelve of them begin together."""

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from miles_core.store.files import Files
from miles_core.store.parts import write_file
from miles_core.store.run_store import Attempt, RunStore

RACERS = 12


def race(work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What each of twelve processes returns. A failed one fails the test with its own words."""
    # Of a server that has imported this module alone: a fork of the test process, full of libraries, may abort.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    answers, barrier = context.Queue(), context.Barrier(RACERS)
    # The server has the environment of its own start.
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    start = (answers, barrier, variables, work)
    racers = [context.Process(target=_run, args=(*start, number, arguments)) for number in range(RACERS)]
    for racer in racers:
        racer.start()
    found = [answers.get(timeout=400) for _ in racers]
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0] * RACERS
    faults = [fault for _, fault in found if fault]
    assert not faults, faults[0]
    return [answer for answer, _ in found]


def _run(
    answers: Any,
    barrier: Any,
    variables: dict[str, str],
    work: Callable[..., Any],
    number: int,
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= variables
    barrier.wait(300)
    try:
        answers.put((work(number, *arguments), None))
    except Exception as fault:
        answers.put((None, repr(fault)))


def create(number: int, files: Files) -> tuple[int, bool]:
    """Create one object with a content of one's own; whether it was this one's."""
    return number, files.create("manifest.json", str(number).encode() * 1000)


def create_alike(number: int, files: Files) -> bool:
    """Create one object with the content that all give it."""
    return files.create("attempt.json", b"{}")


def commit(number: int, store: RunStore, attempt: Attempt) -> Any:
    """Write a part and commit the attempt."""
    part = write_file(store.files, attempt.path(f"data/{number}.json"), str(number).encode())
    return store.commit(
        attempt,
        parts=[part],
        upstream={},
        affecting_config={},
        inputs={},
        versions={},
        started_at=0.0,
        summary={"by": number},
        flow_run_id=None,
    )


def count(number: int, files: Files) -> list[int]:
    """Add one to a number, twenty times; what it was after each."""
    return [int(files.edit("counter", lambda data: b"%d" % (int(data or 0) + 1)) or 0) for _ in range(20)]


def note(number: int, files: Files) -> None:
    """Write an entry of one's own into a run's record, three times."""
    store = RunStore(files, "r")
    for turn in range(3):
        store.update_record(lambda record, turn=turn: record | {f"by-{number}": turn})  # type: ignore[misc]
