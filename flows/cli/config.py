"""miles config [RECIPE]: every option, or a recipe's values."""

import os

import typer

from deployments.recipes import recipe as build_recipe
from miles_core.config import FIELDS, GROUPS, affects, flag, meaning
from miles_core.config.overrides import from_environment, from_flags


def config(
    context: typer.Context, recipe: str | None = typer.Argument(None, help="Recipe whose values are shown.")
) -> None:
    """List every option with its default and meaning, or with a recipe's values."""
    values = None
    if recipe is not None:
        values = build_recipe(recipe).replace(**(from_environment(os.environ) | from_flags(context.args))).flat()
    for group, kind in GROUPS.items():
        print(f"\n{group}: {(kind.__doc__ or '').splitlines()[0]}")
        for name, (owner, info) in FIELDS.items():
            if owner == group:
                value = values[name] if values else info.default
                stages = ", ".join(affects(name)) or "operational"
                print(f"  {flag(name)} {'unset' if value is None else value}\n      {meaning(name)} [{stages}]")
