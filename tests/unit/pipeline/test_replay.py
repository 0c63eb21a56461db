"""Reruns over a pruned run: the rollout made again, the checkpoint replayed bit by bit, or one sentence why not."""

import json
import re
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load
from tiny_run import TinyRun

from miles_core.errors import StageError
from miles_core.pipeline.fork import begin_fork, plan_fork
from miles_core.pipeline.retention import retain
from miles_core.pipeline.run import open_run
from miles_core.store.manifest import Manifest
from miles_core.store.parts import read_bytes, read_table
from miles_core.store.tombstone import PrunedError


def line(run: TinyRun, stage: Any, iteration: int) -> Manifest:
    made = run.store.on_line(stage, iteration)
    assert made is not None
    return made


def prune(run: TinyRun, *, latents: int = 0) -> None:
    """Checkpoints of iterations 0 and 1 go, and latents of all but the newest `latents` iterations."""
    retain(run.step(3, keep_full_checkpoints=2, keep_latents_iterations=latents))


def rerun(run: TinyRun, iteration: int, stage: str, **changes: Any) -> Manifest:
    return run.stage(run.step(iteration, moves_line=False, **changes), stage).manifest


def checkpoint(run: TinyRun, manifest: Manifest) -> dict[str, Any]:
    found = {}
    for part in manifest.under("checkpoint/"):
        if part.path.endswith(".safetensors"):
            found |= load(read_bytes(run.store.files, part))
    return found


def test_an_update_is_made_again_with_the_same_bits_from_a_replayed_policy(run: TinyRun) -> None:
    """The reference is what was committed before anything was pruned: every tensor of the checkpoint."""
    before = [checkpoint(run, line(run, "update", i)) for i in range(4)]
    assert any(not before[0][n].equal(before[1][n]) for n in before[0] if n.startswith("exp_avg."))
    assert any(not before[0][n].equal(before[1][n]) for n in before[0] if n.startswith("model."))
    record = run.store.record()
    prune(run)
    with pytest.raises(PrunedError):
        checkpoint(run, line(run, "update", 1))
    updates = run.workers.updates
    made = rerun(run, 1, "update")
    assert run.workers.updates == updates + 2
    assert made.folder != line(run, "update", 1).folder
    assert made.content_digest == line(run, "update", 1).content_digest
    after = checkpoint(run, made)
    assert after.keys() == before[1].keys() and all(after[name].equal(before[1][name]) for name in after)
    replayed = run.store.holding(line(run, "update", 0), "checkpoint")
    assert replayed and all(t.equal(before[0][name]) for name, t in checkpoint(run, replayed).items())
    assert run.store.record() == record


def test_another_option_trains_from_the_policy_that_the_run_had(run: TinyRun) -> None:
    """The replay takes the run's own options, the rerun the changed one: as if nothing had been pruned."""
    unpruned = rerun(run, 2, "update", lr=0.05)
    Path(run.store.files.url(unpruned.folder), "manifest.json").unlink()
    prune(run)
    updates = run.workers.updates
    made = rerun(run, 2, "update", lr=0.05)
    assert run.workers.updates == updates + 3
    assert made.folder != unpruned.folder
    assert made.content_digest == unpruned.content_digest != line(run, "update", 2).content_digest
    assert made.upstream["policy"].content_digest == line(run, "update", 1).content_digest
    # The replayed checkpoint stays beside the line and serves the next one.
    rerun(run, 2, "update", lr=0.06)
    assert run.workers.updates == updates + 4


def test_only_the_updates_after_the_nearest_checkpoint_are_replayed(run: TinyRun) -> None:
    prune(run)
    kept = rerun(run, 0, "update")
    assert kept.folder != line(run, "update", 0).folder
    updates = run.workers.updates
    rerun(run, 2, "update", lr=0.05)
    assert run.workers.updates == updates + 2


def test_a_pruned_rollout_is_named_with_the_command_that_makes_it_again(run: TinyRun) -> None:
    prune(run, latents=1)
    updates = run.workers.updates
    with pytest.raises(PrunedError) as caught:
        rerun(run, 2, "update", lr=0.05)
    sentence = str(caught.value)
    assert "latents, conditioning of rollout of iteration 2 were pruned (--keep-latents-iterations 1)" in sentence
    assert "`miles rerun r 2 rollout`" in sentence
    assert run.workers.updates == updates
    made = rerun(run, 2, "rollout")
    assert made.folder != line(run, "rollout", 2).folder
    assert made.content_digest == line(run, "rollout", 2).content_digest
    assert rerun(run, 2, "rollout") == made
    with pytest.raises(PrunedError, match="cannot be replayed"):
        rerun(run, 2, "update", lr=0.05)


def test_what_cannot_be_replayed_says_why_and_what_to_do(run: TinyRun) -> None:
    prune(run, latents=2)
    with pytest.raises(PrunedError) as caught:
        rerun(run, 2, "update", lr=0.05)
    sentence = str(caught.value)
    assert "checkpoint of update of iteration 1 was pruned (--keep-full-checkpoints 2)" in sentence
    assert "latents of rollout of iteration 0, 1 were pruned too (--keep-latents-iterations 2)" in sentence
    assert "`miles rerun r I rollout` for I of 0, 1" in sentence
    for iteration in (0, 1):
        rerun(run, iteration, "rollout")
    updates = run.workers.updates
    assert rerun(run, 2, "update", lr=0.05).stage == "update"
    assert run.workers.updates == updates + 3


def test_a_replay_that_comes_out_otherwise_stops_and_commits_nothing(run: TinyRun) -> None:
    """Here the update says another learning rate than it was made with."""
    prune(run)
    path = Path(run.store.files.url(line(run, "update", 0).folder), "manifest.json")
    manifest = json.loads(path.read_text())
    manifest["affecting_config"]["lr"] *= 1.001
    path.write_text(json.dumps(manifest))
    wanted = line(run, "update", 0).content_digest[:12]
    with pytest.raises(StageError, match=rf"update of iteration 0 was replayed.* where {wanted} was recorded"):
        rerun(run, 1, "update")
    assert len(run.store.committed("update", 0)) == 1


def test_train_makes_a_lost_update_again_with_what_was_pruned_for_it(run: TinyRun) -> None:
    """Iteration 1's adapter is lost after its latents and its predecessor's checkpoint were pruned: train makes the
    rollout of iteration 1 again, and says that of iteration 0 too is needed."""
    digests = {s: line(run, s, 1).content_digest for s in ("rollout", "update")}
    prune(run, latents=1)
    (adapter,) = line(run, "update", 1).under("adapter/")
    Path(run.store.files.url(adapter.path)).unlink()
    with pytest.raises(PrunedError, match=re.escape("`miles rerun r 0 rollout`")):
        run.iterate(1)
    rerun(run, 0, "rollout")
    done = run.iterate(1)
    assert {s: o.reused for s, o in done.items() if s != "sync"} == {
        "prompts": True,
        "rollout": True,
        "rewards": True,
        "advantages": True,
        "update": False,
    }
    assert {s: line(run, s, 1).content_digest for s in digests} == digests
    assert run.store.damage(line(run, "update", 1)) is None


def test_a_rerun_says_that_it_makes_what_was_pruned(run: TinyRun) -> None:
    prune(run, latents=1)
    outcome = run.stage(run.step(1, moves_line=False), "rollout")
    assert (outcome.reused, outcome.reason) == (False, "its latents, conditioning were pruned")
    assert run.stage(run.step(1, moves_line=False), "rewards").reused


def test_a_fork_trains_on_from_what_its_parent_pruned(run: TinyRun) -> None:
    """The policy that a fork keeps is replayed with the options that it was made with, not with the fork's; it comes out
    as a rerun in the parent before anything was pruned."""
    unpruned = rerun(run, 2, "update", lr=0.05, diffusion_clip_range=0.01)
    before = {p: p.read_bytes() for p in (run.root / "runs" / "r").rglob("*") if p.is_file()}
    prune(run, latents=2)
    for i in range(2):
        rerun(run, i, "rollout")
    options = {"lr": 0.05, "diffusion_clip_range": 0.01}
    begin_fork(plan_fork(run.store, run.config, "2", "child", overrides=options))
    child = copy(run)
    child.store, child.config = open_run("child", run.store.files.root)
    updates = run.workers.updates
    outcomes = child.iterate(2)
    assert [stage for stage, outcome in outcomes.items() if not outcome.reused] == ["update", "sync"]
    assert run.workers.updates == updates + 3
    made = outcomes["update"].manifest
    assert made.content_digest == unpruned.content_digest != line(run, "update", 2).content_digest
    assert {u.run for u in made.upstream.values()} == {"r"}
    assert {m.held_by for m in child.store.committed("update", 1)} == {"child"}
    kept = [p for p in before if p.exists()]
    assert all(p.read_bytes() == before[p] for p in kept) and len(kept) > len(before) / 2


def test_a_fork_may_take_another_number_of_optimizer_steps(run: TinyRun) -> None:
    begin_fork(plan_fork(run.store, run.config, "2", "child", overrides={"num_steps_per_rollout": 2}))
    child = copy(run)
    child.store, child.config = open_run("child", run.store.files.root)
    update = child.iterate(2)["update"].manifest
    rows = read_table(child.store.files, update.data[0]).to_pylist()
    assert [row["global_step"] for row in rows] == [2, 3]
    assert len(read_table(child.store.files, child.iterate(3)["update"].manifest.data[0]).to_pylist()) == 2
