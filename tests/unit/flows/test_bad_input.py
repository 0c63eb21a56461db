"""Bad input on the command line: one sentence (what, where, what to do), exit 2, nothing half-written."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from deployments.recipes import recipe
from flows.cli import main as cli
from flows.cli.server import ensure_server
from miles_core.errors import InputError
from miles_core.pipeline.run import begin_run, plan_run
from miles_core.store.files import Files
from miles_core.store.run_store import RunStore

BUSY = socket.socket()
BUSY.bind(("127.0.0.1", 0))
BUSY.listen()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PREFECT_API_URL", "MILES_ARTIFACT_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MILES_HOME", str(tmp_path / "home"))
    return tmp_path


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The sentence that a refused command prints."""
    code = cli._run(cli.app, list(arguments))
    out, err = capsys.readouterr()
    assert code == 2, out + err
    assert out == ""
    assert err.startswith("miles: ") and err.count("\n") == 1, err
    return err


def lines(*rows: object) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


PROMPTS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "bad JSON": (b'{"input": "a"}\n{"input": \n', ("p.jsonl", "line 2")),
    "no object": (b'{"input": "a"}\n[1]\n', ("p.jsonl", "line 2")),
    "no key": (lines({"text": "a"}), ("line 1", "input", "text")),
    "empty prompt": (lines({"input": "a"}, {"input": "  "}), ("line 2",)),
    "prompt of another type": (lines({"input": 3}), ("line 1",)),
    "metadata of another type": (lines({"input": "a", "metadata": 3}), ("line 1", "metadata")),
    "unknown reward": (lines({"input": "a", "metadata": {"rm_type": "nope"}}), ("line 1", "nope")),
    "no quoted target": (lines({"input": "a", "metadata": {"rm_type": "ocr"}}), ("line 1", "quotes")),
    "empty target": (lines({"input": 'a " " b', "metadata": {"rm_type": "ocr"}}), ("line 1",)),
    "not UTF-8": (b'{"input": "a"}\n{"input": "\xff"}\n', ("line 2", "UTF-8")),
    "nothing": (b"", ("p.jsonl",)),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts(kind: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, words = PROMPTS[kind]
    (home / "p.jsonl").write_bytes(data)
    sentence = refuse(capsys, "train", "tiny", "--prompt-data", str(home / "p.jsonl"))
    assert all(word in sentence for word in words), sentence
    assert not (home / "home").exists()


Prepare = Callable[[Path], list[str]]
COMMANDS: dict[str, tuple[Prepare, tuple[str, ...]]] = {
    "unknown flag": (lambda home: ["train", "tiny", "--num-rolout", "3"], ("--num-rolout", "--num-rollout")),
    "flag of the reference that is not there": (
        lambda home: ["train", "tiny", "--use-ema"],
        ("--use-ema", "not there yet"),
    ),
    "wrong type": (lambda home: ["train", "tiny", "--lr", "fast"], ("--lr", "fast")),
    "value out of range": (lambda home: ["train", "tiny", "--num-rollout", "0"], ("--num-rollout",)),
    "missing value": (lambda home: ["train", "tiny", "--lr"], ("--lr",)),
    "stray word": (lambda home: ["train", "tiny", "fast"], ("fast",)),
    "broken batch invariant": (
        lambda home: ["train", "tiny", "--num-steps-per-rollout", "3"],
        ("rollout_batch_size", "--num-steps-per-rollout 3"),
    ),
    "options before the recipe": (lambda home: ["train", "--num-rollout", "1", "tiny"], ("before the options",)),
    "no recipe": (lambda home: ["train"], ("recipe",)),
    "unknown recipe": (lambda home: ["train", "nope"], ("nope", "tiny")),
    "missing model": (lambda home: ["train", "tiny", "--hf-checkpoint", str(home / "none")], ("none",)),
    "folder without a model": (lambda home: ["train", "tiny", "--hf-checkpoint", str(home)], ("model_index.json",)),
    "hub id": (
        lambda home: ["train", "tiny", "--hf-checkpoint", "stabilityai/sd3"],
        ("stabilityai/sd3", "hf download"),
    ),
    "missing prompts": (lambda home: ["train", "tiny", "--prompt-data", str(home / "none.txt")], ("none.txt",)),
    "run id that leads outside": (lambda home: ["train", "tiny", "--run-id", "../../x"], ("../../x",)),
    "artifact root that is a file": (
        lambda home: ["train", "tiny", "--artifact-root", _file(home)],
        ("--artifact-root", "is a file"),
    ),
    "artifact root of another kind": (
        lambda home: ["train", "tiny", "--artifact-root", "gs://bucket"],
        ("--artifact-root gs://bucket", "s3://BUCKET"),
    ),
    "artifact root without a bucket": (
        lambda home: ["train", "tiny", "--artifact-root", "s3://"],
        ("--artifact-root s3://", "no name of a bucket"),
    ),
    "artifact root with a bucket's wrong name": (
        lambda home: ["train", "tiny", "--artifact-root", "s3://My Bucket/x"],
        ("My Bucket", "no name of a bucket"),
    ),
    "artifact root that leads out of its prefix": (
        lambda home: ["train", "tiny", "--artifact-root", "s3://bucket/a/../b"],
        ("s3://bucket/a/../b", "prefix"),
    ),
    "no such user's folder": (
        lambda home: ["train", "tiny", "--prompt-data", "~nosuchuser/p"],
        ("--prompt-data", "no path"),
    ),
    "artifact root of no such user": (
        lambda home: ["train", "tiny", "--artifact-root", "~nosuchuser"],
        ("--artifact-root", "no path"),
    ),
    "name that is too long": (lambda home: ["train", "tiny", "--prompt-data", "x" * 5000], ("--prompt-data",)),
    "name that is no text": (lambda home: ["train", "tiny", "--prompt-data", "\udcff"], ("--prompt-data",)),
    "empty run id": (lambda home: ["train", "tiny", "--run-id", ""], ("--run-id", "empty")),
    "empty artifact root": (lambda home: ["train", "tiny", "--artifact-root", ""], ("--artifact-root", "empty")),
    "huge batch": (lambda home: ["train", "tiny", "--rollout-batch-size", "1" + "0" * 20], ("--rollout-batch-size",)),
    "huge time-out": (
        lambda home: ["train", "tiny", "--distributed-timeout-minutes", "1" + "0" * 15],
        ("--distributed-timeout-minutes",),
    ),
    "cps noise above its range": (
        lambda home: ["train", "tiny", "--diffusion-sde-type", "cps", "--diffusion-noise-level", "2.5"],
        ("--diffusion-noise-level 2.5", "cps"),
    ),
    "show of no run": (lambda home: ["show", "nope"], ("nope", "miles runs")),
    "show of a run that leads outside": (lambda home: ["show", "../x"], ("../x",)),
    "rerun of no run": (lambda home: ["rerun", "nope", "0", "rewards"], ("nope",)),
    "rerun of an unknown stage": (lambda home: ["rerun", "nope", "0", "reward"], ("reward", "rewards")),
    "rerun of sync": (lambda home: ["rerun", "nope", "0", "sync"], ("sync",)),
    "rerun with a change of another stage": (
        lambda home: ["rerun", "nope", "0", "rewards", "--lr", "1"],
        ("--lr", "update", "--downstream"),
    ),
    "rerun of iterations that are no range": (
        lambda home: ["rerun", "nope", "0:1:2", "rewards"],
        ("0:1:2", "FIRST:END"),
    ),
    "fork of no run": (lambda home: ["fork", "nope", "0", "--run-id", "x"], ("nope",)),
    "fork without a name": (lambda home: ["fork", "nope", "0"], ("--run-id",)),
    "lineage of no run": (lambda home: ["lineage", "nope", "0", "0"], ("nope", "miles runs")),
    "query of no run": (lambda home: ["query", "SELECT 1", "--run", "nope"], ("nope", "miles runs")),
    "query that writes": (lambda home: ["query", f"COPY (SELECT 1) TO '{home}/x.csv'"], ("COPY", "SELECT")),
    "query with a fault": (lambda home: ["query", "SELECT 1 frm x"], ("line 1, column 14",)),
    "unknown question": (lambda home: ["query", "--question", "best"], ("best", "best-groups")),
    "SQL and a question": (lambda home: ["query", "SELECT 1", "--question", "best-groups"], ("--question",)),
    "unknown output": (lambda home: ["query", "SELECT 1", "--output", "xml"], ("xml", "parquet")),
    "parquet without a file": (lambda home: ["query", "SELECT 1", "--output", "parquet"], ("--file",)),
    "query into a file that is there": (
        lambda home: ["query", "SELECT 1", "--output", "csv", "--file", _file(home)],
        ("--file", "exists already"),
    ),
    "rerun of evaluation": (lambda home: ["rerun", "nope", "0", "evaluation"], ("miles evaluate",)),
    "rerun with an option of evaluation": (
        lambda home: ["rerun", "nope", "0", "rewards", "--diffusion-eval-num-steps", "4"],
        ("--diffusion-eval-num-steps", "miles evaluate"),
    ),
    "evaluation on no set": (lambda home: ["train", "tiny", "--eval-interval", "1"], ("--eval-prompt-data",)),
    "missing evaluation prompts": (
        lambda home: ["train", "tiny", "--eval-prompt-data", "held-out", str(home / "none.txt")],
        ("none.txt", "--eval-prompt-data"),
    ),
    "evaluation set of a wrong name": (
        lambda home: ["train", "tiny", "--eval-prompt-data", "held/out", str(home / "none.txt")],
        ("held/out", "NAME PATH"),
    ),
    "evaluate no run": (lambda home: ["evaluate", "nope", "0"], ("nope", "miles runs")),
    "evaluate with an option of training": (lambda home: ["evaluate", "nope", "--lr", "1"], ("--lr", "evaluation")),
    "server on a busy port": (lambda home: ["up", "--port", str(BUSY.getsockname()[1])], ("--port", "give another")),
    "server on a port that is none": (lambda home: ["up", "--port", "99999"], ("99999",)),
    "server on an address that is not here": (lambda home: ["up", "--host", "192.0.2.7"], ("192.0.2.7",)),
    "server with a database that is none": (lambda home: ["up", "--database", "mysql://u:secret@h/x"], ("postgresql",)),
    "carry on a run without its name": (lambda home: ["train", "same"], ("--run-id",)),
    "carry on no run": (lambda home: ["train", "same", "--run-id", "nope"], ("nope", "miles runs")),
    "a run id that leads outside": (lambda home: ["train", "tiny", "--run-id", "../../x"], ("../../x", "letters")),
    "show of a run id that leads outside": (lambda home: ["show", "../../x"], ("../../x", "letters")),
    "fork to a run id that leads outside": (lambda home: ["fork", "../../x", "0", "--run-id", "y"], ("../../x",)),
    "gallery of no run": (lambda home: ["gallery", "nope"], ("nope", "miles runs")),
    "unknown command": (lambda home: ["trian"], ("trian",)),
    "unknown family": (lambda home: ["make-tiny", "flux", str(home / "m")], ("flux",)),
    "tiny model over a folder that is not empty": (lambda home: ["make-tiny", "sd3", _folder(home)], ("full",)),
}


def _file(home: Path) -> str:
    (home / "file").write_text("kept")
    return str(home / "file")


def _folder(home: Path) -> str:
    (home / "full").mkdir()
    (home / "full" / "file").write_text("kept")
    return str(home / "full")


@pytest.mark.parametrize("kind", COMMANDS)
def test_commands(kind: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare, words = COMMANDS[kind]
    arguments = prepare(home)
    before = sorted(p for p in home.rglob("*"))
    sentence = refuse(capsys, *arguments)
    assert all(word in sentence for word in words), sentence
    assert sorted(p for p in home.rglob("*")) == before


def test_an_environment_variable_of_no_field(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILES_SCRIPT_NUM_ROLOUT", "2")
    assert "MILES_SCRIPT_NUM_ROLOUT" in refuse(capsys, "train", "tiny")


@pytest.mark.parametrize("iteration", ["one", "7", "1.0", "9" * 5000])
@pytest.mark.parametrize("command", ["show", "rerun"])
def test_an_iteration_that_is_not_there(
    command: str, iteration: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = recipe("tiny").model_dump(mode="json")
    store = RunStore(Files(str(home / "home" / "artifacts")), "r")
    store.create_record({"recipe": "tiny", "config": config, "meaning": {}})
    store.files.create("r/iteration=000000/stage=prompts/x/attempt.json", b"{}")
    assert "no iteration" in refuse(capsys, command, "r", iteration, "rewards")


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:1/api", "nonsense"])
def test_a_prefect_address_that_does_not_answer(
    url: str, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", url)
    with pytest.raises(InputError, match="no Prefect server answers"):
        ensure_server()


def test_evaluate_says_what_policies_and_sets_there_are(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = RunStore(Files(str(home / "home" / "artifacts")), "r")
    (home / "p.txt").write_text("a cat\n")
    (home / "model").mkdir()
    (home / "model" / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    config = recipe("tiny").replace(prompt_data=str(home / "p.txt"), hf_checkpoint=str(home / "model"))
    recorded = {"fields": {}, "inputs": {}}
    store.create_record({"recipe": "tiny", "config": config.model_dump(mode="json"), "meaning": recorded})
    assert "names no evaluation set" in refuse(capsys, "evaluate", "r")
    for iteration in ((), ("7",), ("init",), ("-1",)):
        sentence = refuse(capsys, "evaluate", "r", *iteration, "--eval-prompt-data", "tiny")
        assert "latest or init" in sentence or "-1" in sentence, sentence


def test_paths_are_recorded_as_they_are_found_from_any_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "p.txt").write_text("a cat\n")
    (home / "model").mkdir()
    (home / "model" / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    monkeypatch.chdir(home)
    config = recipe("tiny").replace(
        prompt_data="p.txt", hf_checkpoint="model", eval_prompt_data="drawn p.txt\nown p.txt"
    )
    planned = plan_run(config, "tiny")
    begin_run(planned, "tiny", str(home))
    record = planned.store.record()
    assert record is not None
    assert record["config"]["data"]["prompt_data"] == str(home / "p.txt")
    assert record["config"]["evaluation"]["eval_prompt_data"] == f"drawn {home / 'p.txt'}\nown {home / 'p.txt'}"
    assert record["config"]["rollout"]["hf_checkpoint"] == str(home / "model")
