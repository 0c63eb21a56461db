"""A changed program or library is told where its earlier results are reused."""

import shutil
from pathlib import Path

import pytest

import miles_core
from miles_core.pipeline import stage
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
