"""Two scorers over the same images: how far they agree, and the images they disagree about most."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miles_core.observe.rows import Row, parts_with, read_part
from miles_core.observe.samples import Sheet, contact_sheet
from miles_core.store.files import Files
from miles_core.store.manifest import Manifest
from miles_core.store.parts import read_table

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Agreement:
    """Of the samples of an iteration, or of several. rank_correlation: Spearman's, over all samples; within_groups: the
    mean of it over the groups that both scorers spread; None where nothing differs. best_changed: groups none of whose
    best samples is a best one under the other scorer."""

    iteration: int | None
    samples: int
    before: float
    after: float
    rank_correlation: float | None
    within_groups: float | None
    groups: int
    best_changed: int


@dataclass(frozen=True)
class Apart:
    """A sample and its ranks (1 is the best) under both scorers, of `of` samples of its iteration."""

    iteration: int
    sample_index: int
    before: float
    after: float
    rank_before: float
    rank_after: float
    of: int

    @property
    def distance(self) -> float:
        """Between the ranks, as a share of the samples."""
        return abs(self.rank_before - self.rank_after) / self.of


@dataclass(frozen=True)
class Rescored:
    """An iteration's rewards before and after, sample by sample."""

    iteration: int
    indices: list[int]
    groups: list[int]
    before: Floats
    after: Floats
    scorers: tuple[str, str]

    def apart(self) -> list[Apart]:
        """Every sample with its ranks."""
        first, second = _ranks(-self.before), _ranks(-self.after)
        return [
            Apart(self.iteration, index, float(b), float(a), float(f), float(s), len(self.indices))
            for index, b, a, f, s in zip(self.indices, self.before, self.after, first, second, strict=True)
        ]


def rescored(files: Files, before: Manifest, after: Manifest) -> Rescored:
    """Both rewards of an iteration, joined by sample. Raises DamagedError; ValueError where they are of other samples."""
    old, new = (_rows(files, manifest) for manifest in (before, after))
    if old.keys() != new.keys():
        raise ValueError(f"{before.folder} and {after.folder} are rewards of other samples")
    order = sorted(old)
    return Rescored(
        before.iteration,
        order,
        [old[i][1] for i in order],
        np.array([old[i][0] for i in order]),
        np.array([new[i][0] for i in order]),
        (_scorers(old), _scorers(new)),
    )


def agreement(some: Sequence[Rescored]) -> Agreement:
    """Over all samples of `some`; their groups are those of their iterations."""
    before, after = (np.concatenate([getattr(one, side) for one in some]) for side in ("before", "after"))
    groups = [
        np.array([n for n, group in enumerate(one.groups) if group == each])
        for one in some
        for each in dict.fromkeys(one.groups)
    ]
    starts = np.cumsum([0] + [len(one.indices) for one in some])
    owner = [k for k, one in enumerate(some) for _ in dict.fromkeys(one.groups)]
    rows = [group + starts[k] for group, k in zip(groups, owner, strict=True)]
    inside = [rho for row in rows if (rho := spearman(before[row], after[row])) is not None]
    return Agreement(
        iteration=some[0].iteration if len(some) == 1 else None,
        samples=len(before),
        before=float(before.mean()),
        after=float(after.mean()),
        rank_correlation=spearman(before, after),
        within_groups=float(np.mean(inside)) if inside else None,
        groups=len(rows),
        best_changed=sum(not (_best(before[row]) & _best(after[row])) for row in rows),
    )


def spearman(first: Floats, second: Floats) -> float | None:
    """Rank correlation, equal values sharing their mean rank; None where one of them does not vary."""
    if len(first) < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return None
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def disagreements(some: Sequence[Rescored], count: int) -> list[Apart]:
    """The samples whose ranks lie furthest apart, furthest first."""
    every = [apart for one in some for apart in one.apart()]
    return sorted(every, key=lambda one: (-one.distance, one.iteration, one.sample_index))[:count]


def disagreement_sheet(
    files: Files, rollouts: Mapping[int, Manifest], chosen: Sequence[Apart], *, max_bytes: int = 3_000_000
) -> Sheet | None:
    """The images of `chosen` with both rewards and ranks below; None where none can be read. Raises DamagedError."""
    rows: list[Row] = []
    words: dict[int, str] = {}
    found = {
        (iteration, row.sample_index): row
        for iteration, rollout in rollouts.items()
        for row in _of(files, rollout, [one.sample_index for one in chosen if one.iteration == iteration])
    }
    for one in chosen:
        row = found.get((one.iteration, one.sample_index))
        if row:
            # The sheet tells rows apart by their index, and iterations may count anew.
            place = len(rows)
            rows.append(Row(one.iteration, place, row.group_index, row.prompt, row.seed, row.frames))
            words[place] = (
                f"{one.iteration}/{one.sample_index}: {one.before:.3g} → {one.after:.3g}, "
                f"rank {one.rank_before:g} → {one.rank_after:g} of {one.of}"
            )
    return contact_sheet(rows, words, side=300, max_bytes=max_bytes)


def table(some: Sequence[Rescored]) -> list[str]:
    """Lines of text: a head, an iteration each, and all of them together where there are several."""
    lines = [
        f"{'iteration':>9} {'samples':>8} {'before':>10} {'after':>10} {'rank corr.':>10} {'in groups':>10} {'best changed':>14}"
    ]
    told = [agreement([one]) for one in some] + ([agreement(some)] if len(some) > 1 else [])
    for one in told:
        name = "all" if one.iteration is None else str(one.iteration)
        changed = f"{one.best_changed} of {one.groups}"
        lines.append(
            f"{name:>9} {one.samples:>8} {one.before:>10.4g} {one.after:>10.4g} {_number(one.rank_correlation):>10} "
            f"{_number(one.within_groups):>10} {changed:>14}"
        )
    return lines


def _of(files: Files, rollout: Manifest, wanted: list[int]) -> list[Row]:
    """The rows of a rollout that are wanted, from the parts that hold them alone."""
    if not wanted:
        return []
    indices = sorted(i for p in rollout.data for i in read_table(files, p, ["sample_index"]).column(0).to_pylist())
    parts = parts_with(rollout, indices, wanted)
    return [row for part in parts for row in read_part(files, rollout.iteration, part, {}, wanted)]


def _rows(files: Files, manifest: Manifest) -> dict[int, tuple[float, int, str]]:
    columns = ["sample_index", "group_index", "reward", "rm_type", "rm_version"]
    rows = [row for part in manifest.data for row in read_table(files, part, columns).to_pylist()]
    return {row["sample_index"]: (row["reward"], row["group_index"], row["rm_version"]) for row in rows}


def _scorers(rows: Mapping[int, tuple[float, int, str]]) -> str:
    return " and ".join(sorted({version for _, _, version in rows.values()}))


def _ranks(values: Floats) -> Floats:
    """1 for the smallest; equal values share their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((2 * ends - counts + 1) / 2)[place]


def _best(values: Floats) -> set[int]:
    return set(np.flatnonzero(values == values.max()).tolist())


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
