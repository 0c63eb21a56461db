"""A run iteration by iteration: what the line names, each manifest read once."""

import json
from dataclasses import replace

import pytest
from roots import Root
from synthetic_run import synthetic_run

from miles_core.observe.history import History
from miles_core.store.run_store import RunStore


@pytest.fixture
def store(root: Root) -> RunStore:
    synthetic_run(root.files, "r", 3, 2, 2, 8)
    return RunStore(root.files, "r")


def test_rows_are_the_iterations_the_newest_first(store: RunStore) -> None:
    history = History(store)
    history.refresh()
    rows = history.table(2)
    assert [row["iteration"] for row in rows] == [2, 1]
    rewards = store.on_line("rewards", 2)
    assert rewards is not None
    assert rows[0]["reward"] == f"{rewards.summary['reward_mean']:.4g}"
    assert {"groups without spread", "loss", "rollout, s"} <= rows[0].keys()
    json.dumps(rows, allow_nan=False)
    assert [point.iteration for point in history.points()] == [0, 1, 2]


def test_a_manifest_is_read_once_and_a_moved_line_again(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(store)
    history.refresh()
    with monkeypatch.context() as unread:
        unread.setattr(RunStore, "manifest", None)
        history.refresh()
    assert len(history.points()) == 3
    store.update_record(lambda record: record | {"line": record["line"] | {"000001/rewards": "0" * 12}})
    history.refresh()
    assert history.on_line("rewards", 1) is None
    assert [point.iteration for point in history.points()] == [0, 2]


def test_evaluations_are_curves_and_columns(store: RunStore) -> None:
    history = History(store)
    history.refresh()
    assert history.evaluations() == {}
    made = store.on_line("rewards", 0)
    assert made is not None
    for iteration, mean in ((-1, 0.25), (1, 0.5)):
        summary = {"sets": {"held-out": {"reward_mean": mean}}}
        history._read["evaluation", iteration] = replace(made, stage="evaluation", iteration=iteration, summary=summary)
    assert history.evaluations() == {"evaluation: held-out": {-1: 0.25, 1: 0.5}}
    assert [row.get("evaluation: held-out") for row in history.table(3)] == ["", "0.5", ""]
