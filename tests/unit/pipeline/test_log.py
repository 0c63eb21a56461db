"""What is logged, where to, and that a killed or failing command neither doubles nor omits it."""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import psutil
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from roots import BucketRoot
from synthetic_run import SyntheticRun, reward_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from deployments.recipes import recipe
from miles_core.config import RunConfig
from miles_core.errors import InputError, StageError
from miles_core.observe.log_wandb import ENTRY, Wandb, wandb_folder, wandb_wanted
from miles_core.observe.logged import Ledger, key_of
from miles_core.observe.wandb_file import RunFile
from miles_core.pipeline.log import RunLog, check_logging
from miles_core.pipeline.stage import Step
from miles_core.runtime.faults import FaultInjected, arm
from miles_core.store.files import DamagedError, Files
from miles_core.store.run_store import RunStore
from miles_core.user_code import load_hook

MEAN = "rollout/reward/raw_mean"
OWN = """
import json, pathlib
import miles_core.observe.metrics as stock

def note(args, line):
    with open(pathlib.Path(args.code_path, "noted"), "a") as file:
        file.write(json.dumps(line) + "\\n")

def quiet(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    first = samples[0]
    note(args, [rollout_id, len(samples), first.prompt, first.reward, list(first.generated_output.shape), first.seed,
                sum(s.remove_sample for s in samples), sorted(rollout_extra_metrics), rollout_time > 0])
    return True

def beside(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    note(args, rollout_id)

def failing(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    note(args, rollout_id)
    if rollout_id == 1 and not pathlib.Path(args.code_path, "mended").exists():
        raise ValueError("no disk for me")

def through_wandb(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    import wandb
    wandb.log({"mine": rollout_id + 0.5})

def short(rollout_id, args, samples): return True
"""


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "MILES_FAULT", "MILES_FAULT_COUNTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MILES_HOME", str(tmp_path / "home"))
    (tmp_path / "own_logs.py").write_text(OWN)


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    """Two iterations of two groups of four."""
    made = SyntheticRun(Files(str(tmp_path / "runs")), "r")
    for iteration in range(2):
        made.iterate(iteration)
    return made.draw_line()


def configured(tmp_path: Path, **changes: Any) -> RunConfig:
    return recipe("tiny").replace(code_path=str(tmp_path), **changes)


def log_all(store: RunStore, config: RunConfig, iterations: int = 2, say: Callable[[str], None] = print) -> None:
    """What a command does: each iteration in turn."""
    with RunLog(config, store, say) as log:
        for iteration in range(iterations):
            log.iteration(Step(config, cast(Any, None), store, cast(Any, None), iteration))


def noted(tmp_path: Path) -> list[Any]:
    path = tmp_path / "noted"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def told(capsys: pytest.CaptureFixture[str], name: str) -> int:
    """Lines at the terminal since the last look that have this figure."""
    return sum(f"{name}=" in line for line in capsys.readouterr().out.splitlines())


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """All rows that wandb was given."""
    paths = sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))
    return [row for path in paths for row in RunFile(path).new_rows() if ENTRY in row]


def board(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    found.Reload()
    return found


def test_each_iteration_is_told_once(store: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(tmp_path)
    log_all(store, config)
    out = capsys.readouterr().out
    expected = sum(reward_of(g * 4 + i, g) for g in (0, 1) for i in range(4)) / 8
    assert f"{MEAN}={expected:.4g}" in out.splitlines()[0] and "perf/rollout_time=" in out
    assert "train/loss=" in out and "perf/train_time=" in out and len(out.splitlines()) == 4
    assert store.files.exists("r/metrics.parquet")
    log_all(store, config)
    assert capsys.readouterr().out == ""


def test_a_fork_logs_its_own_iterations_and_its_metrics_are_of_the_whole_line(
    store: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = SyntheticRun(store.files, "child")
    made.iterate(0)
    made.iterate(1)
    child = made.draw_line()
    line = (store.record() or {})["line"]
    kept = {slot: f"r/{name}" for slot, name in line.items() if slot.startswith("000000/")}
    child.update_record(lambda record: record | {"line": record["line"] | kept})
    log_all(child, configured(tmp_path))
    assert told(capsys, MEAN) == 1
    rows = pq.read_table(tmp_path / "runs/child/metrics.parquet").to_pylist()
    assert {(row["run"], row["iteration"]) for row in rows} == {("child", 0), ("child", 1)}


def test_what_is_made_again_with_another_content_is_told_again(
    store: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_all(store, configured(tmp_path))
    capsys.readouterr()
    update = store.on_line("update", 1)
    assert update
    path = f"{update.folder}/manifest.json"
    body = json.loads(store.files.read(path)) | {"content_digest": "f" * 64}
    store.files.replace(path, json.dumps(body).encode())
    log_all(store, configured(tmp_path))
    assert told(capsys, MEAN) == 1


class TestOwnFunction:
    def test_truth_leaves_out_what_rollout_logs_and_nothing_else(
        self, store: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = configured(
            tmp_path,
            custom_rollout_log_function_path="own_logs.quiet",
            use_tensorboard=True,
            wandb_log_num_images=2,
        )
        log_all(store, config)
        out = capsys.readouterr().out
        assert MEAN not in out and out.count("train/loss=") == 2
        tags = board(tmp_path / "runs/r/tensorboard").Tags()
        assert MEAN not in tags["scalars"] and "train/loss" in tags["scalars"] and tags["images"] == []
        rows = noted(tmp_path)
        assert [row[:2] for row in rows] == [[0, 8], [1, 8]]
        assert rows[0][2] and rows[0][3:6] == [reward_of(0, 0), [3, 16, 16], rows[0][5]]
        assert rows[0][6:] == [0, ["rollout/zero_std_share"], True]

    def test_what_is_not_true_has_the_default_follow(
        self, store: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        log_all(store, configured(tmp_path, custom_rollout_log_function_path="own_logs.beside"))
        assert noted(tmp_path) == [0, 1] and told(capsys, MEAN) == 2

    def test_one_that_fails_is_named_with_the_iteration_and_called_again(
        self, store: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = configured(tmp_path, custom_rollout_log_function_path="own_logs.failing")
        before = store.record()
        words = (
            r"--custom-rollout-log-function-path own_logs\.failing failed in iteration 1: ValueError: no disk for me"
        )
        for _ in range(2):
            with pytest.raises(StageError, match=words):
                log_all(store, config)
        assert store.record() == before
        (tmp_path / "mended").touch()
        log_all(store, config)
        assert noted(tmp_path) == [0, 1, 1, 1] and told(capsys, MEAN) == 2

    def test_the_verdict_is_kept_for_what_is_sent_later(self, store: RunStore, tmp_path: Path) -> None:
        """TensorBoard is asked for by a later command: what the function left out stays out."""
        config = configured(tmp_path, custom_rollout_log_function_path="own_logs.quiet")
        log_all(store, config)
        log_all(store, config.replace(use_tensorboard=True))
        assert len(noted(tmp_path)) == 2
        assert MEAN not in board(tmp_path / "runs/r/tensorboard").Tags()["scalars"]

    def test_a_damaged_image_is_noted_so_that_it_is_made_again(self, store: RunStore, tmp_path: Path) -> None:
        rollout = store.on_line("rollout", 0)
        assert rollout
        part = rollout.data[0]
        store.files.replace(part.path, b"x" * part.bytes)
        with pytest.raises(DamagedError, match="SHA-256"):
            log_all(store, configured(tmp_path, custom_rollout_log_function_path="own_logs.quiet"))
        assert store.damage(rollout)


class TestTensorBoard:
    def test_figures_and_pictures_stand_at_their_iterations(self, store: RunStore, tmp_path: Path) -> None:
        log_all(store, configured(tmp_path, use_tensorboard=True, wandb_log_num_images=4, wandb_log_image_interval=2))
        found = board(tmp_path / "runs/r/tensorboard")
        expected = [sum(reward_of(g * 4 + i, g) for g in (2 * n, 2 * n + 1) for i in range(4)) / 8 for n in (0, 1)]
        assert [(s.step, s.value) for s in found.Scalars(MEAN)] == [
            (n, pytest.approx(mean)) for n, mean in enumerate(expected)
        ]
        assert {"train/loss", "train/grad_norm", "perf/train_time"} <= set(found.Tags()["scalars"])
        assert [image.step for image in found.Images("rollout_media/sample_images")] == [0]

    def test_a_command_killed_while_it_sends_leaves_nothing_twice(
        self, store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = configured(tmp_path, use_tensorboard=True)
        fail_at("logging:sent:2", monkeypatch)
        with pytest.raises(FaultInjected):
            log_all(store, config)
        monkeypatch.delenv("MILES_FAULT")
        log_all(store, config)
        assert [s.step for s in board(tmp_path / "runs/r/tensorboard").Scalars(MEAN)] == [0, 1]

    def test_another_folder_gets_all_of_it(self, store: RunStore, tmp_path: Path) -> None:
        log_all(store, configured(tmp_path, use_tensorboard=True))
        log_all(store, configured(tmp_path, use_tensorboard=True, tensorboard_dir=str(tmp_path / "board")))
        for folder in ("runs/r/tensorboard", "board/r"):
            assert [s.step for s in board(tmp_path / folder).Scalars(MEAN)] == [0, 1]

    def test_a_run_in_a_bucket_has_it_there(self, bucket: BucketRoot, tmp_path: Path) -> None:
        made = SyntheticRun(bucket.files, "r")
        made.iterate(0)
        store = made.draw_line()
        for _ in range(2):
            log_all(store, configured(tmp_path, use_tensorboard=True, wandb_log_num_images=2), 1)
        names = [name for name in bucket.names() if "tfevents" in name]
        assert len(names) == 1 and names[0].startswith("r/tensorboard/events.out.tfevents.")
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy" / names[0].rpartition("/")[2]).write_bytes(bucket.get(names[0]))
        assert [image.step for image in board(tmp_path / "copy").Images("rollout_media/sample_images")] == [0]
        assert {"r/metrics.parquet", "r/logged.json"} <= set(bucket.names())

    def test_a_folder_that_cannot_be_written_is_told_once_and_made_up_later(
        self, store: RunStore, tmp_path: Path
    ) -> None:
        (tmp_path / "board").write_text("a file")
        config = configured(tmp_path, use_tensorboard=True, tensorboard_dir=str(tmp_path / "board"))
        said: list[str] = []
        log_all(store, config, say=said.append)
        assert len(said) == 1 and "warning: tensorboard takes no metrics" in said[0]
        (tmp_path / "board").unlink()
        log_all(store, config)
        assert [s.step for s in board(tmp_path / "board/r").Scalars(MEAN)] == [0, 1]


def fail_at(passage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_FAULT", f"{passage}:error")
    monkeypatch.delenv("MILES_FAULT_COUNTS", raising=False)
    arm()


OFFLINE = {"use_wandb": True, "wandb_mode": "offline"}


class TestWandb:
    def test_one_run_over_all_commands_with_the_iteration_as_its_axis(self, store: RunStore, tmp_path: Path) -> None:
        config = configured(tmp_path, **OFFLINE, wandb_log_num_images=3, wandb_log_image_interval=2)
        log_all(store, config, 1)
        log_all(store, config, 2)
        log_all(store, config, 2)
        rows = wandb_rows(tmp_path / "runs/r")
        assert [row["iteration"] for row in rows] == [0, 1]
        assert len({path.name for path in (tmp_path / "runs/r").glob("wandb/*/run-*.wandb")}) == 1
        assert MEAN in rows[0] and "train/loss" in rows[0] and rows[0][ENTRY].startswith("000000/update/")
        captions = rows[0]["rollout_media/sample_images/captions"]
        assert len(captions) == 3 and all("reward" in caption for caption in captions)
        assert [name for name in rows[1] if name.startswith("rollout_media")] == []

    @pytest.mark.parametrize("place", ["start", "sent"])
    @pytest.mark.parametrize("passage", [1, 2, 3, 4])
    def test_a_command_that_ends_around_the_sending_neither_doubles_nor_omits(
        self, place: str, passage: int, store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = configured(tmp_path, **OFFLINE, custom_rollout_log_function_path="own_logs.beside")
        fail_at(f"logging:{place}:{passage}", monkeypatch)
        failed = False
        try:
            log_all(store, config)
        except FaultInjected:
            failed = True
        assert failed == (place == "sent" or passage < 3)
        monkeypatch.delenv("MILES_FAULT")
        import wandb

        wandb.teardown()
        log_all(store, config)
        assert [row["iteration"] for row in wandb_rows(tmp_path / "runs/r")] == [0, 1]
        assert sorted(set(noted(tmp_path))) == [0, 1] and len(noted(tmp_path)) <= 3

    def test_an_own_function_logs_into_the_same_run(self, store: RunStore, tmp_path: Path) -> None:
        log_all(store, configured(tmp_path, **OFFLINE, custom_rollout_log_function_path="own_logs.through_wandb"))
        (path,) = (tmp_path / "runs/r").glob("wandb/offline-run-*/run-*.wandb")
        rows = RunFile(path).new_rows()
        assert [row["mine"] for row in rows if "mine" in row] == [0.5, 1.5]
        assert [row["iteration"] for row in rows if ENTRY in row] == [0, 1]

    def test_the_service_of_another_process_is_left_alone(
        self, store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A command inherits the name of a service that has ended, or that holds the run of a killed command."""
        monkeypatch.setenv("WANDB_SERVICE", "3-1-tcp-localhost-9")
        said: list[str] = []
        log_all(store, configured(tmp_path, **OFFLINE), say=said.append)
        assert said == [] and [row["iteration"] for row in wandb_rows(tmp_path / "runs/r")] == [0, 1]

    def test_what_it_is_owed_is_sent_when_the_command_ends(
        self, store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import wandb

        config, said = configured(tmp_path, **OFFLINE), list[str]()
        init = wandb.init

        def fails(**given: Any) -> Any:
            monkeypatch.setattr(wandb, "init", init)
            raise RuntimeError("not at this moment")

        monkeypatch.setattr(wandb, "init", fails)
        log_all(store, config, say=said.append)
        assert len(said) == 1 and "not at this moment" in said[0]
        assert [row["iteration"] for row in wandb_rows(tmp_path / "runs/r")] == [0, 1]

    def test_where_its_process_dies_the_next_command_makes_it_up(
        self, store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config, said = configured(tmp_path, **OFFLINE), list[str]()
        with RunLog(config, store, said.append) as log:
            for iteration in range(2):
                log.iteration(Step(config, cast(Any, None), store, cast(Any, None), iteration))
                for process in psutil.Process().children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if "wandb-core" in " ".join(process.cmdline()):
                            process.kill()
        assert len(said) == 1 and "warning: wandb takes no metrics" in said[0]
        log_all(store, config)
        assert sorted(row["iteration"] for row in wandb_rows(tmp_path / "runs/r")) == [0, 1]

    def test_turned_on_later_it_gets_what_was_before(self, store: RunStore, tmp_path: Path) -> None:
        log_all(store, configured(tmp_path))
        log_all(store, configured(tmp_path, **OFFLINE))
        assert [row["iteration"] for row in wandb_rows(tmp_path / "runs/r")] == [0, 1]

    def test_no_credential_reaches_its_files(self, store: RunStore, tmp_path: Path) -> None:
        secret = "s3cretT0KEN"
        config = configured(tmp_path, **OFFLINE, rm_url=f"http://user:{secret}@host/score?token={secret}")
        log_all(store, config)
        wandb_rows(tmp_path / "runs/r")
        files = [path for path in (tmp_path / "runs/r/wandb").rglob("*") if path.is_file()]
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
        assert any(b"***@host/score" in path.read_bytes() for path in files)

    def test_without_a_key_it_is_told_once_and_made_up_later(
        self, store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("NETRC", str(tmp_path / "none"))
        said: list[str] = []
        config = configured(tmp_path, use_wandb=True, wandb_host="http://127.0.0.1:9")
        log_all(store, config, say=said.append)
        assert len(said) == 1 and "warning: wandb takes no metrics" in said[0] and "no API key" in said[0]
        log_all(store, config.replace(wandb_mode="offline"))
        assert [row["iteration"] for row in wandb_rows(tmp_path / "runs/r")] == [0, 1]

    def test_a_server_that_does_not_answer_costs_one_wait_and_one_warning(
        self, store: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = "x" * 40
        monkeypatch.setenv("WANDB_API_KEY", key)
        said: list[str] = []
        began = time.monotonic()
        log_all(store, configured(tmp_path, wandb_host="http://127.0.0.1:9"), say=said.append)
        assert time.monotonic() - began < 60
        assert len(said) == 1 and "warning: wandb takes no metrics" in said[0] and key not in said[0]
        body = json.loads((tmp_path / "runs/r/logged.json").read_text())
        assert [entry["to"] for entry in body["entries"].values()] == [["terminal"]] * 2

    def test_it_is_on_where_there_is_a_key_or_it_is_asked_for(self, tmp_path: Path) -> None:
        config, key = configured(tmp_path), {"WANDB_API_KEY": "x"}
        assert not wandb_wanted(config, {}) and wandb_wanted(config, key)
        assert wandb_wanted(config.replace(use_wandb=True), {})
        assert not wandb_wanted(config.replace(use_wandb=False), key)
        assert not wandb_wanted(config.replace(wandb_mode="disabled"), key)
        assert not wandb_wanted(config, key | {"WANDB_MODE": "disabled"})

    def test_an_id_that_is_given_is_the_runs_and_another_is_made_once(self, store: RunStore, tmp_path: Path) -> None:
        config = configured(tmp_path, **OFFLINE)
        ids = {Wandb(config, store, Ledger(store)).id for _ in range(2)}
        assert len(ids) == 1
        assert Wandb(config.replace(wandb_run_id="mine"), store, Ledger(store)).id == "mine"

    def test_its_files_lie_beside_the_run_or_at_home(self, bucket: BucketRoot, tmp_path: Path) -> None:
        config, local = configured(tmp_path), RunStore(Files(str(tmp_path / "runs")), "r")
        assert wandb_folder(config, local) == tmp_path / "runs/r"
        assert wandb_folder(config, RunStore(bucket.files, "r")) == tmp_path / "home/wandb/r"
        assert wandb_folder(config.replace(wandb_dir=str(tmp_path / "w")), local) == tmp_path / "w"

    def test_nothing_is_imported_where_it_is_off(self, tmp_path: Path) -> None:
        import subprocess

        code = "import sys, flows.train; sys.exit(bool({'wandb', 'tensorboardX', 'tensorboard'} & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_logged_json_says_what_went_where(store: RunStore, tmp_path: Path) -> None:
    log_all(store, configured(tmp_path, use_tensorboard=True))
    body = json.loads((tmp_path / "runs/r/logged.json").read_text())
    keys = [key_of(manifest) for i in range(2) if (manifest := store.on_line("update", i))]
    board_name = f"tensorboard {tmp_path}/runs/r/tensorboard"
    assert body["entries"] == {key: {"to": [board_name, "terminal"], "skipped": False} for key in keys}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensorboard_dir": "board"}, "--use-tensorboard"),
        ({"use_tensorboard": True, "tensorboard_dir": "gs://b"}, "s3://BUCKET/PREFIX"),
        ({"wandb_run_id": "a/b"}, "--wandb-run-id"),
        ({"wandb_host": "h"}, "--wandb-host"),
        ({"use_wandb": True, "wandb_mode": "disabled"}, "leave one out"),
        ({"wandb_mode": "shared"}, "--wandb-mode"),
        ({"wandb_log_image_interval": 0}, "--wandb-log-image-interval"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        configured(tmp_path, **options)


def test_a_function_of_the_wrong_form_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"own_logs\.short .* write it as def log_rollout_data\(rollout_id, args, samples"
    ):
        load_hook("custom_rollout_log_function_path", "own_logs.short", str(tmp_path))


def test_a_broken_logged_json_is_refused_with_the_way_out(store: RunStore, tmp_path: Path) -> None:
    (tmp_path / "runs/r/logged.json").write_text("[")
    with pytest.raises(InputError, match=r"logged\.json.*delete it"):
        log_all(store, configured(tmp_path))


def test_an_option_whose_package_is_missing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miles_core.pipeline.log.installed", lambda package: False)
    for option in ({"use_tensorboard": True}, {"use_wandb": True}):
        with pytest.raises(InputError, match="pip install"):
            check_logging(configured(tmp_path, **option))
    check_logging(configured(tmp_path))
