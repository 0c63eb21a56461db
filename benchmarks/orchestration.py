"""What an iteration costs beyond its work, by part: the tiny recipe through the real flow, server, Ray and store.

    python benchmarks/orchestration.py [--iterations 8]

Work is what the model computes: requests at the engines (a request's own seconds, over the engines at once), optimizer
steps, the push to the engines. All else is the orchestration: Prefect's flow and tasks, finding and committing, parsing
and writing, scoring that ends after the rollout, loading and checking, probe and checkpoint. Medians over the
iterations but the first, which starts the processes. Writes benchmarks/results/orchestration.json, or into the folder
that the environment variable OUT names.
"""

import argparse
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from flows.cli.server import end_server, ensure_server
from miles_core.config.forms import grouped
from miles_core.store.files import Files
from miles_core.store.manifest import Manifest
from miles_core.store.parts import read_table
from miles_core.store.run_store import RunStore

STAGES = ("prompts", "rollout", "rewards", "advantages", "update", "sync")
ENGINES = 2


class Clock:
    """Seconds by name, summed between two readings."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def around(
        self, name: str, call: Callable[..., Any], note: Callable[..., None] | None = None
    ) -> Callable[..., Any]:
        """The call, timed under `name`."""

        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                result = call(*arguments, **options)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
            if note:
                note(*arguments)
            return result

        return timed


def work_of(store: RunStore, iteration: int) -> dict[str, float]:
    """Seconds of generation, optimizer steps and pushes, from the committed rows."""

    def manifest(stage: Any) -> Manifest:
        found = store.on_line(stage, iteration)
        assert found is not None
        return found

    generated = 0.0
    for part in manifest("rollout").data:
        generated += read_table(store.files, part, ["seconds"])["seconds"][0].as_py()
    steps = sum(read_table(store.files, manifest("update").data[0], ["seconds"])["seconds"].to_pylist())
    rows = read_table(store.files, manifest("sync").data[0]).to_pylist()
    return {"rollout": generated / ENGINES, "update": steps, "sync": max(row["push_seconds"] for row in rows)}


def main() -> int:
    """Run, take apart, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=8)
    given = parser.parse_args()
    os.environ["MILES_HOME"] = tempfile.mkdtemp(prefix="miles-orchestration-")
    ensure_server()
    # Prefect reads the server's address when it is imported.
    train_module = importlib.import_module("flows.train")
    clock, records = Clock(), []
    outcomes: dict[str, float] = {}
    for name in STAGES:
        module = importlib.import_module(f"tasks.{name}")
        original = module.publish

        def publish(outcome: Any, files: Any, name: str = name, original: Any = original) -> Any:
            outcomes[name] = outcome.seconds
            return clock.around("publish", original)(outcome, files)

        module.__dict__["publish"] = publish
    for name in ("find", "commit", "move_line", "open_attempt"):
        setattr(RunStore, name, clock.around(f"store.{name}", getattr(RunStore, name)))
    flow = train_module.run_iteration

    def iteration(**options: Any) -> None:
        clock.seconds.clear()
        outcomes.clear()
        started = time.perf_counter()
        flow(**options)
        records.append(
            {"wall": time.perf_counter() - started, **clock.seconds, **{f"stage {k}": v for k, v in outcomes.items()}}
        )

    train_module.__dict__["run_iteration"] = iteration
    options = {"num_rollout": given.iterations, "rollout_num_engines": ENGINES, "run_id": "run"}
    try:
        result = train_module.train(recipe="tiny", options=grouped(options))
    finally:
        end_server()
    store = RunStore(Files(result["artifact_root"]), "run")
    report(records, [work_of(store, i) for i in range(given.iterations)])
    return 0


def report(records: list[dict[str, float]], work: list[dict[str, float]]) -> None:
    """Medians by part, and the file."""
    rows = []
    for record, done in zip(records[1:], work[1:], strict=True):
        stage = {name: record[f"stage {name}"] for name in STAGES}
        streamed = max(stage["rollout"], stage["rewards"])
        critical = stage["prompts"] + streamed + stage["advantages"] + stage["update"] + stage["sync"]
        rows.append(
            {
                "iteration": record["wall"],
                "work": sum(done.values()),
                "beyond the work": record["wall"] - sum(done.values()),
                "Prefect: flow, tasks, artifacts, log": record["wall"] - critical,
                "of it publishing": record["publish"],
                "prompts": stage["prompts"],
                "rollout beyond generation": stage["rollout"] - done["rollout"],
                "rewards after the rollout": streamed - stage["rollout"],
                "advantages": stage["advantages"],
                "update beyond its steps": stage["update"] - done["update"],
                "sync beyond the push": stage["sync"] - done["sync"],
                "in all of these, the store: find, open, commit, move the line": sum(
                    v for k, v in record.items() if k.startswith("store.")
                ),
            }
        )
    medians = {name: round(statistics.median(row[name] for row in rows), 3) for name in rows[0]}
    text = {
        "figures": {"seconds": medians, "iterations": len(rows)},
        "command": " ".join(["python benchmarks/orchestration.py", *sys.argv[1:]]),
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "machine": f"{os.cpu_count()} CPU cores, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }
    target = Path(os.environ.get("OUT") or Path(__file__).parent / "results") / "orchestration.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(text, indent=1) + "\n")
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    sys.exit(main())
