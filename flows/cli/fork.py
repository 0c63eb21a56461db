"""miles fork RUN ITER --run-id NEW: a run that goes on from another one's iteration."""

import shlex

import typer

from deployments.recipes import recipe as build_recipe
from miles_core.config.folders import artifact_root as root_of
from miles_core.config.overrides import from_flags, to_flags
from miles_core.pipeline.fork import Fork, begin_fork, plan_fork, told_of
from miles_core.pipeline.run import open_run
from miles_core.store.files import prove_conditional_put


def fork(
    context: typer.Context,
    run: str = typer.Argument(help="Name of the run, or latest."),
    iteration: str = typer.Argument(help="Iteration from which on the new run is its own."),
    run_id: str = typer.Option(..., help="Name of the new run."),
    stage: str | None = typer.Option(None, help="First stage of the iteration that is made again."),
    from_attempt: str | None = typer.Option(None, help="Attempt of the iteration that the new run goes on from."),
    artifact_root: str | None = typer.Option(None, help="Folder of all runs."),
) -> None:
    """Begin a run that keeps another's iterations before ITER, and of ITER what comes before the changed stage or what an
    attempt was made from. Nothing is copied. `miles train` then carries it on. Any option that `miles config` lists may
    be given too, but those of the policy itself (--lora-rank, --seed, another model): --lr 0.001."""
    overrides = from_flags(context.args)
    parent, config = open_run(run, artifact_root)
    prove_conditional_put(parent.files)
    planned = plan_fork(parent, config, iteration, run_id, stage=stage, attempt=from_attempt, overrides=overrides)
    command = _command(planned, str((parent.record() or {})["recipe"]))
    begin_fork(planned)
    print("\n  ".join(told_of(planned)))
    total = planned.config.run.num_rollout
    print(f"train it up to iteration {total - 1}, or further with a larger --num-rollout, by\n  {command}")


def _command(planned: Fork, recipe: str) -> str:
    """The command that carries the fork on: the recipe and all in which the fork differs from it."""
    flags = to_flags(build_recipe(recipe), planned.config, without=("run_id", "new", "artifact_root", "code_path"))
    root = planned.store.files.root
    elsewhere = [] if root == root_of() else ["--artifact-root", root]
    return shlex.join(["miles", "train", recipe, "--run-id", planned.store.run, *flags, *elsewhere])
