"""miles evaluate RUN [ITER]: a committed policy on the evaluation set."""

import typer

from flows.cli.server import ensure_server, ui_address
from flows.session import evaluation_plan
from miles_core.config.forms import grouped
from miles_core.config.overrides import from_flags
from miles_core.pipeline.evaluation import iteration_of


def evaluate(
    context: typer.Context,
    run: str = typer.Argument(help="Name of the run."),
    iteration: str = typer.Argument("latest", help="Iteration whose update made the policy, latest, or init."),
    force: bool = typer.Option(False, "--force", help="Make it again, also where it is committed."),
    artifact_root: str | None = typer.Option(None, help="Folder of all runs."),
) -> None:
    """Evaluate a policy of a run, also while it is trained: own processes, and the run's line stays.
    Any option that `miles config` lists and that evaluation depends on may be given too: --eval-prompt-data NAME PATH."""
    options = context.args
    # Without ITER the first option stands in its place.
    if iteration.startswith("--"):
        iteration, options = "latest", [iteration, *options]
    # Not the environment: what is set there for training would change an evaluation unseen.
    overrides = from_flags(options)
    store = evaluation_plan(run, artifact_root, overrides)[0]
    number = iteration_of(store, iteration)
    api = ensure_server()
    print(f"Prefect UI {ui_address(api)}", flush=True)
    from flows.evaluate import evaluate as evaluate_flow

    folder = evaluate_flow(
        run=store.run,
        iteration="init" if number < 0 else str(number),
        options=grouped(overrides),
        force=force,
        artifact_root=store.files.root,
    )
    print(f"evaluation: {folder}")
