"""Every fault point against every process, and random kills: does the run end with the bits of an undisturbed one?

    python benchmarks/crash_matrix.py matrix [--jobs 1] [--points a,b] [--victims flow,engine] [--minutes 600] [--afresh]
    python benchmarks/crash_matrix.py random --minutes 20 [--jobs 1] [--seed 0]

matrix: a run a victim (with --chunk N: a run for every N points). It pauses at the next point, the victim is killed -9,
the same command is given again where it ended, and so on from point to point; at the end every digest must be that of an
undisturbed run. random: one process of the run, any, is killed -9 after a random time, again and again. Without
--cli the stages run without Prefect, by the same code below it. Writes benchmarks/results/crash_<mode>.json, or into the
folder that the environment variable OUT names.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from miles_core.runtime.faults import POINTS
from miles_core.runtime.heads import end_left_heads, notes
from miles_core.store.files import Files
from miles_core.store.run_store import RunStore
from miles_core.store.stages import ITERATION_STAGES

# A run of the matrix goes on until it has met all its points; one of random has the first few.
LONGEST, RANDOM = 12, 2
OPTIONS = {
    "device": "cpu",
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "rollout_microgroup_size": 2,
    "diffusion_num_steps": 4,
    "num_steps_per_rollout": 2,
    "micro_batch_size": 4,
    "rollout_num_engines": 2,
    "actor_num_gpus_per_node": 2,
    "actor_idle_minutes": 3,
    "eval_interval": 1,
}
VICTIMS = {
    "flow": "the command itself",
    "keeper": "the process that keeps the Ray head",
    "raylet": "raylet",
    "gcs": "gcs_server",
    "engine": "ray::EngineActor",
    "parser": "ray::ParserActor",
    "scorer": "ray::RewardActor",
    "trainer": "ray::TrainerActor",
}
# With any of these all processes end: fewer of them are started again sooner.
OF_THE_HEAD = {"keeper", "raylet", "gcs"}
FEWER = {"rollout_num_engines": 1, "actor_num_gpus_per_node": 1}
PATIENCE_SECONDS = 400
# Logging makes no bits: tests/integration/test_logging.py kills around it.
MAKING = [point for point in POINTS if not point.startswith("logging:")]
NEVER = "never reached"


@dataclass
class Outcome:
    """What became of one case. commands: how often the command was given, the first one included."""

    what: str
    victim: str
    found: bool
    commands: int
    seconds: float
    same: bool
    note: str = ""


class Case:
    """One run, in a home of its own that shares the undisturbed one's model."""

    def __init__(self, home: Path, name: str, cli: bool, few: bool = False) -> None:
        self.home, self.cli, self.few = home / name, cli, few
        self.root = self.home / "artifacts"
        self.log = self.home / "log.txt"
        self.held_out = self.home / "held-out.txt"

    def make(self, models: Path | None = None) -> None:
        """Its folders, with the models given."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.held_out.write_text("a tall tree\na low wall\n")
        if models:
            shutil.copytree(models, self.home / "models")

    def start(self, iterations: int, **variables: str) -> subprocess.Popen:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MILES_", "RAY_"))}
        options = OPTIONS | (FEWER if self.few else {})
        options |= {"run_id": "run", "artifact_root": str(self.root), "num_rollout": iterations}
        options["eval_prompt_data"] = f"held-out {self.held_out}"
        if self.cli:
            flags = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
            command = [str(Path(sys.executable).parent / "miles"), "train", "tiny", *flags]
        else:
            command = [sys.executable, __file__, "drive", json.dumps(options)]
        environment = {"MILES_HOME": str(self.home), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                env=kept | environment | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def processes(self, command: subprocess.Popen) -> dict[str, list[psutil.Process]]:
        """The run's processes by kind, those that an earlier command left and this one took over included."""
        found: dict[str, list[psutil.Process]] = {kind: [] for kind in VICTIMS}
        with contextlib.suppress(psutil.NoSuchProcess):
            found["flow"] = [psutil.Process(command.pid)] if command.poll() is None else []
        for _, head in notes(self.home / "state"):
            with contextlib.suppress(psutil.NoSuchProcess):
                found["keeper"] += [psutil.Process(head.keeper[0])] if head.keeper and head.kept else []
        children = []
        for one in [*found["keeper"], *found["flow"]]:
            with contextlib.suppress(psutil.NoSuchProcess):
                children += one.children(recursive=True)
        for child in dict.fromkeys(children):
            with contextlib.suppress(psutil.Error):
                name, title = child.name(), " ".join(child.cmdline())
                for kind, mark in VICTIMS.items():
                    if name == mark or (name.startswith("ray::") and title.startswith(mark)):
                        found[kind].append(child)
        return found

    def digests(self, iterations: int) -> dict[str, str]:
        store = RunStore(Files(str(self.root)), "run")
        found = {}
        for iteration in range(-1, iterations):
            for stage in (*ITERATION_STAGES, "evaluation") if iteration >= 0 else ("policy", "evaluation"):
                manifest = store.on_line(stage, iteration)
                found[f"{iteration}/{stage}"] = manifest.content_digest if manifest else "missing"
        return found

    def close(self, keep: bool) -> None:
        """End the run's server, if it has one, and remove the home unless it is to be looked at."""
        end_left_heads(self.home / "state")
        if self.cli:
            miles = Path(sys.executable).parent / "miles"
            subprocess.run([miles, "down"], env=os.environ | {"MILES_HOME": str(self.home)}, check=False)
        if not keep:
            shutil.rmtree(self.home, ignore_errors=True)


def wait(process: subprocess.Popen) -> int:
    """The command's exit code; one that hangs is killed."""
    try:
        return process.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return -99


def lane(case: Case, models: Path, base: dict[str, str], victim: str, points: list[str], until: float) -> list[Outcome]:
    """One victim at one point after the other, in one run."""
    if time.monotonic() > until:
        return []
    case.make(models)
    counts = case.home / "counts"
    counts.mkdir()
    armed = {"MILES_FAULT": ",".join(f"{p}:armed:slow=2" for p in points), "MILES_FAULT_COUNTS": str(counts)}
    iterations, outcomes = 2, []
    process = case.start(iterations, **armed)
    for point in points:
        if time.monotonic() > until:
            break
        started = time.monotonic()
        mark = counts / point.replace(":", "-")
        mark.with_suffix(".armed").touch()
        while not mark.with_suffix(".reached").exists() and time.monotonic() < started + PATIENCE_SECONDS:
            if process.poll() is not None:
                if process.returncode == 0:
                    iterations = min(iterations + 1, LONGEST)
                elif outcomes:
                    outcomes[-1].commands += 1
                process = case.start(iterations, **armed)
            time.sleep(0.02)
        reached = mark.with_suffix(".reached").exists()
        there = case.processes(process)[victim] if reached else []
        for one in there[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        outcomes.append(Outcome(point, victim, bool(there), 1, 0.0, True, "" if reached else NEVER))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5 if there else 0.1)
        outcomes[-1].seconds = time.monotonic() - started
        print(f"{point:<22} {victim:<8} {word(outcomes[-1])} ({outcomes[-1].seconds:.0f} s)", flush=True)
    for _ in range(5):
        # A failed evaluation ends no training: the next command makes it up.
        if wait(process) == 0 and "missing" not in case.digests(iterations).values():
            break
        outcomes[-1].commands += 1
        process = case.start(iterations, **armed)
    found = case.digests(iterations)
    wrong = [where for where, digest in found.items() if base[where] != digest]
    for outcome in outcomes:
        outcome.same = not wrong
        outcome.note += f" first difference: {wrong[0]}\n{case.log.read_text()[-3000:]}" if wrong else ""
    print(f"{victim}: {len(outcomes)} points over {iterations} iterations, {wrong or 'the same bits'}", flush=True)
    case.close(keep=bool(wrong))
    return outcomes


def word(outcome: Outcome) -> str:
    """What became of a case, in a word or two."""
    if not outcome.same:
        return "DIFFERENT"
    if not outcome.found:
        return outcome.note or "not there"
    return "went on" if outcome.commands == 1 else f"resumed {outcome.commands - 1}x"


def shake(case: Case, base: dict[str, str], seed: int, until: float) -> Outcome:
    """One run whose processes are killed at random until it is done."""
    dice, started, commands = random.Random(seed), time.monotonic(), 0
    kills: Counter[str] = Counter()
    code = 1
    while code and commands < 40:
        process = case.start(RANDOM)
        commands += 1
        if time.monotonic() < until:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(dice.uniform(1, 40))
            there = {kind: found for kind, found in case.processes(process).items() if found}
            if process.poll() is None and there:
                kind = dice.choice(sorted(there))
                with contextlib.suppress(psutil.NoSuchProcess):
                    dice.choice(there[kind]).kill()
                    kills[kind] += 1
        code = wait(process) or int("missing" in case.digests(RANDOM).values())
    wrong = [where for where, digest in case.digests(RANDOM).items() if base[where] != digest]
    note = f"first difference: {wrong[0]}\n{case.log.read_text()[-3000:]}" if wrong else ""
    print(f"seed {seed}: {commands} commands, {dict(kills)}, {wrong or 'the same bits'}", flush=True)
    case.close(keep=bool(wrong))
    return Outcome(f"seed {seed}", json.dumps(kills), True, commands, time.monotonic() - started, not wrong, note)


def drive(options: dict) -> int:
    """The command without Prefect."""
    from flows.session import train_session
    from miles_core.errors import InputError, StageError
    from miles_core.pipeline.evaluation import missing
    from miles_core.pipeline.iteration import ensure_policy, finished, run_iteration

    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        with train_session("tiny", options) as session:
            for number in range(session.config.run.num_rollout):
                step = session.step(number)
                if finished(step) and not missing(step):
                    continue
                session.workers.start_all()
                if number == 0:
                    ensure_policy(step)
                run_iteration(step)
                print(f"iteration {number} is done", flush=True)
    except (InputError, StageError, KeyboardInterrupt, OSError) as fault:
        print(f"{type(fault).__name__}: {fault}", flush=True)
        return 1
    return 0


def main() -> int:
    """Run the mode that was asked for and write its figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("matrix", "random"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--points", default=",".join(MAKING))
    parser.add_argument("--victims", default=",".join(VICTIMS))
    parser.add_argument("--minutes", type=float, default=20, help="start nothing new after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cli", action="store_true")
    parser.add_argument("--afresh", action="store_true", help="matrix: also the cells that the results have")
    parser.add_argument(
        "--chunk", type=int, default=12, help="points a run of the matrix, whose results are written at its end"
    )
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="miles-crash-"))
    victims = set(given.victims.split(","))
    longest = LONGEST if given.mode == "matrix" else RANDOM
    bases: dict[bool, dict[str, str]] = {}
    undisturbed = [Case(home, f"undisturbed-{few}", given.cli, few) for few in (False, True)]
    if given.mode == "random" or not victims & OF_THE_HEAD:
        undisturbed.pop()
    elif victims <= OF_THE_HEAD:
        undisturbed.pop(0)
    for one in undisturbed:
        one.make()
        if wait(one.start(longest)):
            raise SystemExit(one.log.read_text())
        bases[one.few] = base = one.digests(longest)
        assert "missing" not in base.values() and len(set(base.values())) == len(base)
        print(f"undisturbed: {len(base)} stages", flush=True)
    models = undisturbed[0].home / "models"
    started = time.monotonic()
    until = started + 60 * given.minutes
    with ThreadPoolExecutor(given.jobs) as pool:
        if given.mode == "matrix":
            good = matrix(pool, home, models, bases, given, until)
        else:
            good = random_runs(pool, home, models, bases[False], given, until)
    for one in undisturbed:
        one.close(keep=not good)
    return 0 if good else 1


def matrix(
    pool: ThreadPoolExecutor,
    home: Path,
    models: Path,
    bases: dict[bool, dict[str, str]],
    given: argparse.Namespace,
    until: float,
) -> bool:
    """The lanes of all victims over the points they have not met; whether all ended with the same bits."""
    lanes = [] if given.afresh or not target("matrix").exists() else json.loads(target("matrix").read_text())["lanes"]
    met = {
        (point, one["victim"])
        for one in lanes
        for point, what in one["cells"].items()
        if one["same_bits"] and what != NEVER
    }
    jobs = {}
    for victim in given.victims.split(","):
        points = [point for point in given.points.split(",") if (point, victim) not in met]
        for n, some in enumerate(in_runs(points, given.chunk)):
            case = Case(home, f"{victim}-{n}", given.cli, victim in OF_THE_HEAD)
            jobs[pool.submit(lane, case, models, bases[case.few], victim, some, until)] = victim
    good = True
    for job in as_completed(jobs):
        if outcomes := job.result():
            lanes.append(lane_report(jobs[job], outcomes, given.jobs))
            good = good and all(outcome.same for outcome in outcomes)
            write("matrix", matrix_figures(lanes), lanes=lanes)
    return good


def in_runs(points: list[str], chunk: int) -> list[list[str]]:
    """The points that one run can meet, a run each. A run's policy is made once, by whoever is not killed too: each of
    its points needs a run of its own. Who is killed after a commit finds the stage made, and comes by its end in the next
    iteration only: all ends together."""
    alone = [[point] for point in points if point.startswith("policy:")]
    others = sorted((point for point in points if [point] not in alone), key=lambda point: point.endswith(":end"))
    return alone + [others[n : n + chunk] for n in range(0, len(others), chunk)]


def lane_report(victim: str, outcomes: list[Outcome], jobs: int) -> dict[str, object]:
    """What the results keep of a lane."""
    return {
        "victim": victim,
        "same_bits": all(outcome.same for outcome in outcomes),
        "minutes": round(sum(outcome.seconds for outcome in outcomes) / 60, 1),
        "jobs": jobs,
        "commit": commit(),
        "cells": {outcome.what: word(outcome) for outcome in outcomes},
        "notes": [outcome.note for outcome in outcomes if not outcome.same][:1],
    }


def matrix_figures(lanes: list[dict]) -> dict[str, object]:
    """The matrix so far: of each victim how many points, and what became of it there."""
    cells = {(point, one["victim"]): (what, one["same_bits"]) for one in lanes for point, what in one["cells"].items()}
    table = {}
    for victim in VICTIMS:
        words = Counter(what for (_, killed), (what, _) in cells.items() if killed == victim)
        table[victim] = dict(sorted(words.items()))
    return {
        "cells": len(cells),
        "of": len(MAKING) * len(VICTIMS),
        "same_bits": sum(same for _, same in cells.values()),
        "table": table,
    }


def random_runs(
    pool: ThreadPoolExecutor, home: Path, models: Path, base: dict[str, str], given: argparse.Namespace, until: float
) -> bool:
    """As many runs as fit the time, `jobs` at once."""

    def some(seed: int) -> list[Outcome]:
        done = []
        while time.monotonic() < until:
            case = Case(home, f"seed-{seed}", given.cli)
            case.make(models)
            done.append(shake(case, base, seed, until))
            seed += given.jobs
        return done

    outcomes = [outcome for found in pool.map(some, range(given.seed, given.seed + given.jobs)) for outcome in found]
    figures = {
        "runs": len(outcomes),
        "same_bits": sum(outcome.same for outcome in outcomes),
        "commands": sum(outcome.commands for outcome in outcomes),
        "kills": sum(sum(json.loads(outcome.victim).values()) for outcome in outcomes),
        "minutes": round((time.monotonic() - until) / 60 + given.minutes, 1),
    }
    write("random", figures, runs=[asdict(outcome) for outcome in outcomes])
    return all(outcome.same for outcome in outcomes)


def target(mode: str) -> Path:
    """Where the results lie."""
    return Path(os.environ.get("OUT") or Path(__file__).parent / "results") / f"crash_{mode}.json"


def commit() -> str:
    """The commit that runs."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def write(mode: str, figures: dict[str, object], **more: object) -> None:
    """The figures, and how they were made."""
    report = {
        "figures": figures,
        "command": " ".join(["python benchmarks/crash_matrix.py", *sys.argv[1:]]),
        "commit": commit(),
        "machine": f"{os.cpu_count()} CPU cores, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }
    target(mode).parent.mkdir(parents=True, exist_ok=True)
    target(mode).write_text(json.dumps(report | more, indent=1) + "\n")
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    sys.exit(drive(json.loads(sys.argv[2])) if sys.argv[1] == "drive" else main())
