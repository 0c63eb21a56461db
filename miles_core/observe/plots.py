"""The reward curve of a run as SVG, from the summaries in its manifests alone."""

import base64
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from miles_core.store.manifest import Manifest

# Shades that can be read on a light and on a dark ground.
_BLUE, _GREY, _RED = "#3b82f6", "#858e9a", "#e5603a"
_FURTHER = ("#d97706", "#0d9488", "#a855f7", "#db2777", "#65a30d")
_LEFT, _RIGHT, _TOP = 64, 16, 30
_SHARE_HEIGHT, _GAP, _BOTTOM, _LEGEND_LINE = 34, 26, 24, 16


@dataclass(frozen=True)
class Point:
    """An iteration's rewards: mean, smallest and largest over its samples; mean score of each scorer by name; share of
    groups whose rewards are all the same (0 to 1), None before advantages are made."""

    iteration: int
    mean: float
    low: float
    high: float
    scores: Mapping[str, float] = field(default_factory=dict)
    zero_std: float | None = None

    @property
    def finite(self) -> bool:
        """Whether it can be drawn."""
        return all(map(math.isfinite, (self.mean, self.low, self.high)))


def point_of(rewards: Manifest, advantages: Manifest | None) -> Point:
    """The point of an iteration, from the summaries of its stages."""
    s, a = rewards.summary, advantages.summary if advantages else {}
    share = a["zero_std_groups"] / a["groups"] if a.get("groups") else None
    return Point(rewards.iteration, s["reward_mean"], s["reward_min"], s["reward_max"], s.get("score_means", {}), share)


def reward_svg(
    points: Sequence[Point],
    *,
    further: Mapping[str, Mapping[int, float]] | None = None,
    marked: Collection[int] = (),
    mark: str = "",
    width: int = 960,
    height: int = 300,
) -> str:
    """The curve: mean as a line, smallest to largest as a band, below it the share of groups without spread.

    further: other curves by name, e.g. evaluation, a value by iteration; what is not finite is no part of them. marked:
    iterations with a dot on the mean, `mark` says in the legend what it means. Curves of the scorers are drawn where
    there are several. Without a point it says so.
    """
    if not points:
        return _svg(width, 60, "no rewards yet", [_text(width / 2, 34, "no rewards yet", anchor="middle")])
    names = sorted({name for p in points for name in p.scores})
    curves = {n: {p.iteration: p.scores[n] for p in points if n in p.scores} for n in names if len(names) > 1}
    for name, values in (further or {}).items():
        finite = {i: value for i, value in values.items() if math.isfinite(value)}
        curves |= {name: finite} if finite else {}
    shades = dict(zip(curves, _FURTHER * len(curves), strict=False))
    dots = [p for p in points if p.iteration in marked]
    legend, lines = _legend(
        [("mean reward, band: smallest to largest", _BLUE), *([(f"● {mark}", _BLUE)] if dots else []), *shades.items()],
        width,
    )
    frame = _frame(points, curves, width, height, _TOP + (lines - 1) * _LEGEND_LINE)
    band = [(p.iteration, p.high) for p in points] + [(p.iteration, p.low) for p in reversed(points)]
    parts = [*_axes(frame)]
    parts.append(f'<polygon class="band" points="{frame.path(band)}" fill="{_BLUE}" fill-opacity="0.18"/>')
    for name, values in curves.items():
        parts.append(_curve(frame, sorted(values.items()), shades[name], dash=' stroke-dasharray="5 3"'))
    parts.append(_curve(frame, [(p.iteration, p.mean) for p in points], _BLUE))
    if dots:
        # Lines of no length with round ends: far fewer bytes than as many circles.
        path = "".join(f"M{frame.x(p.iteration):.1f} {frame.y(p.mean):.1f}h0" for p in dots)
        parts.append(f'<path class="marked" d="{path}" stroke="{_BLUE}" stroke-width="8" stroke-linecap="round"/>')
    parts += legend
    parts += _zero_std(frame, points)
    last = points[-1]
    title = (
        f"reward of iterations {points[0].iteration} to {last.iteration}: mean {points[0].mean:.4g} to {last.mean:.4g}"
    )
    return _svg(width, height, title, parts, frame)


def svg_url(svg: str) -> str:
    """A data: URL, as Markdown and <img> take it."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


@dataclass(frozen=True)
class _Frame:
    left: float
    right: float
    top: float
    bottom: float
    first: int
    last: int
    low: float
    high: float

    def x(self, iteration: float) -> float:
        span = self.last - self.first
        return (
            (self.left + self.right) / 2
            if not span
            else _between(self.left, self.right, (iteration - self.first) / span)
        )

    def y(self, value: float) -> float:
        return _between(self.bottom, self.top, (value - self.low) / (self.high - self.low))

    def path(self, values: Sequence[tuple[int, float]]) -> str:
        return " ".join(f"{self.x(i):.1f},{self.y(v):.1f}" for i, v in values)


def _between(start: float, end: float, share: float) -> float:
    return start + (end - start) * share


def _frame(
    points: Sequence[Point], curves: Mapping[str, Mapping[int, float]], width: int, height: int, top: float
) -> _Frame:
    values = [v for p in points for v in (p.low, p.high)] + [v for c in curves.values() for v in c.values()]
    iterations = [p.iteration for p in points] + [i for c in curves.values() for i in c]
    low, high = min(values), max(values)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    bottom = height - _BOTTOM - _SHARE_HEIGHT - _GAP
    return _Frame(_LEFT, width - _RIGHT, top, bottom, min(iterations), max(iterations), low - margin, high + margin)


def _axes(frame: _Frame) -> list[str]:
    parts = []
    for value in _ticks(frame.low, frame.high, 4):
        y = frame.y(value)
        parts.append(
            f'<line x1="{frame.left}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GREY}" stroke-opacity="0.3"/>'
        )
        parts.append(_text(frame.left - 8, y + 4, minus(f"{value:.4g}"), anchor="end"))
    foot = frame.bottom + _GAP + _SHARE_HEIGHT
    count = min(8, round((frame.right - frame.left) / 60))
    whole = {round(t) for t in _ticks(frame.first, frame.last, count)} | {frame.first}
    labels = sorted(i for i in whole if frame.first <= i <= frame.last)
    return parts + [_text(frame.x(i), foot + 16, minus(str(i)), anchor="middle") for i in labels]


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between low and high, about `count` of them."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.75)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step) + 1)]


def _curve(frame: _Frame, values: Sequence[tuple[int, float]], shade: str, dash: str = "") -> str:
    if len(values) == 1:
        (iteration, value) = values[0]
        return f'<circle cx="{frame.x(iteration):.1f}" cy="{frame.y(value):.1f}" r="3" fill="{shade}"/>'
    return f'<polyline points="{frame.path(values)}" fill="none" stroke="{shade}" stroke-width="1.8"{dash}/>'


def _legend(entries: Sequence[tuple[str, str]], width: int) -> tuple[list[str], int]:
    """The names beside their shades, and how many lines they take within `width`."""
    parts, left, line = [], float(_LEFT), 0
    for name, shade in entries:
        wide = 20 + 6.6 * len(name)
        if left > _LEFT and left + wide > width:
            left, line = float(_LEFT), line + 1
        y = 10 + line * _LEGEND_LINE
        parts.append(f'<rect x="{left:.0f}" y="{y}" width="14" height="4" fill="{shade}"/>')
        parts.append(_text(left + 20, y + 6, name))
        left += wide + 22
    return parts, line + 1


def _zero_std(frame: _Frame, points: Sequence[Point]) -> list[str]:
    known = [(p.iteration, p.zero_std) for p in points if p.zero_std is not None]
    top, foot = frame.bottom + _GAP, frame.bottom + _GAP + _SHARE_HEIGHT
    bar = max(1.0, min(24.0, (frame.right - frame.left) / max(1, frame.last - frame.first) * 0.8))
    parts = [
        f'<line x1="{frame.left}" x2="{frame.right}" y1="{foot}" y2="{foot}" stroke="{_GREY}" stroke-opacity="0.6"/>',
        _text(frame.left, top - 7, "groups without spread"),
        _text(frame.left - 8, top + 6, "100%", anchor="end"),
        _text(frame.left - 8, foot + 4, "0%", anchor="end"),
    ]
    for iteration, share in known:
        tall = share * _SHARE_HEIGHT
        if tall:
            x = min(max(frame.x(iteration) - bar / 2, frame.left), frame.right - bar)
            parts.append(
                f'<rect x="{x:.1f}" y="{foot - tall:.1f}" width="{bar:.1f}" height="{tall:.1f}" fill="{_RED}" '
                'fill-opacity="0.75"/>'
            )
    return parts


def minus(number: str) -> str:
    """A number with a true minus sign."""
    return number.replace("-", "−")


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_GREY}">{escape(text)}</text>'


def _svg(width: int, height: int, title: str, parts: Sequence[str], frame: _Frame | None = None) -> str:
    place = (
        f' data-left="{frame.left}" data-right="{frame.right}" data-first="{frame.first}" data-last="{frame.last}"'
        if frame
        else ""
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="12"{place}>'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )
