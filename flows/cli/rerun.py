"""miles rerun RUN ITERATIONS STAGE: one stage again, beside the run's line."""

from typing import cast

import typer

from flows.cli.server import ensure_server, ui_address
from miles_core.config.forms import grouped
from miles_core.config.overrides import from_flags
from miles_core.pipeline.rerun import Rerunnable, plan_rerun


def rerun(
    context: typer.Context,
    run: str = typer.Argument(help="Name of the run, or latest."),
    iterations: str = typer.Argument(help="A number, FIRST:END, latest, latest:N, failed or unscored."),
    stage: str = typer.Argument(help="prompts, rollout, rewards, advantages or update."),
    downstream: bool = typer.Option(
        False, "--downstream", help="Also the later stages of the iteration, up to update."
    ),
    force: bool = typer.Option(False, "--force", help="Also what is committed, and say what differs."),
    from_attempt: str | None = typer.Option(None, help="Attempt whose inputs are taken instead of the line's."),
    artifact_root: str | None = typer.Option(None, help="Folder of all runs."),
) -> None:
    """Make a stage again with the inputs it had, in one iteration or many. What is committed is reused, and the run's
    line stays. Any option that `miles config` lists and that a stage made depends on may be given too:
    --rm-type ocr."""
    # Not the environment: what is set there for training would change a stage unseen.
    overrides = from_flags(context.args)
    plan = plan_rerun(
        run, artifact_root, iterations, stage, overrides=overrides, downstream=downstream, attempt=from_attempt
    )
    if not plan.selection.iterations:
        print(f"run {plan.store.run}: no iteration is {iterations}, there is nothing to do")
        return
    api = ensure_server()
    print(f"Prefect UI {ui_address(api)}", flush=True)
    from flows.rerun_stage import rerun_stage

    made = rerun_stage(
        run=plan.store.run,
        iterations=iterations,
        stage=cast(Rerunnable, plan.stages[0]),
        options=grouped(overrides),
        downstream=downstream,
        force=force,
        from_attempt=plan.attempt,
        artifact_root=plan.store.files.root,
    )
    for row in made:
        print(f"{row['stage']} of iteration {row['iteration']}: {row['folder']}")
