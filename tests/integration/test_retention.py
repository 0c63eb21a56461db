"""Pruning by train, and reruns over what was pruned, from the command line: real Prefect, Ray, engine and trainer."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_core.pipeline.budget import estimate, measured
from miles_core.pipeline.inputs import resolve_inputs
from miles_core.pipeline.run import open_run
from miles_core.store.files import Files
from miles_core.store.manifest import Manifest
from miles_core.store.run_store import RunStore
from miles_core.store.stages import StageName

pytestmark = pytest.mark.integration
MILES = str(Path(sys.executable).parent / "miles")
SMALL = ["--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--num-steps-per-rollout", "1"]
KEEP = ["--keep-full-checkpoints", "2", "--keep-latents-iterations", "2"]


def miles(home: Path, *arguments: str, code: int = 0) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MILES_", "RAY_"))}
    done = subprocess.run(
        [MILES, *arguments],
        env=kept | {"MILES_HOME": str(home), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def store(home: Path) -> RunStore:
    return RunStore(Files(str(home / "artifacts")), "kept")


def on_line(home: Path, stage: StageName, iteration: int) -> Manifest:
    made = store(home).on_line(stage, iteration)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("home")
    yield made
    miles(made, "down")


@pytest.fixture(scope="module")
def trained(home: Path) -> str:
    return miles(home, "train", "tiny", "--run-id", "kept", "--num-rollout", "3", *SMALL, *KEEP)


def test_train_prunes_says_so_and_tells_the_disk_budget_first(home: Path, trained: str) -> None:
    assert re.search(r"disk: .* \(estimated\), at most .* for 3 iterations, .* free: \d+ more iterations fit", trained)
    assert trained.index("disk: ") < trained.index("iteration 0") and trained.count("disk: ") == 1
    assert trained.count("pruned latents, conditioning, checkpoint: 2 attempts") == 1
    files = store(home).files
    for i in range(3):
        rollout, update = on_line(home, "rollout", i), on_line(home, "update", i)
        assert (
            bool(files.list(f"{rollout.folder}/latents")) == bool(files.list(f"{update.folder}/checkpoint")) == (i > 0)
        )
        assert files.list(f"{rollout.folder}/data") and files.list(f"{update.folder}/adapter")
    assert "pruned: latents, conditioning, checkpoint" in miles(home, "show", "kept")
    again = miles(home, "train", "tiny", "--run-id", "kept", "--num-rollout", "3", *SMALL, *KEEP)
    assert again.count(": reused") == 3 and "disk: " not in again


def test_the_estimate_lies_within_a_quarter_of_what_was_written(
    home: Path, trained: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILES_HOME", str(home))
    opened, config = open_run("kept", str(home / "artifacts"))
    known = measured(opened, config)
    assert known is not None
    assert estimate(config, resolve_inputs(config)).total == pytest.approx(known[1].total, rel=0.25)


def test_a_rerun_of_update_says_what_it_needs_and_then_replays(home: Path, trained: str) -> None:
    recorded = {i: on_line(home, "update", i).content_digest for i in range(3)}
    line = store(home).record()
    refused = miles(home, "rerun", "kept", "1", "update", "--lr", "0.02", code=1)
    assert "cannot be replayed from iteration 0 on" in refused and "`miles rerun kept 0 rollout`" in refused
    remade = miles(home, "rerun", "kept", "0", "rollout")
    assert re.search(r"rollout +computed .* run: its latents, conditioning were pruned", remade)
    rollouts = store(home).committed("rollout", 0)
    assert len(rollouts) == 2 and len({m.content_digest for m in rollouts}) == 1
    assert re.search(r"update +computed", miles(home, "rerun", "kept", "1", "update", "--lr", "0.02"))
    replayed = store(home).committed("update", 0)
    assert len(replayed) == 2 and {m.content_digest for m in replayed} == {recorded[0]}
    (made,) = (m for m in store(home).committed("update", 1) if m.content_digest != recorded[1])
    assert made.upstream["policy"].content_digest == recorded[0]
    assert made.affecting_config["lr"] == 0.02 and replayed[1].affecting_config["lr"] == 0.01
    assert store(home).record() == line
