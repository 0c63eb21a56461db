"""Twelve processes at one artifact root: of creators and committers one wins, of edits none is lost."""

import sys
from pathlib import Path

import pytest
from roots import Root

sys.path.insert(0, str(Path(__file__).parent))

from racers import RACERS, commit, count, create, create_alike, note, race

from miles_core.store.run_store import RunStore

pytestmark = pytest.mark.integration


def test_of_racing_creators_one_wins(root: Root) -> None:
    winners = [number for number, won in race(create, root.files) if won]
    assert len(winners) == 1
    assert root.get("manifest.json") == str(winners[0]).encode() * 1000


def test_of_racing_creators_of_the_same_content_one_wins(root: Root) -> None:
    """The bytes do not tell who wrote: an attempt's folder goes to one of those who begin the same work."""
    assert sorted(race(create_alike, root.files)) == [False] * (RACERS - 1) + [True]


def test_racing_committers_of_a_stage_agree_on_one_manifest(root: Root) -> None:
    store = RunStore(root.files, "r")
    attempt = store.open_attempt("rollout", 0, "f" * 64, {}, resumable=True)
    manifests = race(commit, store, attempt)
    assert len([name for name in root.names() if "/data/" in name]) == RACERS
    assert [name for name in root.names() if name.endswith("manifest.json")] == [attempt.path("manifest.json")]
    assert manifests == [manifests[0]] * RACERS
    assert store.committed("rollout", 0) == manifests[:1]


def test_of_racing_edits_none_is_lost(root: Root) -> None:
    seen = race(count, root.files)
    assert root.get("counter") == b"240"
    assert sorted(count for counts in seen for count in counts) == list(range(1, 241))


def test_racing_writers_of_a_run_record_keep_each_others_changes(root: Root) -> None:
    store = RunStore(root.files, "r")
    store.create_record({"recipe": "tiny", "config": {}, "meaning": {}})
    race(note, root.files)
    record = store.record()
    assert record is not None
    assert {name: record[name] for name in record if name.startswith("by-")} == {f"by-{i}": 2 for i in range(RACERS)}
    assert record["recipe"] == "tiny"
