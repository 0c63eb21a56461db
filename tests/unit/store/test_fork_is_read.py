"""A fork's iterations that lie in another run are read as its own: by queries, lineage and the run's history."""

from typing import Any

import pytest
from roots import Root
from synthetic_run import SyntheticRun

from miles_core.observe.history import History
from miles_core.observe.rows import on_line
from miles_core.store.line import entry, slot
from miles_core.store.lineage import trace
from miles_core.store.run_store import RunStore
from miles_core.store.sql import Database
from miles_core.store.stages import ITERATION_STAGES


@pytest.fixture
def fork(root: Root) -> RunStore:
    """A fork of run r, of whose two iterations it keeps the first and of the second prompts and rollout."""
    parent = SyntheticRun(root.files, "r", 2, 4)
    for iteration in range(2):
        parent.iterate(iteration)
    store = parent.draw_line()
    places: list[Any] = [("policy", -1), *((stage, 0) for stage in ITERATION_STAGES), ("prompts", 1), ("rollout", 1)]
    kept = {slot(*place): store.on_line(*place) for place in places}
    child = RunStore(root.files, "fork")
    child.create_record(
        {
            **{key: (store.record() or {})[key] for key in ("recipe", "config", "meaning")},
            "line": {place: entry(m, "fork") for place, m in kept.items() if m},
            "parent": {"run": "r", "kept": {place: m.content_digest for place, m in kept.items() if m}},
        }
    )
    return child


def told(fork: RunStore, sql: str, runs: tuple[str, ...] = ("fork",), **options: Any) -> list[dict[str, Any]]:
    database = Database(fork.files, runs, sql, **options)
    rows = [row for batch in database.read(database.run()) for row in batch.to_pylist()]
    assert database.notes == []
    return rows


COUNT = "SELECT run, iteration, count(*) AS n FROM {} GROUP BY ALL ORDER BY ALL"


@pytest.mark.parametrize("view", ["rewards", "rewards_all"])
def test_a_query_finds_what_a_fork_keeps_under_its_own_name(fork: RunStore, view: str) -> None:
    assert told(fork, COUNT.format(view)) == [{"run": "fork", "iteration": 0, "n": 8}]
    both = [{"run": run, "iteration": i, "n": 8} for run, i in (("fork", 0), ("r", 0), ("r", 1))]
    assert told(fork, COUNT.format(view), ("r", "fork")) == both


def test_what_a_fork_keeps_is_counted_once_by_its_attempt(fork: RunStore) -> None:
    once = "SELECT count(*) AS n FROM (SELECT DISTINCT ON (attempt, sample_index) reward FROM rewards)"
    assert told(fork, once, ("r", "fork")) == [{"n": 16}]


def test_samples_of_a_fork_are_joined_across_the_runs(fork: RunStore) -> None:
    rows = told(
        fork,
        "SELECT run, iteration, count(engine) AS made, count(reward) AS scored FROM samples GROUP BY ALL ORDER BY ALL",
    )
    assert rows == [
        {"run": "fork", "iteration": 0, "made": 8, "scored": 8},
        {"run": "fork", "iteration": 1, "made": 8, "scored": 0},
    ]


def test_lineage_follows_the_policy_into_the_run_that_made_it(fork: RunStore) -> None:
    found = trace(fork, 1, 9)
    assert [(p["stage"], p["iteration"], "missing" in p) for p in found.policies] == [
        ("update", 0, False),
        ("policy", -1, False),
    ]
    assert found.stages["rollout"]["stale"] == [] and "not committed" in found.stages["rewards"]["missing"]


def test_the_history_and_the_images_of_a_fork_begin_with_its_parents(fork: RunStore) -> None:
    assert {i: m.held_by for i, m in on_line(fork, "rollout").items()} == {0: "r", 1: "r"}
    history = History(fork)
    history.refresh()
    assert len(history.points()) == 1 and len(history.table(300)) == 2
    read = dict(history._read)
    history.refresh()
    assert all(history._read[key] is read[key] for key in read), "what was read is not read again"
