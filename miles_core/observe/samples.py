"""A few images of a rollout on one picture: the best, the worst and some between, with what they earned."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from miles_core.observe.pictures import encoded, open_frames
from miles_core.observe.rows import Row, Score, parts_with, ranked, read_part, read_scores, spread_order
from miles_core.store.files import Files
from miles_core.store.manifest import Manifest

_PAPER, _INK, _FAINT, _BOARD = "#ffffff", "#16202c", "#5b6775", "#e9ecf0"
_GAP, _LINE, _SIZE = 12, 19, 14


@dataclass(frozen=True)
class Sheet:
    """An encoded picture; `kind` is image/png or image/jpeg."""

    data: bytes
    kind: str

    @property
    def url(self) -> str:
        """A data: URL, as Markdown and <img> take it."""
        return f"data:{self.kind};base64,{base64.b64encode(self.data).decode()}"


def pick(indices: Sequence[int], scores: Mapping[int, Score], count: int) -> dict[int, str]:
    """At most `count` sample indices with what each is, from the best to the worst: both ends, the median, and others
    evenly between. Without rewards the first ones, of which nothing is said."""
    rank = ranked([i for i in indices if i in scores and scores[i].reward is not None], scores)
    if not rank:
        return dict.fromkeys(sorted(indices)[:count], "")
    places = sorted(spread_order(len(rank))[:count])
    words = {(len(rank) - 1) // 2: "median", len(rank) - 1: "worst", 0: "best"}
    return {rank[place]: words.get(place, f"{place + 1} of {len(rank)}") for place in places}


def sample_sheet(
    files: Files,
    rollout: Manifest,
    rewards: Manifest | None = None,
    advantages: Manifest | None = None,
    *,
    count: int = 6,
    max_bytes: int = 200_000,
) -> Sheet | None:
    """The contact sheet of a committed rollout, from the parts that hold the chosen samples alone; None where no sample
    holds a picture that can be read. Raises DamagedError, ValueError as contact_sheet does."""
    return contact_sheet(*chosen_rows(files, rollout, rewards, advantages, count=count), max_bytes=max_bytes)


def chosen_rows(
    files: Files,
    rollout: Manifest,
    rewards: Manifest | None = None,
    advantages: Manifest | None = None,
    *,
    count: int = 6,
) -> tuple[list[Row], dict[int, str]]:
    """At most `count` samples of a committed rollout with what each is, as `pick` takes them; only the parts that hold them
    are read. Raises DamagedError."""
    scores = read_scores(files, rewards, advantages)
    if not scores:
        return _first(files, rollout, count), {}
    chosen = pick(sorted(scores), scores, count)
    parts = parts_with(rollout, sorted(scores), chosen)
    rows = {row.sample_index: row for p in parts for row in read_part(files, rollout.iteration, p, scores, chosen)}
    return [rows[i] for i in chosen if i in rows], chosen


def contact_sheet(
    rows: Sequence[Row], words: Mapping[int, str], *, side: int = 256, max_bytes: int = 200_000
) -> Sheet | None:
    """The images of `rows` in their order, each up to `side` pixels wide and high, with its word, reward, advantage and
    prompt below; None where none can be read.

    PNG where that takes at most `max_bytes`, else JPEG as good and large as fits. Raises ValueError where nothing does.
    """
    opened = ((row, open_frames(row.frames)) for row in rows)
    cells = [(row, _fitted(picture, side)) for row, picture in opened if picture]
    if not cells:
        return None
    sheet = _drawn(cells, words, side)
    png = encoded(sheet, "PNG")
    if len(png) <= max_bytes:
        return Sheet(png, "image/png")
    for scale in (1.0, 0.75, 0.5, 0.35, 0.25):
        smaller = sheet.resize((round(sheet.width * scale), round(sheet.height * scale)), Image.Resampling.LANCZOS)
        for quality in (90, 80, 65, 50):
            jpeg = encoded(smaller, "JPEG", quality=quality)
            if len(jpeg) <= max_bytes:
                return Sheet(jpeg, "image/jpeg")
    raise ValueError(f"{len(cells)} images do not fit {max_bytes} bytes")


def _first(files: Files, rollout: Manifest, count: int) -> list[Row]:
    rows: list[Row] = []
    for part in rollout.data:
        rows += read_part(files, rollout.iteration, part, {})
        if len(rows) >= count:
            break
    return rows[:count]


def _fitted(picture: Image.Image, side: int) -> Image.Image:
    if max(picture.size) * 2 <= side:
        times = side // max(picture.size)
        return picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)
    picture.thumbnail((side, side), Image.Resampling.LANCZOS)
    return picture


def _drawn(cells: Sequence[tuple[Row, Image.Image]], words: Mapping[int, str], side: int) -> Image.Image:
    columns = min(len(cells), 3 if len(cells) in (3, 5, 6, 9) else 4)
    tall = max(picture.height for _, picture in cells)
    height = tall + 3 * _LINE + _GAP
    lines = -(-len(cells) // columns)
    sheet = Image.new("RGB", (columns * (side + _GAP) + _GAP, lines * height + _GAP), _PAPER)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_SIZE)
    for number, (row, picture) in enumerate(cells):
        left, top = _GAP + number % columns * (side + _GAP), _GAP + number // columns * height
        draw.rectangle((left, top, left + side - 1, top + tall - 1), fill=_BOARD)
        sheet.paste(picture, (left + (side - picture.width) // 2, top + (tall - picture.height) // 2))
        first, *prompt = [_told(row, words.get(row.sample_index, "")), *_wrapped(row.prompt, font, side)]
        draw.text((left, top + tall + 2), _shortened(first, font, side), _INK, font)
        for below, text in enumerate(prompt, 1):
            draw.text((left, top + tall + 2 + below * _LINE), text, _FAINT, font)
    return sheet


def _told(row: Row, word: str) -> str:
    reward = "" if row.reward is None else f"{row.reward:.4g}"
    advantage = "" if row.advantage is None else f"advantage {row.advantage:+.2f}"
    return " · ".join(filter(None, (word, reward, advantage))) or f"sample {row.sample_index}"


def _wrapped(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> list[str]:
    """At most two lines."""
    first: list[str] = []
    words = text.split()
    while words and font.getlength(" ".join([*first, words[0]])) <= width:
        first.append(words.pop(0))
    if not first and words:
        first.append(words.pop(0))
    return [_shortened(" ".join(line), font, width) for line in (first, words) if line]


def _shortened(text: str, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    kept = text[:400]
    while kept and font.getlength(f"{kept}…") > width:
        kept = kept[:-1]
    return f"{kept}…"
