"""Pruning by rule: what goes, what is said of it afterwards, and what a crash in the middle leaves."""

import json
import os
import time
from pathlib import Path

import pytest
from tiny_run import TinyRun

from flows.cli import show
from miles_core.pipeline import retention
from miles_core.pipeline.iteration import finished
from miles_core.pipeline.retention import retain
from miles_core.store.manifest import Manifest
from miles_core.store.parts import read_bytes
from miles_core.store.stages import ITERATION_STAGES
from miles_core.store.tombstone import PrunedError, read_tombstone

KEEP = {"keep_full_checkpoints": 2, "keep_latents_iterations": 1}


def line(run: TinyRun, stage: str, iteration: int) -> Manifest:
    made = run.store.on_line(stage, iteration)  # type: ignore[arg-type]
    assert made is not None
    return made


def present(run: TinyRun, manifest: Manifest) -> set[str]:
    """Folders of an attempt with a file in them, and files at its top."""
    root = Path(run.store.files.url(manifest.folder))
    return {p.relative_to(root).parts[0] for p in root.rglob("*") if p.is_file()}


def held(run: TinyRun) -> dict[str, list[int]]:
    """Iterations whose attempt on the line still holds each prunable folder."""
    places = {"latents": "rollout", "conditioning": "rollout", "checkpoint": "update"}
    return {f: [i for i in range(4) if f in present(run, line(run, stage, i))] for f, stage in places.items()}


def digests(run: TinyRun) -> dict[tuple[int, str], str]:
    return {(i, s): line(run, s, i).content_digest for i in range(4) for s in ITERATION_STAGES}


def test_older_iterations_lose_what_the_rule_gives_up_and_nothing_else(
    run: TinyRun, capsys: pytest.CaptureFixture[str]
) -> None:
    assert held(run) == {"latents": [0, 1, 2, 3], "conditioning": [0, 1, 2, 3], "checkpoint": [0, 1, 2, 3]}
    retain(run.step(3, **KEEP))
    assert held(run) == {"latents": [3], "conditioning": [3], "checkpoint": [2, 3]}
    assert "pruned latents, conditioning, checkpoint: 5 attempts" in capsys.readouterr().out
    for i in range(4):
        assert {"data", "probe.safetensors", "manifest.json"} <= present(run, line(run, "rollout", i))
        assert {"data", "adapter", "probe.safetensors"} <= present(run, line(run, "update", i))
    retain(run.step(3, **KEEP))
    assert capsys.readouterr().out == ""


def test_the_options_zero_keep_all(run: TinyRun) -> None:
    retain(run.step(3, keep_full_checkpoints=0, keep_latents_iterations=0))
    assert held(run)["latents"] == held(run)["checkpoint"] == [0, 1, 2, 3]


def test_a_pruned_run_is_finished_and_reused(run: TinyRun) -> None:
    """Flyte 4672: a cache hit whose files are missing (pitfall 47)."""
    before, updates = digests(run), run.workers.updates
    assert all(finished(run.step(i)) for i in range(4))
    retain(run.step(3, **KEEP))
    assert all(finished(run.step(i)) for i in range(4))
    assert all(outcome.reused for i in range(4) for outcome in run.iterate(i).values())
    assert digests(run) == before
    assert run.workers.updates == updates


def test_pruned_is_not_damaged_and_a_file_that_went_otherwise_is(run: TinyRun) -> None:
    rollout = line(run, "rollout", 0)
    image = Path(run.store.files.url(rollout.data[0].path))
    retain(run.step(3, **KEEP))
    assert run.store.damage(rollout) is None
    run.store.verify(rollout)
    assert run.store.damage(rollout) is None
    image.unlink()
    assert "is missing" in (run.store.damage(rollout) or "")


def test_what_was_missing_before_is_not_called_pruned(run: TinyRun) -> None:
    rollout = line(run, "rollout", 0)
    Path(run.store.files.url(rollout.latents[0].path)).unlink()
    retain(run.step(3, **KEEP))
    assert "latents" in present(run, line(run, "rollout", 3))
    assert f"{rollout.latents[0].path} is missing" in (run.store.damage(rollout) or "")


def test_reading_what_was_pruned_names_run_iteration_stage_option_and_the_way_on(run: TinyRun) -> None:
    retain(run.step(3, **KEEP))
    rollout, update = line(run, "rollout", 1), line(run, "update", 1)
    with pytest.raises(PrunedError) as caught:
        read_bytes(run.store.files, rollout.latents[0])
    assert str(caught.value) == (
        "run r: latents, conditioning of rollout of iteration 1 were pruned (--keep-latents-iterations 1): "
        "`miles rerun r 1 rollout` generates them again"
    )
    with pytest.raises(
        PrunedError, match=r"checkpoint of update of iteration 1 was pruned \(--keep-full-checkpoints 2\)"
    ):
        read_bytes(run.store.files, update.under("checkpoint/")[0])
    assert read_bytes(run.store.files, rollout.data[0])


def test_a_crash_between_tombstone_and_deletion_is_finished_by_the_next_pass(
    run: TinyRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(Exception):
        pass

    deleted = []

    def crash(store, folder, stone):
        deleted.append(folder)
        store.files.delete(f"{folder}/{stone.parts[0]}")
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(retention, "_delete", crash)
        with pytest.raises(Crash):
            retain(run.step(3, **KEEP))
    rollout = line(run, "rollout", 0)
    assert deleted == [rollout.folder]
    stone = read_tombstone(run.store.files, rollout.folder)
    assert stone and len(stone.parts) == 4
    assert run.store.damage(rollout) is None and finished(run.step(0))
    assert {"latents", "conditioning"} <= present(run, rollout)
    retain(run.step(3, **KEEP))
    assert not {"latents", "conditioning"} & present(run, rollout)
    assert read_tombstone(run.store.files, rollout.folder) == stone
    assert held(run)["checkpoint"] == [2, 3]


def test_attempts_beside_the_line_go_too_and_unfinished_ones_only_when_they_were_given_up(run: TinyRun) -> None:
    store = run.store
    first = line(run, "rollout", 0)
    beside = run.stage(run.step(0, moves_line=False, diffusion_noise_level=0.5), "rollout").manifest
    assert beside.folder != first.folder and line(run, "rollout", 0) == first
    retain(run.step(3, **KEEP))
    assert store.files.list(f"{beside.folder}/latents"), "what a rerun has just made may be in use"
    aged = json.loads(store.files.read(f"{beside.folder}/manifest.json"))
    aged["times"]["committed_at"] -= retention.ABANDONED_SECONDS + 60
    store.files.replace(f"{beside.folder}/manifest.json", json.dumps(aged).encode())
    retention._PASSED.clear()
    young, old = (store.open_attempt("rollout", 0, mark * 64, {}, resumable=True) for mark in "ab")
    alone = store.open_attempt("rollout", 1, "c" * 64, {}, resumable=True)
    for attempt in (young, old):
        store.files.create(attempt.path("latents/00000000-1.parquet"), b"half")
        store.files.create(attempt.path("data/00000000-1.parquet"), b"rows")
    yesterday = time.time() - retention.ABANDONED_SECONDS - 60
    for name in ("attempt.json", "latents/00000000-1.parquet"):
        os.utime(store.files.url(old.path(name)), (yesterday, yesterday))
    os.utime(store.files.url(young.path("attempt.json")), (yesterday, yesterday))
    retain(run.step(3, **KEEP))
    assert store.pruned(beside) and not store.files.list(f"{beside.folder}/latents")
    assert store.files.list(young.path("latents")) and not store.files.exists(young.path("pruned.json"))
    assert not store.files.list(old.path("latents")) and store.files.list(old.path("data"))
    assert not store.files.exists(alone.path("pruned.json"))
    assert store.open_attempt("rollout", 0, "a" * 64, {}, resumable=True).folder == young.folder
    assert store.open_attempt("rollout", 0, "b" * 64, {}, resumable=True).folder == f"{old.folder}.2"


def test_an_unfinished_attempt_is_left_where_none_is_committed(run: TinyRun) -> None:
    attempt = run.store.open_attempt("rollout", 0, "a" * 64, {}, resumable=True)
    run.store.files.create(attempt.path("latents/00000000-1.parquet"), b"half")
    for path in (attempt.path("attempt.json"), attempt.path("latents/00000000-1.parquet")):
        os.utime(run.store.files.url(path), (0, 0))
    Path(run.store.files.url(line(run, "rollout", 0).folder), "manifest.json").unlink()
    retain(run.step(3, **KEEP))
    assert run.store.files.list(attempt.path("latents"))


def test_a_healed_iteration_keeps_what_the_next_one_needs(run: TinyRun) -> None:
    """Iteration 1 is made again while the line goes up to 3: its checkpoint stays, as 2 may follow from it."""
    retain(run.step(1, **KEEP))
    assert held(run) == {"latents": [1, 3], "conditioning": [1, 3], "checkpoint": [0, 1, 2, 3]}
    retain(run.step(2, **KEEP))
    assert held(run)["checkpoint"] == [1, 2, 3]


def test_show_says_pruned_and_not_damaged(run: TinyRun, capsys: pytest.CaptureFixture[str]) -> None:
    root = run.store.files.root
    show.show("r", None, None, root)
    assert "pruned: " not in capsys.readouterr().out
    retain(run.step(3, **KEEP))
    capsys.readouterr()
    show.show("r", None, None, root)
    shown = capsys.readouterr().out.splitlines()[1:]
    ends = ["pruned: latents, conditioning, checkpoint"] * 2 + ["pruned: latents, conditioning", ""]
    assert [text.partition("  pruned: ")[2] for text in shown] == [end.removeprefix("pruned: ") for end in ends]
    show.show("r", "1", None, root)
    attempts = {text.split()[0]: text for text in capsys.readouterr().out.splitlines()}
    assert attempts["rollout"].endswith("pruned: latents, conditioning")
    assert attempts["update"].endswith("pruned: checkpoint")
    assert not any(
        "DAMAGED" in text or ("pruned" in text) != (s in ("rollout", "update")) for s, text in attempts.items()
    )
    show.show("r", "1", "rollout", root)
    files = [text for text in capsys.readouterr().out.splitlines() if ".parquet" in text]
    assert [text.endswith("pruned") for text in files] == [not text.strip().startswith("data/") for text in files]
    assert any(text.strip().startswith("data/") for text in files)


def test_a_tombstone_reads_back(run: TinyRun) -> None:
    retain(run.step(3, **KEEP))
    stone = run.store.pruned(line(run, "update", 0))
    assert stone is not None
    assert (stone.what, stone.option) == (("checkpoint",), "--keep-full-checkpoints 2")
    assert stone.why == "older than the newest 2 iterations"
    assert {p.rsplit("/", 1)[1] for p in stone.parts} >= {"rng.safetensors", "trainer_state.json"}
    assert stone.bytes == sum(p.bytes for p in line(run, "update", 0).under("checkpoint/"))
    assert time.time() - stone.when < 60
