"""A run's images as one page that needs no server: what of them fits, made small enough, with all their figures."""

import base64
import math
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from miles_core.errors import InputError
from miles_core.observe.gallery_budget import always, fair_shares, in_turn
from miles_core.observe.gallery_page import Block, Curve, block_html, page_html
from miles_core.observe.history import History
from miles_core.observe.pictures import Level, original, thumbnail
from miles_core.observe.rows import (
    Line,
    Row,
    Score,
    on_line,
    parts_with,
    ranked,
    read_groups,
    read_part,
    read_scores,
    spread_order,
)
from miles_core.observe.terminal import several
from miles_core.store.files import DamagedError, Files
from miles_core.store.line import entry
from miles_core.store.manifest import Manifest
from miles_core.store.run_store import RunStore
from miles_core.store.tombstone import PrunedError

# All images are shown where they fit at one of these, else as many as fit at the last.
LEVELS = (Level(768, 85), Level(512, 82), Level(384, 80), Level(256, 78), Level(192, 76), Level(128, 74))
# Only so that the best, the worst and the middle of each group fit.
SMALLER = (Level(96, 60), Level(64, 50), Level(48, 40))
# Of a row's figures in the page, before any is several.
_ROW_BYTES = 150
# How much of the room is planned for: images of one iteration take more than those of another.
_FILLED = 0.88
_PROBED = 24


@dataclass(frozen=True)
class Gallery:
    """The page and what stands in it. `images` of `total`; `left_out`: iterations that are not in it, and why;
    `level`: how the images were made smaller, None where each is as the run holds it; `without_picture`: samples
    that hold none that can be read."""

    html: bytes
    images: int
    total: int
    iterations: int
    left_out: Mapping[int, str]
    level: Level | None
    without_picture: int


@dataclass(frozen=True)
class Scan:
    """An iteration before its images are read: the samples of each group from the best to the worst. attempts: what
    rollout, rewards and advantages were read from."""

    rollout: Manifest
    attempts: Mapping[str, str]
    scores: Mapping[int, Score]
    groups: Mapping[int, Sequence[int]]

    @property
    def count(self) -> int:
        return sum(map(len, self.groups.values()))

    @property
    def bytes(self) -> int:
        """At most what all images take in the page as they are."""
        return sum(part.bytes for part in self.rollout.data) * 4 // 3 + self.count * 3 * _ROW_BYTES

    def in_order(self) -> list[int]:
        """Samples in the order of who is shown first: of each group the best, the worst, the middle, and so on."""
        return in_turn({g: [rank[i] for i in spread_order(len(rank))] for g, rank in self.groups.items()})


@dataclass(frozen=True)
class Plan:
    """level: how images are made smaller, None where not at all; cost: the bytes of the page that one then takes; shares:
    those that each iteration gets."""

    level: Level | None
    cost: float
    shares: Sequence[float]


def select_iterations(text: str, existing: Sequence[int]) -> list[int]:
    """Iterations by words: all, latest, a number, or A:B from A up to B, which is not included, either left out.

    Raises InputError where the text is none of these or names none that exist.
    """
    if text == "all":
        return list(existing)
    if text == "latest":
        return list(existing[-1:])
    first, colon, last = text.partition(":")
    plain = all(number == "" or (number.isdecimal() and len(number) < 10) for number in (first, last))
    if not plain or text in ("", ":"):
        raise InputError(f"--iterations {text}: give all, latest, a number, or A:B (from A up to B, B not included)")
    low = int(first or 0)
    high = (int(last) if last else math.inf) if colon else low + 1
    found = [i for i in existing if low <= i < high]
    if not found:
        there = f"{existing[0]} to {existing[-1]}" if existing else "none yet"
        raise InputError(f"--iterations {text} names no iteration of this run; it has {there}")
    return found


def make_gallery(
    store: RunStore, iterations: Sequence[int], max_bytes: int, lineage: tuple[str, str] = ("", "")
) -> Gallery:
    """The page of these iterations' images on the run's line, at most `max_bytes` long.

    lineage: what stands before and after an image's iteration and row in the command that tells where it comes from.
    Raises InputError where there is no image, or where not even the best, the worst and the middle of each group fit.
    """
    scans, left_out = _scan(store, iterations)
    history = History(store)
    history.refresh()
    # As if one iteration were left out: the dots then take room.
    curve = Curve(history.points(), history.evaluations(), [*scans][1:])
    frame = len(page_html(store, curve, [], Gallery(b"", 0, 0, 0, left_out, None, 0), lineage))
    # The facts and the list of what was left out are not known yet.
    room = max_bytes - frame - 4000
    plan = _plan(store.files, scans, room)
    blocks, without = [], 0
    for (iteration, scan), share in zip(scans.items(), plan.shares, strict=True):
        try:
            block, missing = _fill(store.files, iteration, scan, plan, share)
        except (DamagedError, PrunedError) as fault:
            left_out[iteration] = str(fault)
            continue
        without += missing
        if block.rows:
            blocks.append(block)
        else:
            left_out[iteration] = "none of its samples holds a picture that can be read"
    if not blocks:
        reasons = "; ".join(f"iteration {i}: {why}" for i, why in list(left_out.items())[:3])
        raise InputError(f"run {store.run} has no image to show ({reasons}): give other --iterations")
    made = Gallery(
        html=b"",
        images=sum(len(block.rows) for block in blocks),
        total=sum(scan.count for scan in scans.values()),
        iterations=len(blocks),
        left_out=dict(sorted(left_out.items())),
        level=plan.level,
        without_picture=without,
    )
    curve = replace(curve, shown={block.iteration for block in blocks})
    return replace(made, html=page_html(store, curve, blocks, made, lineage))


def _scan(store: RunStore, iterations: Sequence[int]) -> tuple[dict[int, Scan], dict[int, str]]:
    lines = {stage: on_line(store, stage, iterations) for stage in ("prompts", "rollout", "rewards", "advantages")}
    scans: dict[int, Scan] = {}
    left_out: dict[int, str] = {}
    for iteration in iterations:
        rollout = lines["rollout"].get(iteration)
        if rollout is None:
            left_out[iteration] = "its rollout is not committed yet"
            continue
        try:
            scans[iteration] = _scan_one(store, iteration, rollout, lines)
        except DamagedError as fault:
            left_out[iteration] = str(fault)
    return scans, left_out


def _scan_one(store: RunStore, iteration: int, rollout: Manifest, lines: Mapping[str, Line]) -> Scan:
    files, run = store.files, store.run
    rewards, advantages = lines["rewards"].get(iteration), lines["advantages"].get(iteration)
    scores = read_scores(files, rewards, advantages)
    groups: dict[int, list[int]] = defaultdict(list)
    told_by = rewards or lines["prompts"].get(iteration)
    if told_by is None:
        raise DamagedError(f"{files.url(rollout.folder)} has neither prompts nor rewards beside it")
    for index, group in sorted(read_groups(files, told_by).items()):
        groups[group].append(index)
    read = {"rollout": rollout, "rewards": rewards, "advantages": advantages}
    return Scan(
        rollout=rollout,
        attempts={stage: entry(manifest, run) for stage, manifest in read.items() if manifest},
        scores=scores,
        groups={group: ranked(indices, scores) for group, indices in sorted(groups.items())},
    )


def _plan(files: Files, scans: Mapping[int, Scan], room: float) -> Plan:
    """Raises InputError where those that must be shown do not fit even as small as can be."""
    whole = [float(scan.bytes) for scan in scans.values()]
    if sum(whole) <= room:
        return Plan(None, 1.0, whole)
    count, must = sum(s.count for s in scans.values()), sum(always(s.groups) for s in scans.values())
    probes = list(_probes(files, scans))
    cost = 0.0
    for level in (*LEVELS, *SMALLER):
        sizes = [len(data) for row in probes if (data := thumbnail(row.frames, level))]
        cost = (sum(sizes) / len(sizes) if sizes else 0.0) * 4 / 3 + _ROW_BYTES
        least = must if level == LEVELS[-1] or level in SMALLER else count
        if least * cost <= _FILLED * room:
            return Plan(level, cost, fair_shares(room, [1.3 * cost * scan.count for scan in scans.values()]))
    needed = (must * cost / _FILLED - room) / 1e6
    raise InputError(
        f"the best, the worst and the middle of each group of {several(len(scans), 'iteration')} need about {needed:.1f} "
        "MB more: raise --max-mb, or give fewer --iterations"
    )


def _probes(files: Files, scans: Mapping[int, Scan]) -> Iterator[Row]:
    """A few samples from all over the run, to know how large they come out."""
    iterations = list(scans)
    chosen = [iterations[i] for i in spread_order(len(iterations))[:8]]
    for iteration in chosen:
        scan = scans[iteration]
        parts = scan.rollout.data
        try:
            rows = list(read_part(files, iteration, parts[iteration % len(parts)], scan.scores))
        except (DamagedError, PrunedError):
            continue
        yield from rows[: _PROBED // len(chosen) + 1]


def _fill(files: Files, iteration: int, scan: Scan, plan: Plan, share: float) -> tuple[Block, int]:
    """The iteration's block, within `share` bytes, and how many of its samples hold no picture that can be read.
    Raises InputError where those that must be shown do not fit even as small as can be."""
    order = scan.in_order()
    # Some more than are thought to fit; what does not is dropped again.
    wanted = set(order[: max(always(scan.groups), int(share / plan.cost * 1.15))])
    levels = [plan.level, *(s for s in (*LEVELS, *SMALLER) if plan.level is None or s.side < plan.level.side)]
    for attempt in levels:
        pictures, without = _pictures(files, iteration, scan, wanted, attempt)
        block = _within(files, iteration, scan, [i for i in order if i in pictures], pictures, share, attempt)
        if block:
            return block, without
    raise InputError(
        f"the best, the worst and the middle of each group of iteration {iteration} do not fit: raise --max-mb, or give "
        "fewer --iterations"
    )


def _within(
    files: Files,
    iteration: int,
    scan: Scan,
    order: list[int],
    pictures: Mapping[int, tuple[Row, bytes]],
    share: float,
    level: Level | None,
) -> Block | None:
    """The block of the first of `order` that fit, or None where those that must be shown do not."""
    must = sum(1 for i in order[: always(scan.groups)] if i in pictures)
    keep = list(order)
    while True:
        shown = [pictures[i] for i in sorted(keep)]
        ranks = {g: [n for n, i in enumerate(rank, 1) if i in set(keep)] for g, rank in scan.groups.items()}
        block = Block(
            iteration=iteration,
            folder=files.url(scan.rollout.folder),
            attempts=scan.attempts,
            kind="image/png" if level is None else "image/webp",
            rows=[replace(row, frames=()) for row, _ in shown],
            pictures=[base64.b64encode(data).decode() for _, data in shown],
            groups={g: (len(scan.groups[g]), kept) for g, kept in ranks.items() if kept},
        )
        size = len(block_html(block))
        if size <= share or not keep:
            return block
        if len(keep) <= must:
            return None
        fewer = min(len(keep) - 1, int(len(keep) * share / size))
        keep = keep[: max(must, fewer)]


def _pictures(
    files: Files, iteration: int, scan: Scan, wanted: Collection[int], level: Level | None
) -> tuple[dict[int, tuple[Row, bytes]], int]:
    parts = parts_with(scan.rollout, sorted(i for group in scan.groups.values() for i in group), wanted)
    rows = [row for part in parts for row in read_part(files, iteration, part, scan.scores, wanted)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        made = list(pool.map(lambda row: thumbnail(row.frames, level) if level else original(row.frames), rows))
    found = {row.sample_index: (row, data) for row, data in zip(rows, made, strict=True) if data}
    return found, len(rows) - len(found)
