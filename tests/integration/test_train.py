"""The loop from the command line: a real Prefect server, Ray, engine, scorers and trainer; a tiny random model."""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from commands import MILES, Place

from miles_core.rollout.microgroup import joined, microgroups
from miles_core.store.parts import read_bytes, read_table
from miles_core.store.stages import ITERATION_STAGES
from miles_core.weights.packing import adapter_tensors
from miles_core.weights.probe_spec import probe_tolerance

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def trained(place: Place) -> str:
    """The output of a first run of two iterations."""
    return place.miles("train", "tiny", "--num-rollout", "2")


def test_a_run_commits_six_stages_an_iteration(place: Place, trained: str) -> None:
    for stage in ITERATION_STAGES:
        assert len(re.findall(rf"^  {stage} +computed +[\d.]+ s +\d+ rows?", trained, re.MULTILINE)) == 2
    assert "rollout/reward/raw_mean=" in trained
    assert "train/grad_norm=" in trained
    assert str(place.home / "artifacts" / "tiny") in trained


def test_the_proofs_can_fail(place: Place, trained: str) -> None:
    """Groups have spread, gradients are not zero, B moved, and the probe moved far more than its tolerance."""
    files = place.store("tiny").files
    for iteration in range(2):
        advantages = place.on_line("tiny", iteration, "advantages").summary
        assert 2 * advantages["zero_std_groups"] <= advantages["groups"]
        update = place.on_line("tiny", iteration, "update")
        steps = read_table(files, update.data[0]).to_pylist()
        assert len(steps) == 2
        assert all(step["grad_norm"] > 0 for step in steps)
        (adapter,) = update.under("adapter/")
        b = {n: t for n, t in adapter_tensors(read_bytes(files, adapter)).items() if ".lora_B." in n}
        assert len(b) == 15
        # The last block drops its text stream's output, so nothing reaches the text queries there.
        assert {n for n, t in b.items() if t.abs().max() == 0} == {"transformer_blocks.1.attn.add_q_proj.lora_B.weight"}
        sync = read_table(files, place.on_line("tiny", iteration, "sync").data[0]).to_pylist()
        tolerance = probe_tolerance("fp32")
        assert all(row["probe_moved"] > 100 * tolerance and row["probe_diff"] <= tolerance for row in sync)


def test_the_ratio_is_one_before_the_first_step(place: Place, trained: str) -> None:
    """The first optimizer step of iteration 0 trains on what its own policy generated."""
    update = place.on_line("tiny", 0, "update")
    first = read_table(place.store("tiny").files, update.data[0]).to_pylist()[0]
    assert first["ratio_max_abs_dev"] <= 1e-6
    assert first["clip_frac"] == 0


def test_the_second_iteration_generates_with_the_first_ones_policy(place: Place, trained: str) -> None:
    update = place.on_line("tiny", 0, "update").summary["policy_digest"]
    files = place.store("tiny").files
    rows = [
        row
        for part in place.on_line("tiny", 1, "rollout").data
        for row in read_table(files, part, ["policy_digest", "policy_version"]).to_pylist()
    ]
    assert {(row["policy_digest"], row["policy_version"]) for row in rows} == {(update, 0)}
    assert place.on_line("tiny", 0, "rollout").summary["policy_digest"] != update


def test_no_row_is_lost_or_doubled_and_seeds_differ(place: Place, trained: str) -> None:
    files = place.store("tiny").files
    rows = [
        row
        for i in range(2)
        for m in microgroups(place.on_line("tiny", i, "rollout").data, place.on_line("tiny", i, "rollout").latents)
        for row in joined(files, m, ["sample_index", "seed", "latents_digest"]).to_pylist()
    ]
    assert [row["sample_index"] for row in rows] == list(range(64))
    assert len({row["seed"] for row in rows}) == 64
    assert len({hashlib.sha256(json.dumps(row["latents"]).encode()).hexdigest() for row in rows}) == 64


def test_a_finished_run_is_found_done_and_starts_nothing(place: Place, trained: str) -> None:
    before, started = place.ray_processes(), time.monotonic()
    output = place.miles("train", "tiny", "--num-rollout", "2")
    assert time.monotonic() - started < 30
    assert place.ray_processes() == before
    assert output.count(": reused") == 2
    assert "computed " not in output


def test_another_meaning_under_the_same_name_is_refused(place: Place, trained: str) -> None:
    before = (place.home / "artifacts/tiny/run.json").read_bytes()
    output = place.miles("train", "tiny", "--rm-type", "jpeg_incompressibility", code=2)
    assert "--rm-type jpeg_compressibility → jpeg_incompressibility" in output
    assert "--new" in output and "--run-id" in output
    assert output.count("\n") == 1
    assert (place.home / "artifacts/tiny/run.json").read_bytes() == before


def test_a_rerun_stands_beside_and_the_line_stays(place: Place, trained: str) -> None:
    rollout = place.home / "artifacts/tiny/iteration=000001/stage=rollout"
    record = place.home / "artifacts/tiny/run.json"
    before = {p: p.read_bytes() for p in [record, *rollout.rglob("*")] if p.is_file()}
    line = place.digests("tiny", 2)
    output = place.miles("rerun", "tiny", "1", "rewards", "--rm-type", "jpeg_incompressibility")
    assert "run: rm_type jpeg_compressibility → jpeg_incompressibility" in output
    rewards = place.store("tiny").committed("rewards", 1)
    assert len(rewards) == 2
    assert len(place.store("tiny").committed("advantages", 1)) == 1
    output = place.miles("rerun", "tiny", "1", "rewards", "--rm-type", "jpeg_incompressibility", "--downstream")
    assert re.search(r"rewards +reused", output)
    for stage in ("advantages", "update"):
        assert re.search(rf"{stage} +computed", output)
        assert len(place.store("tiny").committed("update", 1)) == 2
    assert {p: p.read_bytes() for p in [record, *rollout.rglob("*")] if p.is_file()} == before
    assert place.digests("tiny", 2) == line
    other = next(m for m in place.store("tiny").committed("update", 1) if m.content_digest != line["1/update"])
    assert other.upstream["rollout"].content_digest == line["1/rollout"]


def test_a_deleted_rollout_is_remade_with_the_same_digest(place: Place, trained: str) -> None:
    line = place.digests("tiny", 2)
    shutil.rmtree(place.home / "artifacts/tiny/iteration=000001/stage=rollout")
    output = place.miles("train", "tiny", "--num-rollout", "2")
    assert re.search(r"rollout +computed .* run: its attempt \w+ is missing", output)
    for stage in ("prompts", "rewards", "advantages", "update", "sync"):
        assert re.search(rf"{stage} +reused", output), output
    assert place.digests("tiny", 2) == line


def test_a_larger_number_of_iterations_carries_on(place: Place, trained: str) -> None:
    """The command itself loads no tensor library: that costs each command seconds, and its actors have their own."""
    output = place.miles("train", "tiny", "--num-rollout", "3", PYTHONPROFILEIMPORTTIME="1")
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", output, re.MULTILINE))
    assert "prefect" in imported and not imported & {"torch", "peft", "transformers", "diffusers"}
    assert output.count(": reused") == 2
    assert re.search(r"^iteration 2$", output, re.MULTILINE)
    assert len(re.findall("computed", output)) >= 6


def test_killed_in_the_middle_of_a_rollout_it_ends_with_the_same_bits(place: Place, trained: str) -> None:
    """kill -9 of the whole command once the first part has landed; the same command again."""
    before = place.ray_processes()
    arguments = ["train", "tiny", "--num-rollout", "1", "--run-id", "killed"]
    process = subprocess.Popen([MILES, *arguments], env=place.environment(), stdout=subprocess.DEVNULL)
    folder = place.home / "artifacts/killed/iteration=000000/stage=rollout"
    deadline = time.monotonic() + 240
    while not (parts := list(folder.glob("*/data/*.parquet"))) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert parts
    assert not list(folder.glob("*/manifest.json"))
    left = place.ray_processes() - before
    assert left
    kept = {p: p.read_bytes() for p in folder.glob("*/data/*.parquet")}
    for described in folder.glob("*/conditioning/*.parquet"):
        os.truncate(described, described.stat().st_size // 2)
    output = place.miles(*arguments)
    assert re.search(r"rollout +computed", output)
    assert "processes of an earlier command are taken over" in output
    assert not place.ray_processes() & left
    assert all(p.read_bytes() == data for p, data in kept.items())
    mine, other = place.digests("killed", 1), place.digests("tiny", 1)
    assert mine == other


def test_a_flipped_byte_in_the_probe_is_found_by_sync_and_healed_by_the_next_command(
    place: Place, trained: str
) -> None:
    arguments = ["train", "tiny", "--num-rollout", "1", "--run-id", "killed"]
    line = place.digests("killed", 1)
    folder = place.home / "artifacts/killed/iteration=000000"
    (probe,) = folder.glob("stage=rollout/*/probe.safetensors")
    data = bytearray(probe.read_bytes())
    data[-1] ^= 1
    probe.write_bytes(data)
    shutil.rmtree(folder / "stage=sync")
    assert "does not have the SHA-256" in place.miles(*arguments, code=1)
    output = place.miles(*arguments)
    assert re.search(r"rollout +computed .* run: its attempt is damaged", output)
    assert re.search(r"update +reused", output)
    assert place.digests("killed", 1) == line


def test_two_commands_do_not_train_one_run(place: Place, trained: str) -> None:
    process = place.start(
        "train", "tiny", "--num-rollout", "1", "--run-id", "two", MILES_FAULT="prompts:start:1:slow=400"
    )
    # Until Ray is connected: while it connects, a handler of its own answers SIGTERM by abort.
    prompts = place.home / "artifacts/two/iteration=000000/stage=prompts"
    while not list(prompts.glob("*/attempt.json")) and process.poll() is None:
        time.sleep(0.05)
    output = place.miles("train", "tiny", "--num-rollout", "1", "--run-id", "two", code=2)
    assert f"run two is being trained by process {process.pid} on" in output
    assert "its command ended" in place.miles("stop", "two")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "run the same command again to resume" in output


def test_the_ocr_recipe_runs_on_two_ranks(place: Place, trained: str) -> None:
    """Two rewards, and rewards that differ within their groups: a model that draws words."""
    several = ["--rm-types", "ocr,jpeg_compressibility", "--rm-weights", "1,0.5", "--rm-normalize"]
    small = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "8"]
    output = place.miles("train", "tiny-ocr", "--num-rollout", "1", "--actor-num-gpus-per-node", "2", *small, *several)
    assert "run tiny-ocr is done: 1 iterations computed" in output
    assert "rollout/reward/ocr_mean=" in output and "rollout/reward/jpeg_compressibility_mean=-" in output
    rewards = place.on_line("tiny-ocr", 0, "rewards")
    rows = [row for part in rewards.data for row in read_table(place.store("tiny-ocr").files, part).to_pylist()]
    assert len(rows) == 32
    assert {row["rm_type"] for row in rows} == {"ocr+jpeg_compressibility"}
    assert all(row["recognized"] is not None and row["target"] for row in rows)
    assert all(
        row["reward"] == pytest.approx(row["score_ocr"] + 0.5 * row["score_jpeg_compressibility"]) for row in rows
    )
    read = [row["score_ocr"] for row in rows]
    assert 0.2 < sum(read) / len(read) < 0.95 and len(set(read)) > 2
    made = place.on_line("tiny-ocr", 0, "advantages")
    told = [row for part in made.data for row in read_table(place.store("tiny-ocr").files, part).to_pylist()]
    assert not any(row["zero_std"] for row in told)
    assert abs(sum(row["advantage"] for row in told)) < 1e-6
    assert place.on_line("tiny-ocr", 0, "update").summary["grad_norm"] > 0


class TestReaders:
    """The rollout's Parquet opens in every common reader, images as images."""

    @pytest.fixture
    def parts(self, place: Place, trained: str) -> list[str]:
        return [place.store("tiny").files.url(part.path) for part in place.on_line("tiny", 0, "rollout").data]

    @pytest.fixture
    def latents(self, place: Place, trained: str) -> list[str]:
        return [place.store("tiny").files.url(part.path) for part in place.on_line("tiny", 0, "rollout").latents]

    def test_pyarrow(self, parts: list[str], latents: list[str]) -> None:
        assert pq.read_table(parts).num_rows == 32
        table = pq.read_table(latents)
        assert table.num_rows == 32
        assert table.schema.field("latents").type.list_size == 3 * 16 * 8 * 8

    def test_pandas(self, parts: list[str], latents: list[str]) -> None:
        import pandas

        frame = pandas.read_parquet(parts)
        assert len(frame) == 32
        assert frame["image"][0]["bytes"].startswith(b"\x89PNG")
        assert pandas.read_parquet(latents)["latents"][0].shape == (3072,)

    def test_polars(self, parts: list[str]) -> None:
        import polars

        frame = polars.read_parquet(parts)
        assert frame.height == 32
        assert frame["prompt"].n_unique() == 4

    def test_duckdb(self, parts: list[str]) -> None:
        import duckdb

        with contextlib.closing(duckdb.connect()) as connection:
            found = connection.execute("select count(*), count(distinct seed) from read_parquet(?)", [parts]).fetchone()
        assert found == (32, 32)

    def test_datasets(self, parts: list[str], latents: list[str], tmp_path: Path) -> None:
        from datasets import load_dataset

        dataset = load_dataset("parquet", data_files=parts, split="train", cache_dir=str(tmp_path))
        assert dataset.num_rows == 32
        assert dataset[0]["image"].size == (64, 64)
        apart = load_dataset("parquet", data_files=latents, split="train", cache_dir=str(tmp_path))
        assert len(apart[0]["latents"]) == 3072


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_interrupted_it_ends_what_it_started_and_says_how_to_go_on(place: Place, name: str) -> None:
    arguments = ["train", "tiny", "--num-rollout", "1", "--run-id", f"interrupted-{name.lower()}"]
    process = subprocess.Popen(
        [MILES, *arguments], env=place.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    folder = place.home / f"artifacts/interrupted-{name.lower()}/iteration=000000/stage=rollout"
    deadline = time.monotonic() + 240
    while not list(folder.glob("*/attempt.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    own = {p.pid for p in psutil.Process(process.pid).children(recursive=True)}
    assert own & place.ray_processes()
    process.send_signal(getattr(signal, name))
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert output.rstrip().endswith("miles: interrupted; run the same command again to resume")
    assert not own & set(psutil.pids())
