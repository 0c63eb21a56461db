"""miles rescore RUN: another scorer over the images of a run, compared with the rewards it was trained on."""

import typer

from flows.cli.gallery import target_of
from flows.cli.server import ensure_server, ui_address
from miles_core.config.forms import grouped
from miles_core.config.overrides import from_flags
from miles_core.errors import InputError
from miles_core.observe.rescored import disagreement_sheet, disagreements, rescored, table
from miles_core.pipeline.lineage import attempt_of, consumed_by
from miles_core.pipeline.rerun import plan_rerun
from miles_core.pipeline.run import open_run
from miles_core.store.files import Files


def rescore(
    context: typer.Context,
    run: str = typer.Argument(help="Name of the run, or latest."),
    iterations: str | None = typer.Option(
        None, help="A number, FIRST:END, latest or latest:N; else all that are scored."
    ),
    output: str | None = typer.Option(None, help="The sheet; else RUN-rescored.png in the current folder."),
    sheet: int = typer.Option(12, min=0, max=48, help="Images on the sheet; 0: no sheet."),
    artifact_root: str | None = typer.Option(None, help="Folder of all runs."),
) -> None:
    """Score a run's images again with another scorer, beside the run's line, and say how far both agree: means, rank
    correlation, groups whose best sample changes, and a sheet of the images they disagree about most. Give the scorer as
    any option that rewards depend on: --rm-type ocr. What was scored so before is reused."""
    overrides = from_flags(context.args)
    if not overrides:
        raise InputError(
            "rescore with what? Give an option that rewards depend on, as --rm-type ocr or --custom-rm-path"
        )
    store, _ = open_run(run, artifact_root)
    chosen = iterations or f"0:{max(store.iterations(), default=0) + 1}"
    plan = plan_rerun(run, artifact_root, chosen, "rewards", overrides=overrides)
    trained = {number: store.on_line("rewards", number) for number in plan.selection.iterations}
    if not any(trained.values()):
        raise InputError(
            f"run {store.run} has no rewards in {iterations or 'any iteration'}: there is nothing to compare"
        )
    target = target_of(output or f"{store.run}-rescored.png", "rescored.png") if sheet else None
    print(f"Prefect UI {ui_address(ensure_server())}", flush=True)
    from flows.rerun_stage import rerun_stage

    made = rerun_stage(
        run=store.run,
        iterations=chosen,
        stage="rewards",
        options=grouped(overrides),
        artifact_root=store.files.root,
    )
    pairs, rollouts = [], {}
    for row in made:
        number = row["iteration"]
        before, after = trained.get(number), attempt_of(store, number, row["attempt"])
        if before is None:
            print(f"iteration {number} was not scored in training: it is left out")
            continue
        pairs.append(rescored(store.files, before, after))
        rollouts[number] = consumed_by(store, after, "rollout")
    if not pairs:
        print("no iteration has rewards of training and new ones: there is nothing to compare")
        return
    print(f"before: {pairs[0].scorers[0]}; after: {pairs[0].scorers[1]}")
    print("\n".join(table(pairs)))
    if target is None:
        return
    drawn = disagreement_sheet(store.files, rollouts, disagreements(pairs, sheet))
    if drawn is None:
        print("no image of the run can be read: there is no sheet")
        return
    Files(str(target.parent)).replace(target.name, drawn.data)
    print(f"the images they disagree about most: {target}")
