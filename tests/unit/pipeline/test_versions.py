"""A changed program or library is told where its earlier results are reused."""

import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
from lines import Line

import miles_core
from miles_core.errors import InputError, StageError
from miles_core.pipeline import run, stage
from miles_core.pipeline.run import plan_run
from miles_core.pipeline.stage import library_versions, program_version, versions_told


@pytest.fixture
def fresh() -> None:
    program_version.cache_clear()


def test_a_changed_scorer_is_another_version(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = program_version()
    copy = tmp_path / "miles_core"
    shutil.copytree(miles_core.__path__[0], copy)
    monkeypatch.setattr(stage.miles_core, "__path__", [str(copy)])
    program_version.cache_clear()
    assert program_version() == before
    scorer = copy / "rewards/jpeg.py"
    scorer.write_text(scorer.read_text().replace("/ 500", "/ 501"))
    program_version.cache_clear()
    changed = program_version()
    assert changed != before
    assert versions_told({"miles": before}, library_versions()) == [f"miles {before} → {changed}"]
    program_version.cache_clear()


def test_what_was_not_recorded_then_is_no_change() -> None:
    assert versions_told({}, library_versions()) == []
    assert versions_told(library_versions(), library_versions()) == []


def test_other_versions_are_refused_where_that_is_asked_for(three: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    careful = three.config.replace(refuse_other_versions=True)
    plan_run(careful, "tiny")
    before = three.root.names()
    changed = library_versions() | {"torch": "0.1"}
    for module in (run, stage):
        monkeypatch.setattr(module, "library_versions", lambda: changed)
    with pytest.raises(InputError, match=r"run parent was begun with other versions \(torch .* → 0.1\)"):
        plan_run(careful, "tiny")
    with pytest.raises(StageError, match=r"parent/.*stage=rewards/\w+ was made by other versions \(torch"):
        three.stage(three.step(1, refuse_other_versions=True), "rewards")
    assert three.stage(three.step(1), "rewards").reason == f"same fingerprint, same inputs, other versions: {torch()}"
    assert three.root.names() == before


def torch() -> str:
    return f"torch {version('torch')} → 0.1"
