"""A run iteration by iteration, from the manifests on its line; each is read once."""

import math
from collections.abc import Mapping
from typing import Any

from miles_core.observe.health import Health, comparable, health_of
from miles_core.observe.plots import Point, point_of
from miles_core.observe.rows import on_line
from miles_core.store.line import entry
from miles_core.store.manifest import Manifest
from miles_core.store.run_store import RunStore
from miles_core.store.stages import ITERATION_STAGES, StageName

_STAGES: tuple[StageName, ...] = (*ITERATION_STAGES, "evaluation")


class History:
    """What the iterations of a run came to. `refresh` reads what the line names and was not read before."""

    def __init__(self, store: RunStore) -> None:
        self.store = store
        self._read: dict[tuple[StageName, int], Manifest] = {}

    def refresh(self) -> None:
        """Take up what the run's line names now."""
        line = (self.store.record() or {}).get("line", {})
        for stage in _STAGES:
            known = {i: m for (s, i), m in self._read.items() if s == stage}
            named = {int(slot.partition("/")[0]): name for slot, name in line.items() if slot.endswith(f"/{stage}")}
            missing = [i for i, name in named.items() if i not in known or entry(known[i], self.store.run) != name]
            for iteration in [*missing, *(known.keys() - named.keys())]:
                self._read.pop((stage, iteration), None)
            if missing:
                self._read |= {(stage, i): m for i, m in on_line(self.store, stage, missing).items()}

    def on_line(self, stage: StageName, iteration: int) -> Manifest | None:
        """The attempt that the line named at the last `refresh`."""
        return self._read.get((stage, iteration))

    def points(self) -> list[Point]:
        """The reward curve's points, those that are finite, ascending."""
        rewards = sorted(i for stage, i in self._read if stage == "rewards")
        points = (point_of(self._read["rewards", i], self._read.get(("advantages", i))) for i in rewards)
        return [point for point in points if point.finite]

    def evaluations(self) -> dict[str, dict[int, float]]:
        """The mean reward of each evaluation set by iteration, under `evaluation: SET`; -1 is before training."""
        found: dict[str, dict[int, float]] = {}
        for (stage, iteration), manifest in sorted(self._read.items()):
            for name, figures in manifest.summary["sets"].items() if stage == "evaluation" else ():
                found.setdefault(f"evaluation: {name}", {})[iteration] = figures["reward_mean"]
        return found

    def healths(self, first: int, last: int) -> list[Health]:
        """What the guard looks at of the iterations from `first` to `last`, of those that are whole, ascending."""
        found: list[Health] = []
        before: tuple[Manifest, ...] = ()
        for iteration in sorted(i for stage, i in self._read if stage == "update" and first <= i <= last):
            there = [self._read.get((stage, iteration)) for stage in ("rollout", "rewards", "advantages")]
            if all(there):
                rollout, rewards, advantages = (manifest for manifest in there if manifest)
                same = not found or all(map(comparable, before, (rollout, rewards)))
                setting = found[-1].setting + (not same) if found else 0
                update, evaluated = self._read["update", iteration], self._read.get(("evaluation", iteration))
                found.append(health_of(rewards, advantages, update, evaluated, setting))
                before = rollout, rewards
        return found

    def table(self, newest: int, further: Mapping[int, Mapping[str, str]] | None = None) -> list[dict[str, Any]]:
        """A row an iteration, the newest first: figures as text, seconds of each stage. At most `newest` rows. further:
        more columns, by iteration."""
        iterations = sorted({i for _, i in self._read if i >= 0}, reverse=True)[:newest]
        rows = [self._row(i) | dict((further or {}).get(i, {})) for i in iterations]
        # The UI takes a table's columns from its first row.
        columns = dict.fromkeys(column for row in sorted(rows, key=len, reverse=True) for column in row)
        return [{column: row.get(column, "") for column in columns} for row in rows]

    def _row(self, iteration: int) -> dict[str, Any]:
        there = {stage: self._read.get((stage, iteration)) for stage in ITERATION_STAGES}
        rewards, advantages, update = there["rewards"], there["advantages"], there["update"]
        row: dict[str, Any] = {"iteration": iteration}
        if rewards:
            row |= {
                "reward": _text(rewards.summary["reward_mean"]),
                "min": _text(rewards.summary["reward_min"]),
                "max": _text(rewards.summary["reward_max"]),
            }
        if advantages:
            row["groups without spread"] = f"{advantages.summary['zero_std_groups']} of {advantages.summary['groups']}"
        if update:
            row |= {name: _text(update.summary[key]) for name, key in _UPDATE.items() if key in update.summary}
        row |= {name: _text(means[iteration]) for name, means in self.evaluations().items() if iteration in means}
        for stage, manifest in there.items():
            row[f"{stage}, s"] = _text(_seconds(manifest)) if manifest else ""
        return row


_UPDATE = {"loss": "loss", "kl": "kl_loss", "grad norm": "grad_norm", "clipped": "clip_frac"}


def _seconds(manifest: Manifest) -> float:
    return manifest.times["committed_at"] - manifest.times["started_at"]


def _text(value: float) -> str:
    # Prefect shows a table that holds a NaN as an empty one.
    return f"{value:.4g}" if math.isfinite(value) else str(value)
