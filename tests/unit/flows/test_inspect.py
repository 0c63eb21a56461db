"""The flow inspect on a real server: what it lays out, and that a fault leaves nothing but its own artifact."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from prefect.client.orchestration import get_client
from prefect.testing.utilities import prefect_test_harness
from synthetic_run import SyntheticRun, synthetic_run

from flows.inspect import Question, inspect
from miles_core.errors import InputError
from miles_core.store.files import Files
from miles_core.store.questions import QUESTIONS


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    with prefect_test_harness(server_startup_timeout=180):
        yield


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("MILES_HOME", str(tmp_path / "home"))
    return str(tmp_path / "runs")


def artifacts(run: str) -> dict[str, Any]:
    with get_client(sync_client=True) as client:
        found = client._client.post("/artifacts/latest/filter", json={"limit": 200}).json()
    return {one["key"].removeprefix(f"{run}-"): one["data"] for one in found if one["key"].startswith(f"{run}-")}


def test_the_form_offers_every_ready_question() -> None:
    assert set(get_args(Question)) == set(QUESTIONS)


def test_all_that_is_asked_for_is_laid_out_and_told_in_the_log(root: str, caplog: pytest.LogCaptureFixture) -> None:
    synthetic_run(Files(root), "whole", 2, 2, 4, 8)
    with caplog.at_level(logging.INFO):
        inspect("whole", "1", ("unscored", "reward-by-iteration"), "SELECT 7 AS n", True, root)
    keys = {"reward-curve", "iterations", "samples", "unscored", "reward-by-iteration", "sql", "gallery"}
    assert set(artifacts("whole")) == keys
    log = "\n".join(record.getMessage() for record in caplog.records)
    for line in (
        "whole: 2 iterations",
        "images of iteration 1",
        "unscored: 0 rows",
        "iteration: 2 rows",
        "sql: 1 rows",
    ):
        assert line in log
    assert "images of iteration 0" not in log and "whole.html" in log


FAULTS = {
    "refused": {"sql": "SELECT rewrd FROM rewards"},
    "late": {"sql": "SELECT CAST(worker AS INT) FROM rewards"},
    "nothing": {"iterations": "5"},
}


@pytest.mark.parametrize("run", FAULTS)
def test_a_fault_leaves_nothing_but_its_own_artifact(run: str, root: str) -> None:
    synthetic_run(Files(root), run, 1, 1, 2, 8)
    with pytest.raises(InputError):
        inspect(run, artifact_root=root, **FAULTS[run])
    assert set(artifacts(run)) == {"inspect-fault"}


def test_a_run_without_iterations_is_refused(root: str) -> None:
    SyntheticRun(Files(root), "empty", 1, 2).draw_line()
    with pytest.raises(InputError, match="no iteration yet"):
        inspect("empty", artifact_root=root)
    assert set(artifacts("empty")) == {"inspect-fault"}
