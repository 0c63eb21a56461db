"""Where the run's artifacts will lie: writable, another run's or this one's, and large enough."""

from __future__ import annotations

import uuid
from pathlib import Path

from miles_core.config.guard import checkpoints_kept
from miles_core.doctor.check import Finding, passed, stopped
from miles_core.doctor.subject import Subject
from miles_core.observe.terminal import bytes_text
from miles_core.pipeline.budget import budget_line, estimate, fitting, free_bytes, measured
from miles_core.pipeline.run import plan_run
from miles_core.store.files import Files, prove_conditional_put


def artifact_root(subject: Subject) -> Finding:
    """A file can be created there, once and not twice, and is removed again."""
    files = subject.files
    if not files.local:
        prove_conditional_put(files)
        return passed(f"{files.root} can be written, and honours If-None-Match and If-Match")
    root = Path(files.root)
    folder = Files(str(next(p for p in (root, *root.parents) if p.exists())))
    name = f".probe-{uuid.uuid4().hex}"
    try:
        made, again = folder.create(name, b"1"), folder.create(name, b"2")
    finally:
        folder.delete(name)
    if not made or again:
        return stopped(f"{folder.root} lets one file be created twice", "give another --artifact-root")
    return passed(f"{files.root} can be written" + ("" if folder.root == files.root else ", and is made at the start"))


def run(subject: Subject) -> Finding:
    """Whether the run is new, or carried on. Raises InputError where its name means something else already."""
    plan = plan_run(subject.config, subject.recipe, inputs=subject.inputs)
    if not plan.begun:
        return passed(f"{plan.store.run} is new: {subject.config.run.num_rollout} iterations")
    done, total = len(plan.store.line_iterations("update")), subject.config.run.num_rollout
    return passed(f"{plan.store.run} is carried on: {done} of {total} iterations are on its line")


def disk(subject: Subject, free: int | None = None) -> Finding:
    """What the run will hold at most, against what is free."""
    config, store = subject.config, subject.store
    known = measured(store, config)
    done = len(store.line_iterations("update"))
    sizes = known[1] if known else estimate(config, subject.inputs)
    source = f"as iteration {known[0]}" if known else "estimated"
    there = free_bytes(store.files) if free is None else free
    line = budget_line(config, sizes, source, done, there).removeprefix("disk: ")
    if there is None:
        return passed(line)
    keep = {
        "full_checkpoints": checkpoints_kept(config),
        "latents_iterations": config.run.keep_latents_iterations,
    }
    fit, left = fitting(sizes, done, there, **keep), max(config.run.num_rollout - done, 0)
    if fit < left:
        return stopped(
            f"{line.split(': WARNING')[0]}: {fit} of the {left} iterations left fit at {bytes_text(sizes.total)} each",
            "make room, lower --keep-latents-iterations or --keep-full-checkpoints, or give another --artifact-root",
        )
    return passed(line)
