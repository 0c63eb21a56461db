"""The gallery's page: blocks of rows and pictures as JSON in a template. All text of a run is data there, never markup."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files as resources
from string import Template
from typing import TYPE_CHECKING, Any

from miles_core.observe.plots import Point, reward_svg
from miles_core.observe.rows import Row
from miles_core.observe.terminal import bytes_text, fork_text, several
from miles_core.store.run_store import RunStore

if TYPE_CHECKING:
    from miles_core.observe.gallery import Gallery

_SCRIPTS = ("data.js", "list.js", "gallery.js")


@dataclass(frozen=True)
class Block:
    """An iteration's images. `rows` without frames and `pictures` (base64 of type `kind`) in sample order; `attempts` by
    stage, as the line names them; `groups`: how many images each has in the run, and which of them are here by reward,
    1 the best."""

    iteration: int
    folder: str
    attempts: Mapping[str, str]
    kind: str
    rows: Sequence[Row]
    pictures: Sequence[str]
    groups: Mapping[int, tuple[int, Sequence[int]]]


@dataclass(frozen=True)
class Curve:
    """`points` of all iterations, `further` curves by name; `shown`: the iterations whose images are in the page."""

    points: Sequence[Point]
    further: Mapping[str, Mapping[int, float]]
    shown: Collection[int]

    @property
    def partly(self) -> bool:
        """Whether it has iterations that are not in the page."""
        return any(point.iteration not in self.shown for point in self.points)

    def svg(self, width: int, height: int) -> str:
        """Where not all iterations are in the page, a dot marks those that are."""
        marked = self.shown if self.partly else ()
        return reward_svg(
            self.points, further=self.further, marked=marked, mark="in this page", width=width, height=height
        )


def script_json(value: Any) -> str:
    """JSON that can stand in a <script> element whatever text it holds."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def block_html(block: Block) -> bytes:
    """The two elements of a block: its rows, and its pictures, which are parsed only when they are looked at."""
    prompts = list(dict.fromkeys(row.prompt for row in block.rows))
    columns = {
        "sample_index": [row.sample_index for row in block.rows],
        "group_index": [row.group_index for row in block.rows],
        "prompt": [prompts.index(row.prompt) for row in block.rows],
        "seed": [row.seed for row in block.rows],
        "reward": [_short(row.reward) for row in block.rows],
        "advantage": [_short(row.advantage) for row in block.rows],
    }
    names = dict.fromkeys(name for row in block.rows for name in row.figures)
    figures = {name: _column([_short(row.figures.get(name)) for row in block.rows]) for name in names}
    rows = {
        "iteration": block.iteration,
        "folder": block.folder,
        "attempts": dict(block.attempts),
        "kind": block.kind,
        "prompts": prompts,
        "groups": {str(g): {"total": total, "ranks": list(ranks)} for g, (total, ranks) in block.groups.items()},
        "columns": columns,
        "figures": figures,
    }
    return (
        f'<script type="application/json" class="rows">{script_json(rows)}</script>\n'
        f'<script type="application/json" id="pictures-{block.iteration}">{script_json(list(block.pictures))}</script>\n'
    ).encode()


def page_html(store: RunStore, curve: Curve, blocks: Sequence[Block], made: Gallery, lineage: tuple[str, str]) -> bytes:
    """The whole page in UTF-8."""
    style, script = _part("gallery.css"), "".join(map(_part, _SCRIPTS))
    rows = [row for block in blocks for row in block.rows]
    first = rows[0].figures if rows else {}
    height, width = first.get("height") or 1, first.get("width") or 1
    page = {
        "command": list(lineage),
        "aspect": min(1.5, max(0.4, height / width)),
        "pixels": max(height, width),
        "scores": sorted(
            {name.removeprefix("score_") for row in rows for name in row.figures if name.startswith("score_")}
        ),
        "reduced": f"WebP of at most {made.level.side} pixels" if made.level else None,
        "points": [
            [p.iteration, _short(p.mean), _short(p.low), _short(p.high), _short(p.zero_std)] for p in curve.points
        ],
        "left_out": list(made.left_out),
    }
    record = store.record() or {}
    facts = f"recipe {record.get('recipe', '')} · {_images(made)} · {store.files.url(store.run)}"
    reasons = left_out(made)
    head = Template(_part("gallery.html")).substitute(
        title=escape(f"{store.run} — images"),
        facts=escape(facts),
        fork=escape(fork_text(record)),
        fork_hidden="" if "parent" in record else " hidden",
        left_out="<ul>" + "".join(f"<li>{escape(reason)}</li>" for reason in reasons) + "</ul>",
        left_out_summary="What is not in this page, and why",
        left_out_hidden="" if reasons else " hidden",
        curve=curve.svg(1200, 210),
        curve_narrow=curve.svg(400, 260),
        curve_says="Click an iteration to see its images."
        if not curve.partly
        else "Click an iteration with a dot to see its images. The others are not in this page.",
        page=script_json(page),
        style=style,
        style_hash=_source_hash(style),
        script=script,
        script_hash=_source_hash(script),
        chunks="\0",
    )
    before, after = head.encode().split(b"\0")
    return b"".join([before, *map(block_html, blocks), after])


def left_out(made: Gallery) -> list[str]:
    """What the page does not show and why, a sentence each."""
    reasons = []
    missing = made.total - made.images - made.without_picture
    if made.level and missing > 0:
        reasons.append(
            f"{several(missing, 'image')}, so that the page stays within its size: every iteration has the same room, every "
            "group its best, its worst and its middle, and then as many between as fit; Groups says which"
        )
    if made.without_picture:
        reasons.append(f"{several(made.without_picture, 'sample')} whose picture is missing or cannot be read")
    return reasons + [f"iteration {iteration}: {why}" for iteration, why in made.left_out.items()]


def told(made: Gallery, where: str) -> list[str]:
    """What the command prints."""
    smaller = f", as WebP of at most {made.level.side} pixels" if made.level else ""
    size = bytes_text(len(made.html))
    head = f"{_images(made)}{smaller}, {size}: {where}"
    return [head, *(f"  left out: {reason}" for reason in left_out(made))]


def _images(made: Gallery) -> str:
    return f"{made.images:,} of {several(made.total, 'image')} of {several(made.iterations, 'iteration')}"


def _part(name: str) -> str:
    return resources("miles_core.observe.page").joinpath(name).read_text("utf-8")


def _source_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _column(values: list[Any]) -> Any:
    """A column, or its one value where all rows have the same."""
    same = all(value == values[0] and type(value) is type(values[0]) for value in values)
    return values[0] if same else values
