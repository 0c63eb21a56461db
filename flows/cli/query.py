"""miles query "SQL": DuckDB over the stages of runs."""

import sys
from pathlib import Path
from typing import cast, get_args

import typer

from miles_core.config.folders import artifact_root as root_of
from miles_core.config.folders import local_path
from miles_core.errors import InputError
from miles_core.observe.query_output import Format, parquet_of, text_of
from miles_core.store.files import Files, reach
from miles_core.store.questions import QUESTIONS, question


def query(
    sql: str | None = typer.Argument(None, help="The query; without one, the views and their columns are listed."),
    run: list[str] | None = typer.Option(None, help="A run, several by giving it again; all (the default)."),
    name: str | None = typer.Option(None, "--question", help="A ready question instead of SQL."),
    questions: bool = typer.Option(False, "--questions", help="List the ready questions."),
    show_sql: bool = typer.Option(False, "--show-sql", help="Print the SQL of --question."),
    attempts: bool = typer.Option(
        False, "--attempts", help="Views hold every committed attempt, not the line's alone."
    ),
    output: str = typer.Option("table", help="table, csv, json or parquet."),
    file: str | None = typer.Option(None, help="A new file for the rows; parquet needs one."),
    artifact_root: str | None = typer.Option(None, help="Folder of all runs."),
) -> None:
    """Query runs by SQL: a view a stage, `<stage>_all` with the attempts beside the line, samples, manifests, metrics."""
    if questions:
        for key, asked in QUESTIONS.items():
            print(f"{key:<20} {asked.asks}")
        return
    text = _sql(sql, name)
    if show_sql:
        if name is None:
            raise InputError("--show-sql prints the SQL of a ready question: give --question NAME")
        print(text)
        return
    kind = _format(output)
    target = _target(kind, file)
    files = Files(root_of(given=artifact_root))
    reach(files)
    # Takes a second to import, which no other command needs.
    from miles_core.observe.database import database as open_database
    from miles_core.store.catalog import chosen_runs

    runs = chosen_runs(files, run or [])
    if text is None:
        for view, columns in open_database(files, runs, "rewards").views().items():
            print(f"{view}: {', '.join(columns)}")
        return
    database = open_database(files, runs, text, attempts=attempts)
    rows = database.run()
    batches = database.read(rows)
    if target is None:
        for piece in text_of(batches, rows.schema, kind):
            sys.stdout.write(piece)
    else:
        data = (
            parquet_of(batches, rows.schema)
            if kind == "parquet"
            else "".join(text_of(batches, rows.schema, kind)).encode()
        )
        if not Files(str(target.parent)).create(target.name, data):
            raise InputError(f"--file {target} exists already: give another name, or delete it")
    for note in database.notes:
        print(f"note: {note}", file=sys.stderr)


def _sql(sql: str | None, name: str | None) -> str | None:
    if sql is not None and name is not None:
        raise InputError("SQL and --question were both given: give one of them")
    return question(name).sql if name is not None else sql


def _format(output: str) -> Format:
    if output not in get_args(Format):
        raise InputError(f"--output {output!r} is no format: choose one of {', '.join(get_args(Format))}")
    return cast(Format, output)


def _target(kind: Format, file: str | None) -> Path | None:
    if file is None:
        if kind == "parquet":
            raise InputError("--output parquet is no text for a terminal: give --file NAME.parquet too")
        return None
    path = local_path(file, "--file")
    if path.exists():
        raise InputError(f"--file {path} exists already: give another name, or delete it")
    if not path.parent.is_dir():
        raise InputError(f"--file {path}: there is no folder {path.parent}, make it or give another name")
    return path
