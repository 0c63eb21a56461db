"""A run of 300 iterations, as people look at it: the pages of the Prefect UI, the gallery, queries.

    python benchmarks/long_run.py [--iterations 300]

The run's images are made up (tests/synthetic_run.py); its stages, artifacts and flow runs are published as train publishes
them, to a real server, so that its pages hold what those of a long training hold. Pages are opened in headless Chromium;
a page's seconds are those until its text is there. Writes benchmarks/results/long_run.json.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests/unit/observe"))

from browser import Page, chromium
from synthetic_run import synthetic_run

from flows.cli.server import end_server, ensure_server, ui_address
from miles_core.observe.history import History
from miles_core.pipeline.stage import Outcome
from miles_core.store.files import Files
from miles_core.store.run_store import RunStore
from miles_core.store.stages import ITERATION_STAGES

ROOT = Path(__file__).parent.parent
RUN, GROUPS, SAMPLES, PIXELS = "long", 4, 8, 64


def main() -> None:
    """Make the run, publish it, measure, write the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=300)
    iterations = parser.parse_args().iterations
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"MILES_HOME": home}
        os.environ.pop("PREFECT_API_URL", None)
        store = synthetic_run(Files(f"{home}/artifacts"), RUN, iterations, GROUPS, SAMPLES, PIXELS)
        figures: dict[str, Any] = {"iterations": iterations, "samples": iterations * GROUPS * SAMPLES}
        figures["seconds"] = commands(home, iterations)
        api = ensure_server()
        try:
            started = time.monotonic()
            published(store, iterations)
            figures["publishing_seconds_an_iteration"] = round((time.monotonic() - started) / iterations, 2)
            figures["server_database_mb"] = round((Path(home) / "prefect/prefect.db").stat().st_size / 1e6, 1)
            figures["seconds"] |= pages(ui_address(api), Path(home), iterations)
        finally:
            end_server()
    write(figures)


def commands(home: str, iterations: int) -> dict[str, float]:
    """Whole commands, start of Python included."""
    given = {
        "miles show": ["show", RUN],
        "miles query --question reward-by-iteration": ["query", "--question", "reward-by-iteration", "--run", RUN],
        "miles query --question worst-groups": ["query", "--question", "worst-groups", "--run", RUN],
        "miles lineage": ["lineage", RUN, str(iterations - 1), str(iterations * GROUPS * SAMPLES - 1)],
        "miles gallery": ["gallery", RUN, "--output", f"{home}/gallery.html"],
    }
    return {name: timed(lambda words=words: miles(*words)) for name, words in given.items()}


def miles(*arguments: str) -> None:
    """A command, which has to succeed."""
    command = [sys.executable, "-m", "flows.cli.main", *arguments]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def timed(work: Callable[[], object]) -> float:
    """Seconds of wall time."""
    started = time.monotonic()
    work()
    return round(time.monotonic() - started, 1)


def published(store: RunStore, iterations: int) -> None:
    """The flow runs, task runs and artifacts of a training."""
    # Prefect reads the server's address when it is imported.
    prefect = importlib.import_module("prefect")
    publish = importlib.import_module("tasks.publish").publish
    pictures = importlib.import_module("tasks.pictures")
    history = History(store)
    history.refresh()

    def stage_task(stage: str) -> Any:
        def show(number: int) -> Any:
            manifest = history.on_line(stage, number)  # type: ignore[arg-type]
            return publish(Outcome(manifest, False, "not made yet", 1.0), store.files)

        return prefect.task(show, name=stage, task_run_name=stage)

    tasks = [stage_task(stage) for stage in ITERATION_STAGES]

    @prefect.flow(name="iteration", flow_run_name="{run} · iteration {number}")
    def iteration(run: str, number: int) -> None:
        for task in tasks:
            task(number)
        shown = (history.on_line(stage, number) for stage in ("rollout", "rewards", "advantages"))
        pictures.publish_samples(history, *shown)
        pictures.publish_run(history)

    @prefect.flow(name="train", flow_run_name="{run} · train")
    def train(run: str) -> None:
        for number in range(iterations):
            iteration(run, number)

    train(RUN)


def pages(address: str, home: Path, iterations: int) -> dict[str, float]:
    """Each page, opened once in a browser that has seen the UI."""
    api = importlib.import_module("httpx")

    def first(what: str, **body: Any) -> str:
        answer = api.post(f"{address}/api/{what}/filter", json={"limit": 1, **body}, timeout=60)
        return str(answer.json()[0]["id"])

    def artifact(key: str) -> str:
        wanted = {"artifacts": {"key": {"any_": [f"{RUN}-{key}"]}}, "sort": "CREATED_DESC"}
        return f"{address}/artifacts/artifact/{first('artifacts', **wanted)}"

    whole = first("flow_runs", flow_runs={"name": {"any_": [f"{RUN} · train"]}})
    last = first("flow_runs", flow_runs={"name": {"any_": [f"{RUN} · iteration {iterations - 1}"]}})
    looked_at = {
        "UI: runs": (f"{address}/runs", f"{RUN} · iteration"),
        "UI: flow run of the whole training": (f"{address}/runs/flow-run/{whole}", f"{RUN} · train"),
        "UI: flow run of the last iteration": (f"{address}/runs/flow-run/{last}", "rollout"),
        "UI: artifacts": (f"{address}/artifacts", f"{RUN}-samples"),
        "UI: all versions of one artifact": (f"{address}/artifacts/key/{RUN}-samples", f"iteration {iterations - 1}"),
        "UI: images of an iteration": (artifact("samples"), "All images"),
        "UI: table of iterations": (artifact("iterations"), "groups without spread"),
        "UI: reward curve": (artifact("reward-curve"), "reward of"),
    }
    with chromium(home / "browser") as page:
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.send(f"{domain}.enable")
        page.size(1400, 900)
        opened(page, address, "Dashboard")
        found = {name: timed(lambda u=u, t=t: opened(page, u, t)) for name, (u, t) in looked_at.items()}
        gallery = (home / "gallery.html").as_uri()
        return found | {"gallery page": timed(lambda: opened(page, gallery, "images"))}


def opened(page: Page, url: str, text: str) -> None:
    """Until the page at an address shows a text."""
    page.send("Page.navigate", url=url)
    page.wait(lambda: text in (page.js("document.body ? document.body.innerText : ''") or ""), f"{text} on {url}")


def write(figures: dict[str, Any]) -> None:
    """The figures and how they were made."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    report = {
        "figures": figures,
        "command": " ".join(["python benchmarks/long_run.py", *sys.argv[1:]]),
        "commit": commit,
        "machine": f"{os.cpu_count()} CPU cores, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }
    (ROOT / "benchmarks/results/long_run.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
