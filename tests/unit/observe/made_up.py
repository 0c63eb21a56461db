"""Made-up runs to look at, and what a gallery's page holds."""

import io
import json
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image
from synthetic_run import SyntheticRun

from miles_core.store.parts import Part
from miles_core.store.run_store import Attempt, RunStore
from miles_core.store.schemas import IMAGE

HOSTILE = (
    "</script><img src=x onerror=\"document.title='taken'\"><!-- <script>document.title='taken'</script>"
    " & </script\n 'q' \u2028 猫"
)


def noise(seed: int, pixels: int = 48) -> bytes:
    """PNG of noise, which hardly compresses."""
    sink = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (pixels, pixels, 3), dtype=np.uint8)).save(sink, "PNG")
    return sink.getvalue()


class PictureRun(SyntheticRun):
    """`change` makes of each rollout row another; `kind` is the type of its image column."""

    kind: pa.DataType = IMAGE

    def change(self, row: dict[str, Any]) -> dict[str, Any]:
        return row

    def _write(self, attempt: Attempt, name: str, rows: list[dict[str, Any]], schema: pa.Schema) -> Part:
        if name.startswith("data/") and "image" in schema.names:
            at = schema.get_field_index("image")
            schema = schema.set(at, schema.field("image").with_type(self.kind))
            rows = [self.change(row) for row in rows]
        return super()._write(attempt, name, rows, schema)

    def whole(self, iterations: int) -> RunStore:
        for iteration in range(iterations):
            self.iterate(iteration)
        return self.draw_line()


class NoiseRun(PictureRun):
    """Pictures that take as many bytes in every iteration."""

    def change(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"image": {"bytes": noise(row["sample_index"]), "path": None}}


class HostileRun(PictureRun):
    """Every prompt tries to get out of its element."""

    def change(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"prompt": HOSTILE}


class FramesRun(PictureRun):
    """Each sample is a video of three frames; the last of an iteration has none, the one before a broken one."""

    kind = pa.list_(pa.field("element", IMAGE))

    def change(self, row: dict[str, Any]) -> dict[str, Any]:
        per_iteration = self.groups * self.samples
        at = row["sample_index"] % per_iteration
        if at == per_iteration - 1:
            return row | {"image": []}
        if at == per_iteration - 2:
            return row | {"image": [{"bytes": b"no picture", "path": None}]}
        return row | {"image": [{"bytes": noise(i), "path": None} for i in range(3)]}


@dataclass
class Held:
    """What a page holds: its elements in order, its settings, its rows and pictures by iteration."""

    tags: list[str]
    page: dict[str, Any]
    rows: dict[int, dict[str, Any]]
    pictures: dict[int, list[str]]

    @property
    def images(self) -> int:
        return sum(len(p) for p in self.pictures.values())


def held(html: bytes) -> Held:
    """A page as a parser of HTML sees it."""
    reader = _Reader()
    reader.feed(html.decode())
    reader.close()
    data = {name: json.loads(text) for name, text in reader.data if name != "rows"}
    rows = [json.loads(text) for name, text in reader.data if name == "rows"]
    pictures = {int(n.removeprefix("pictures-")): p for n, p in data.items() if n.startswith("pictures-")}
    return Held(reader.tags, data["page"], {r["iteration"]: r for r in rows}, pictures)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.data: list[tuple[str, str]] = []
        self.inside: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        if tag == "script" and given.get("type") == "application/json":
            self.inside = given.get("id") or given.get("class")
            self.data.append((str(self.inside), ""))

    def handle_data(self, data: str) -> None:
        if self.inside:
            name, text = self.data[-1]
            self.data[-1] = (name, text + data)

    def handle_endtag(self, tag: str) -> None:
        self.inside = None
