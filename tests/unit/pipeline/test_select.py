"""Which iterations a rerun is for."""

from typing import Any

import pytest
from lines import Line
from roots import Root

from miles_core.errors import InputError
from miles_core.pipeline.select import check_form, select
from miles_core.store.lock import RunLock

REWARDS: Any = ("rewards",)


@pytest.fixture
def run(three: Line) -> Line:
    """Three iterations, the third of which has a rollout and no rewards."""
    lost = ("rewards", "advantages", "update", "sync")
    for name in three.root.names():
        if any(f"iteration=000002/stage={stage}" in name for stage in lost):
            three.root.remove(name)
    slots = {f"000002/{stage}" for stage in lost}
    three.store.update_record(lambda r: r | {"line": {k: v for k, v in r["line"].items() if k not in slots}})
    return three


def chosen(run: Line, given: str, stages: Any = REWARDS, **changes: Any) -> tuple[int, ...]:
    return select(run.step(0, moves_line=False, **changes), given, stages).iterations


@pytest.mark.parametrize(
    ("given", "iterations"),
    [
        ("1", (1,)),
        ("latest", (1,)),
        ("latest:1", (1,)),
        ("latest:9", (0, 1)),
        ("0:2", (0, 1)),
        (":1", (0,)),
        ("1:", (1, 2)),
        ("0:50", (0, 1, 2)),
        (":", (0, 1, 2)),
        ("failed", (2,)),
        ("unscored", (2,)),
    ],
)
def test_of_a_run_that_nobody_trains(run: Line, given: str, iterations: tuple[int, ...]) -> None:
    assert chosen(run, given) == iterations


def test_what_a_live_run_has_not_finished_is_left_out_unless_it_is_named(run: Line) -> None:
    lock = RunLock(run.store.files, run.store.run)
    lock.take()
    whole = select(run.step(0, moves_line=False), "0:50", REWARDS)
    assert whole.iterations == (0, 1) and whole.left_out == (2,) and whole.many
    for rule in ("failed", "unscored"):
        found = select(run.step(0, moves_line=False), rule, REWARDS)
        assert found.iterations == () and found.left_out == (2,)
    assert chosen(run, "2") == (2,) and chosen(run, "latest") == (1,)
    lock.release()
    assert chosen(run, "0:50") == (0, 1, 2)


def test_unscored_asks_for_rewards_of_the_kind_that_the_options_give(run: Line) -> None:
    other = {"rm_type": "jpeg_incompressibility"}
    assert chosen(run, "unscored", **other) == (0, 1, 2)
    run.stage(run.step(1, moves_line=False, **other), "rewards")
    assert chosen(run, "unscored", **other) == (0, 2)
    assert chosen(run, "unscored") == (2,)


def test_failed_is_missing_damaged_or_begun_and_never_committed(run: Line, root: Root) -> None:
    assert chosen(run, "failed", ("advantages",)) == (2,)
    advantages = run.store.on_line("advantages", 0)
    assert advantages
    root.remove(advantages.parts[0].path)
    assert chosen(run, "failed", ("advantages",)) == (0, 2)
    assert chosen(run, "failed", ("rewards", "advantages", "update")) == (0, 2)
    begun = run.store.open_attempt("rewards", 1, "a" * 64, {}, resumable=False)
    assert chosen(run, "failed") == (1, 2)
    second = run.store.open_attempt("rewards", 1, "a" * 64, {}, resumable=False)
    assert second.name == f"{begun.name}.2"
    nothing: dict[str, Any] = {"upstream": {}, "affecting_config": {}, "inputs": {}, "versions": {}, "summary": {}}
    run.store.commit(second, parts=[], started_at=0.0, flow_run_id=None, **nothing)
    assert chosen(run, "failed") == (2,)


@pytest.mark.parametrize("given", ["one", "-1", "1.0", "latest:0", "0:1:2", "", "9" * 5000, "7:9"])
def test_what_names_no_iteration_is_refused(run: Line, given: str) -> None:
    with pytest.raises(InputError, match="no iteration"):
        select(run.step(0, moves_line=False), given, REWARDS)


def test_unscored_is_a_rule_for_rewards() -> None:
    with pytest.raises(InputError, match="rerun rewards, not update"):
        check_form("unscored", "update")


def test_a_run_that_has_just_begun_has_no_newest_iteration(run: Line) -> None:
    run.store.update_record(lambda record: record | {"line": {}})
    for given in ("latest", "latest:3"):
        assert chosen(run, given) == ()
