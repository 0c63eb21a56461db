"""Twelve processes at one artifact root: of creators and committers one wins, of edits none is lost."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
from roots import Root

from miles_core.store.files import Files
from miles_core.store.parts import write_file
from miles_core.store.run_store import Attempt, RunStore

pytestmark = pytest.mark.integration
RACERS = 12


def race(work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What each of twelve processes returns; they begin together."""
    context = multiprocessing.get_context("fork")
    answers, barrier = context.Queue(), context.Barrier(RACERS)

    def run(number: int) -> None:
        barrier.wait(30)
        answers.put(work(number, *arguments))

    racers = [context.Process(target=run, args=(number,)) for number in range(RACERS)]
    for racer in racers:
        racer.start()
    found = [answers.get(timeout=400) for _ in racers]
    for racer in racers:
        racer.join()
    assert [racer.exitcode for racer in racers] == [0] * RACERS
    return found


def _create(number: int, files: Files) -> tuple[int, bool]:
    return number, files.create("manifest.json", str(number).encode() * 1000)


def test_of_racing_creators_one_wins(root: Root) -> None:
    winners = [number for number, won in race(_create, root.files) if won]
    assert len(winners) == 1
    assert root.get("manifest.json") == str(winners[0]).encode() * 1000


def _create_alike(number: int, files: Files) -> bool:
    return files.create("attempt.json", b"{}")


def test_of_racing_creators_of_the_same_content_one_wins(root: Root) -> None:
    """The bytes do not tell who wrote: an attempt's folder goes to one of those who begin the same work."""
    assert sorted(race(_create_alike, root.files)) == [False] * (RACERS - 1) + [True]


def _commit(number: int, store: RunStore, attempt: Attempt) -> Any:
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


def test_racing_committers_of_a_stage_agree_on_one_manifest(root: Root) -> None:
    store = RunStore(root.files, "r")
    attempt = store.open_attempt("rollout", 0, "f" * 64, {}, resumable=True)
    manifests = race(_commit, store, attempt)
    assert len([name for name in root.names() if "/data/" in name]) == RACERS
    assert [name for name in root.names() if name.endswith("manifest.json")] == [attempt.path("manifest.json")]
    assert manifests == [manifests[0]] * RACERS
    assert store.committed("rollout", 0) == manifests[:1]


def _count(number: int, files: Files) -> list[int]:
    return [int(files.edit("counter", lambda data: b"%d" % (int(data or 0) + 1)) or 0) for _ in range(20)]


def test_of_racing_edits_none_is_lost(root: Root) -> None:
    seen = race(_count, root.files)
    assert root.get("counter") == b"240"
    assert sorted(count for counts in seen for count in counts) == list(range(1, 241))


def _note(number: int, files: Files) -> None:
    store = RunStore(files, "r")
    for turn in range(3):
        store.update_record(**{f"by-{number}": turn})


def test_racing_writers_of_a_run_record_keep_each_others_changes(root: Root) -> None:
    store = RunStore(root.files, "r")
    store.create_record({"recipe": "tiny", "config": {}, "meaning": {}})
    race(_note, root.files)
    record = store.record()
    assert record is not None
    assert {name: record[name] for name in record if name.startswith("by-")} == {f"by-{i}": 2 for i in range(RACERS)}
    assert record["recipe"] == "tiny"
