"""miles rerun RUN ITER STAGE: one stage again, beside the run's line."""

import typer

from flows.cli.server import ensure_server, ui_address
from miles_core.config.overrides import from_flags
from miles_core.pipeline.rerun import check_overrides, stages_of_rerun
from miles_core.pipeline.run import existing_iteration, inputs_of_run, open_run


def rerun(
    context: typer.Context,
    run: str = typer.Argument(help="Name of the run."),
    iteration: str = typer.Argument(help="Number of the iteration, from 0."),
    stage: str = typer.Argument(help="prompts, rollout, rewards, advantages or update."),
    downstream: bool = typer.Option(
        False, "--downstream", help="Also the later stages of the iteration, up to update."
    ),
    artifact_root: str | None = typer.Option(None, help="Folder of all runs."),
) -> None:
    """Make a stage again with the inputs it had; options that affect it may differ. The run's line stays."""
    # Not the environment: what is set there for training would change a stage unseen.
    overrides = from_flags(context.args)
    stages = stages_of_rerun(stage, downstream)
    check_overrides(overrides, stages)
    store, config = open_run(run, artifact_root)
    number = existing_iteration(store, iteration)
    inputs_of_run(store, config.replace(**overrides), overrides)
    api = ensure_server()
    print(f"Prefect UI {ui_address(api)}", flush=True)
    from flows.rerun_stage import rerun_stage

    made = rerun_stage(
        run=run,
        iteration=number,
        stage=stage,
        overrides=overrides,
        downstream=downstream,
        artifact_root=store.files.root,
    )
    for name, folder in made.items():
        print(f"{name}: {folder}")
