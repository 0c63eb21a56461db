"""How often the guard is wrong, how soon it is right, and how faint a grid it sees, on made-up runs and images.

    python benchmarks/guard.py [RUNS]

RUNS (2000) healthy runs of 50 iterations, other ones than the tests', with the options' defaults and a KL bound that none
reaches; the same with a reward that falls by three standard deviations from iteration 30 on; and images of three kinds with
grids of growing strength. A minute or two on one core.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests/unit/observe"))

from histories import after, collapsed, healthy
from test_guard import LIMITS, first_finding
from test_spectrum import FACTOR, KINDS, seams, tiles, whole

from miles_core.observe.guard import judge
from miles_core.observe.spectrum import grid_energy

ROOT = Path(__file__).parents[1]
FIRST_SEED, FELL = 10_000, 30
STRENGTHS = (0.5, 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)


def false_alarms(runs: int) -> dict[str, Any]:
    """Runs with a finding, and those of each check."""
    alarmed, checks = 0, Counter[str]()
    for seed in range(FIRST_SEED, FIRST_SEED + runs):
        history = healthy(seed)
        found = {f.check for end in range(1, len(history) + 1) for f in judge(history[:end], LIMITS)}
        alarmed += bool(found)
        checks.update(found)
    return {"healthy runs": runs, "with a false alarm": alarmed, "by check": dict(checks)}


def delays(runs: int) -> dict[str, Any]:
    """Iterations from the start of a collapse to its finding, by groups an iteration."""
    found: dict[int, list[float]] = {}
    for seed in range(FIRST_SEED, FIRST_SEED + runs):
        history = after(healthy(seed), FELL, collapsed)
        finding = first_finding(history, "reward-drop", FELL)
        found.setdefault(history[0].groups, []).append(finding.iteration - FELL if finding else np.inf)
    return {str(groups): float(np.quantile(values, 0.95)) for groups, values in sorted(found.items())}


def faintest(side: int) -> dict[str, float]:
    """Grey levels of 255 at which a grid is found, the median of three sets of 16 images."""
    found = {}
    for kind in KINDS:
        for period in (8, 16):
            block = np.tile(tiles(period)[:period, :period], (side // period, side // period))
            for name, grid in (("lines", seams(period, side, side)), ("block", block)):
                needed = [_needed(kind, side, period, grid, seed) for seed in range(3)]
                found[f"{kind.__name__}, {name} of {period}"] = float(np.median(needed))
    return found


def _needed(kind: Any, side: int, period: int, grid: np.ndarray, seed: int) -> float:
    random = np.random.default_rng(seed)
    plain = [kind(random, side, side) for _ in range(16)]
    limit = FACTOR * grid_energy(plain)[period]
    found = (s for s in STRENGTHS if grid_energy([whole(p + s * grid) for p in plain])[period] > limit)
    return next(found, np.inf)


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    figures = {
        "false alarms": false_alarms(runs),
        "iterations until 95 of 100 collapses are found, by groups": delays(runs // 4),
        "faintest grid, grey levels": {f"{side} pixels": faintest(side) for side in (64, 128, 256)},
    }
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    report = {
        "figures": figures,
        "command": " ".join(["python benchmarks/guard.py", *sys.argv[1:]]),
        "commit": commit,
        "machine": f"{os.cpu_count()} CPU cores, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }
    (ROOT / "benchmarks/results/guard.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
