"""`miles doctor` as it is typed: lines, JSON, exit codes, and nothing left in the artifact root."""

import json
from pathlib import Path

import pytest

from flows.cli import main as cli
from miles_core.doctor.checks import CHECKS


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PREFECT_API_URL", "MILES_ARTIFACT_ROOT", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MILES_HOME", str(tmp_path / "home"))
    return tmp_path


def doctor(home: Path, tiny: Path, *more: str) -> int:
    return cli._run(cli.app, ["doctor", "tiny", "--hf-checkpoint", str(tiny), *more])


def test_lines_and_a_summary(home: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(home, tiny, "--quick") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["pass"] * (1 + sum(not c.loads_model for c in CHECKS))
    assert last.startswith(f"{len(lines)} pass, 0 warn, 0 stop · ")
    assert not (home / "home" / "artifacts").exists()


def test_a_fault_stops_and_the_other_checks_are_made(
    home: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(home, tiny, "--quick", "--lora-target-modules", "to_nowhere") == 2
    out = capsys.readouterr().out
    assert "  stop  LoRA" in out and "→ leave out --lora-target-modules" in out and "  pass  memory" in out
    assert "1 stop · " in out


def test_a_warning_is_a_stop_only_when_strict(home: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(home, tiny, "--quick", "--lr", "1e-6") == 0
    assert doctor(home, tiny, "--quick", "--lr", "1e-6", "--strict") == 2
    assert "  warn  learning rate" in capsys.readouterr().out


def test_json_is_all_of_stdout(home: Path, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(home, tiny, "--quick", "--json", "--rollout-num-engines", "9") == 0
    out, err = capsys.readouterr()
    told = json.loads(out)
    (batches,) = (check for check in told["checks"] if check["name"] == "batches")
    assert batches["status"] == "warn" and "--rollout-num-engines 8" in batches["way_out"]
    assert told["counts"]["warn"] == 1 and told["exit_code"] == 0 and "  warn  batches" in err


def test_a_configuration_that_does_not_hold_together_stops(
    home: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor(home, tiny, "--json", "--global-batch-size", "7") == 2
    (check,) = json.loads(capsys.readouterr().out)["checks"]
    assert (check["name"], check["status"]) == ("configuration", "stop") and "global_batch_size 7" in check["found"]


@pytest.mark.parametrize("arguments", [["doctor", "nope"], ["doctor", "tiny", "--lrr", "1"], ["doctor", "--quick"]])
def test_what_cannot_be_understood_is_refused(
    arguments: list[str], home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli._run(cli.app, arguments) == 2
    assert capsys.readouterr().err.startswith("miles: ")


def test_a_prefect_server_that_does_not_answer(
    home: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    assert doctor(home, tiny, "--quick") == 2
    assert (
        "  stop  Prefect server  no server answers at PREFECT_API_URL http://127.0.0.1:1/api" in capsys.readouterr().out
    )
