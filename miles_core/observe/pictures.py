"""Pictures within a number of bytes: opened from a row's frames, made smaller, encoded."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from miles_core.observe.rows import spread_order

_PNG = b"\x89PNG\r\n\x1a\n"
FRAMES_SHOWN = 4


@dataclass(frozen=True)
class Level:
    """How a picture is made smaller: the longer side in pixels at most, and the quality of WebP (0 to 100)."""

    side: int
    quality: int


def open_frames(frames: Sequence[bytes]) -> Image.Image | None:
    """The picture of a row in RGB: its image, or up to FRAMES_SHOWN frames of it side by side, evenly spread; None
    where there is none that can be read."""
    shown = sorted(spread_order(len(frames))[:FRAMES_SHOWN])
    try:
        pictures = [Image.open(io.BytesIO(frames[i])).convert("RGB") for i in shown]
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    if len(pictures) < 2:
        return pictures[0] if pictures else None
    strip = Image.new("RGB", (sum(p.width for p in pictures), max(p.height for p in pictures)))
    left = 0
    for picture in pictures:
        strip.paste(picture, (left, 0))
        left += picture.width
    return strip


def original(frames: Sequence[bytes]) -> bytes | None:
    """A row's picture as PNG with every pixel as it is; None where there is none that can be read."""
    picture = open_frames(frames)
    if picture is None:
        return None
    return frames[0] if len(frames) == 1 and frames[0].startswith(_PNG) else encoded(picture, "PNG")


def thumbnail(frames: Sequence[bytes], level: Level) -> bytes | None:
    """A row's picture as WebP at `level`, never larger than it is; None where there is none that can be read."""
    picture = open_frames(frames)
    if picture is None:
        return None
    picture.thumbnail((level.side, level.side), Image.Resampling.LANCZOS)
    return encoded(picture, "WEBP", quality=level.quality, method=4)


def encoded(picture: Image.Image, kind: str, **options: int) -> bytes:
    """The bytes of a picture as PNG, WEBP or JPEG."""
    sink = io.BytesIO()
    picture.save(sink, kind, **options)
    return sink.getvalue()
