"""The SQL that the project writes itself, and what it says of a person's."""

import re
from collections.abc import Sequence
from typing import Any

from miles_core.errors import InputError

SAMPLES = ("prompts", "rollout", "rewards", "advantages")
# PIVOT is a MULTI: the distinct values, then the query.
_READING = {"SELECT", "EXPLAIN", "MULTI"}
_VIEWS = "`miles query` lists the views and their columns"


def refuse_writing(statements: Sequence[Any]) -> None:
    """Raises InputError unless `statements` is one that reads."""
    if not statements:
        raise InputError(f"the SQL holds no statement: {_VIEWS}")
    for statement in statements:
        if statement.type.name not in _READING:
            raise InputError(
                f"a query reads and {statement.type.name} does more than that: give a SELECT; --output writes its rows"
            )
    if len(statements) > 1:
        raise InputError(f"the SQL holds {len(statements)} statements: give one at a time")


def fault_sentence(text: str) -> str:
    """DuckDB's error in one line, with the place: its own text shows that by a caret below the line."""
    said, _, shown = text.partition("\n\nLINE ")
    said = " ".join(said.replace("Did you mean", "did you mean").split()).rstrip(".!")
    place = ""
    if found := re.match(r"(\d+): (.*)\n( *)\^", shown):
        number, line, before = found.groups()
        # A long line is shown in part, and the caret counts in what is shown.
        column = len(before) - len(f"LINE {number}: ") + 1
        place = f" at line {number}" + ("" if line.startswith("...") else f", column {column}")
    return f"the SQL cannot be run{place}: {said}; {_VIEWS}"


def samples_view(rewards_columns: Sequence[str], attempts: bool) -> str:
    """CREATE VIEW samples: a row a sample of prompts with what became of it, null where it is not made yet.

    On the line a stage has one attempt an iteration; else a row follows what each attempt consumed.
    """
    scores = "".join(f', w."{name}"' for name in rewards_columns if name.startswith("score_"))

    def join(one: str, later: str, other: str) -> str:
        if not attempts:
            return (
                f"LEFT JOIN {later} {other} ON {one}.run = {other}.run AND {one}.iteration = {other}.iteration "
                f"AND {one}.sample_index = {other}.sample_index"
            )
        link = f"u_{later}"
        return (
            f"LEFT JOIN (SELECT {other}.*, {link}.upstream FROM {later} {other} JOIN _upstream {link} "
            f"ON {link}.stage = '{later}' AND {link}.run = {other}.run AND {link}.iteration = {other}.iteration "
            f"AND {link}.attempt = {other}.attempt) {other} ON {one}.run = {other}.run "
            f"AND {one}.iteration = {other}.iteration AND {one}.attempt = {other}.upstream "
            f"AND {one}.sample_index = {other}.sample_index"
        )

    return f"""
        CREATE VIEW samples AS SELECT
            p.run, p.iteration, p.sample_index, p.group_index, p.prompt, p.seed,
            r.policy_version, r.policy_digest, r.engine, r.part, r.height, r.width,
            w.reward, w.rm_type, w.rm_version{scores}, w.recognized, w.target, w.tries,
            a.advantage, a.group_mean, a.group_std, a.zero_std, a.kept, a.reason, a.remove_sample,
            p.attempt AS prompts_attempt, r.attempt AS rollout_attempt, w.attempt AS rewards_attempt,
            a.attempt AS advantages_attempt,
            p.on_line AND coalesce(r.on_line, true) AND coalesce(w.on_line, true) AND coalesce(a.on_line, true) AS on_line
        FROM prompts p {join("p", "rollout", "r")}
        {join("r", "rewards", "w")} {join("w", "advantages", "a")}"""
