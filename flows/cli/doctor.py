"""miles doctor RECIPE: checks before a long run."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING

import typer

from deployments.recipes import recipe as build_recipe
from flows.cli.server import answers, free_port, running_server
from miles_core.config.overrides import from_environment, from_flags, from_mapping
from miles_core.errors import InputError

if TYPE_CHECKING:
    from miles_core.doctor.check import Finding


def doctor(
    context: typer.Context,
    recipe: str = typer.Argument(help="Recipe: tiny, tiny-ocr, or a full name."),
    quick: bool = typer.Option(False, "--quick", help="Only the checks that do not load the model."),
    strict: bool = typer.Option(False, "--strict", help="A warning counts as a stop."),
    as_json: bool = typer.Option(False, "--json", help="One JSON document on stdout, progress on stderr."),
) -> int:
    """Check a recipe, with any option of `miles config`, before a long run; no run is started and nothing is written
    into the artifact root. Exit code 2 where a check says stop."""
    if recipe.startswith("-"):
        raise InputError(f"the recipe is written before the options: miles doctor RECIPE {recipe} …")
    base = build_recipe(recipe)
    changes = from_mapping(from_environment(os.environ) | from_flags(context.args))
    from miles_core.doctor.check import Check, Report, counts, examine, exit_code
    from miles_core.doctor.checks import chosen
    from miles_core.doctor.subject import Subject
    from miles_core.doctor.text import report_lines, summary_line

    reports: list[Report] = []

    def take(report: Report) -> None:
        reports.append(report)
        print("\n".join(report_lines(report)), flush=True)

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        try:
            config = base.replace(**changes)
        except InputError as fault:
            take(Report("configuration", "stop", str(fault), "", 0.0))
        else:
            with Subject(config, recipe, lambda what: print(f"        {what} …", flush=True)) as subject:
                for report in examine([Check("Prefect server", prefect_server), *chosen(quick)], subject):
                    take(report)
        print(summary_line(reports), flush=True)
    code = exit_code(reports, strict)
    if as_json:
        told = {
            "recipe": recipe,
            "checks": [r.to_json() for r in reports],
            "counts": counts(reports),
            "exit_code": code,
        }
        print(json.dumps(told, indent=2), flush=True)
    return code


def prefect_server(subject: object) -> Finding:
    """The server at PREFECT_API_URL, else the local one that runs or would be started."""
    from miles_core.doctor.check import passed, stopped

    given = os.environ.get("PREFECT_API_URL")
    if given and not answers(given):
        return stopped(f"no server answers at PREFECT_API_URL {given}", "start it, or unset the variable")
    if given:
        return passed(f"{given} answers")
    there = running_server()
    if there:
        return passed(f"the local server at {there} answers")
    return passed(
        f"PREFECT_API_URL is unset: a local server is started on loopback, port {free_port((4200, 0), '127.0.0.1')} is free"
    )
