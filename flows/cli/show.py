"""miles show RUN [ITER [STAGE]]: what a run holds."""

import datetime

import typer

from miles_core.config import RunConfig, flag
from miles_core.errors import InputError
from miles_core.observe.guard import Finding
from miles_core.observe.history import History
from miles_core.observe.terminal import figures_of, fork_text, several
from miles_core.pipeline.evaluation import BEFORE_TRAINING
from miles_core.pipeline.guard import findings_of
from miles_core.pipeline.run import existing_iteration, open_run
from miles_core.store.manifest import Manifest
from miles_core.store.run_store import RunStore
from miles_core.store.stages import ITERATION_STAGES, StageName


def show(
    run: str = typer.Argument(help="Name of the run."),
    iteration: str | None = typer.Argument(None, help="Number of an iteration, or init."),
    stage: str | None = typer.Argument(None, help="A stage of it."),
    artifact_root: str | None = typer.Option(None, help="Folder of all runs."),
) -> None:
    """Show a run's iterations, an iteration's stages with all attempts, or a stage's files; init: what it starts from."""
    store, options = open_run(run, artifact_root)
    if iteration is None:
        _run(store, options)
        return
    number = BEFORE_TRAINING if iteration == "init" else existing_iteration(store, iteration)
    shown = (*(("policy",) if number < 0 else ITERATION_STAGES), "evaluation")
    if stage is None:
        for name in shown:
            _attempts(store, name, number)
        _guard(store, options, number)
        return
    if stage not in shown:
        raise InputError(f"there is no stage {stage!r}: choose one of {', '.join(shown)}")
    name = next(s for s in shown if s == stage)
    _attempts(store, name, number)
    line = store.on_line(name, number)
    kept = [line] if line and line.held_by != store.run else []
    for manifest in (*kept, *store.committed(name, number)):
        print(f"\n{store.files.url(manifest.folder)}")
        print(_made(manifest))
        stone = store.pruned(manifest)
        for part in manifest.parts:
            path = part.path.removeprefix(manifest.folder + "/")
            gone = "  pruned" if stone and path in stone.parts else ""
            print(f"  {path:<48} {part.bytes:>10} bytes {part.rows:>6} rows{gone}")
        for upstream in manifest.upstream.values():
            of = f" of run {upstream.run}" if upstream.run != store.run else ""
            print(f"  from {upstream.stage} of iteration {upstream.iteration}: {upstream.attempt}{of}")


def _made(manifest: Manifest) -> str:
    """When, with what options and by which program an attempt was made."""
    times = manifest.times
    when = datetime.datetime.fromtimestamp(times["committed_at"]).isoformat(" ", "seconds")
    lines = {
        "made": f"{when}, in {times['committed_at'] - times['started_at']:.1f} s",
        "flow run": manifest.flow_run_id or "none",
        "options": ", ".join(f"{flag(n)} {v}" for n, v in manifest.affecting_config.items() if v is not None),
        "inputs": ", ".join(f"{role} {digest[:12]}" for role, digest in manifest.inputs.items()),
        "versions": ", ".join(f"{name} {number}" for name, number in manifest.versions.items()),
    }
    return "\n".join(f"  {name:<9} {text}" for name, text in lines.items() if text)


def _guard(store: RunStore, options: RunConfig, iteration: int) -> None:
    found = _findings(store, options, [iteration])
    for finding in found.get(iteration, []):
        print(f"{'guard':<11}{finding.check:<16} {finding.told}")
    if iteration in found and not found[iteration]:
        print(f"{'guard':<11}finds nothing")


def _findings(store: RunStore, options: RunConfig, iterations: list[int]) -> dict[int, list[Finding]]:
    history = History(store)
    history.refresh()
    return findings_of(history, options, iterations, (store.record() or {}).get("guard_from", 0))


def _run(store: RunStore, options: RunConfig) -> None:
    record = store.record() or {}
    found = _findings(store, options, store.line_iterations("update"))
    print(f"run {store.run} · recipe {record['recipe']} · {store.files.url(store.run)}")
    if fork := fork_text(record):
        print(fork)
    if before := _evaluated(store, BEFORE_TRAINING):
        print(f"before training:{before}")
    for iteration in store.iterations():
        line = {name: store.on_line(name, iteration) for name in ITERATION_STAGES}
        done = [name for name, manifest in line.items() if manifest]
        rewards, update = line["rewards"], line["update"]
        reward = f"reward mean {rewards.summary['reward_mean']:.4f}" if rewards else ""
        loss = f"loss {update.summary['loss']:.3g}" if update else ""
        kept = {name: m.held_by for name, m in line.items() if m and m.held_by != store.run}
        what = "all" if len(kept) == len(done) else ", ".join(kept)
        of = f"  {what} kept of {', '.join(sorted(set(kept.values())))}" if kept else ""
        own = {m.folder for name in ITERATION_STAGES for m in store.committed(name, iteration)}
        apart = len(own - {m.folder for m in line.values() if m})
        beside = f"  {several(apart, 'attempt')} beside the line" if apart else ""
        stones = (store.pruned(manifest) for manifest in (line["rollout"], update) if manifest)
        gone = ", ".join(name for stone in stones if stone for name in stone.what)
        pruned = f"  pruned: {gone}" if gone else ""
        checks = ", ".join(finding.check for finding in found.get(iteration, []))
        guard = f"  guard: {checks}" if checks else ""
        shown = f"{reward}  {loss}{_evaluated(store, iteration)}{guard}{of}{beside}{pruned}"
        print(f"iteration {iteration}: {len(done)} of {len(ITERATION_STAGES)} stages  {shown}")


def _evaluated(store: RunStore, iteration: int) -> str:
    manifest = store.on_line("evaluation", iteration)
    return f"  evaluation: {figures_of('evaluation', manifest.summary)}" if manifest else ""


def _attempts(store: RunStore, stage: StageName, iteration: int) -> None:
    line = store.on_line(stage, iteration)
    committed: list[Manifest] = store.committed(stage, iteration)
    kept = [line] if line and line.held_by != store.run else []
    for manifest in (*kept, *committed):
        mark = "on the line" if line and line.folder == manifest.folder else "beside it"
        damage = store.damage(manifest)
        state = f"DAMAGED: {damage}" if damage else figures_of(stage, manifest.summary)
        if stone := store.pruned(manifest):
            state += f"  pruned: {', '.join(stone.what)}"
        if manifest in kept:
            state += f"  of run {manifest.held_by}"
        digest = manifest.content_digest[:12]
        print(f"{stage:<11}{manifest.attempt:<16} {mark:<12}{manifest.rows:>6} rows  {digest}  {state}")
    unfinished = len(store.attempts(stage, iteration)) - len(committed)
    if unfinished:
        print(f"{stage:<11}{unfinished} unfinished")
