"""Every fault point against every process, and random kills: does the run end with the bits of an undisturbed one?

    python benchmarks/crash_matrix.py matrix [--jobs 1] [--points a,b] [--victims flow,engine] [--minutes 600]
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
from concurrent.futures import ThreadPoolExecutor
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
PATIENCE_SECONDS = 240


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

    def __init__(self, home: Path, name: str, cli: bool, models: Path | None = None) -> None:
        self.home, self.cli = home / name, cli
        self.root = self.home / "artifacts"
        self.root.mkdir(parents=True, exist_ok=True)
        self.log = self.home / "log.txt"
        if models:
            shutil.copytree(models, self.home / "models")

    def start(self, iterations: int, **variables: str) -> subprocess.Popen:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MILES_", "RAY_"))}
        options = OPTIONS | {"run_id": "run", "artifact_root": str(self.root), "num_rollout": iterations}
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
        for iteration in range(iterations):
            for stage in ITERATION_STAGES:
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


def lane(case: Case, base: dict[str, str], victim: str, points: list[str], until: float) -> list[Outcome]:
    """One victim at one point after the other, in one run."""
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
        outcomes.append(Outcome(point, victim, bool(there), 1, 0.0, True, "" if reached else "never reached"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5 if there else 0.1)
        outcomes[-1].seconds = time.monotonic() - started
        print(f"{point:<22} {victim:<8} {word(outcomes[-1])} ({outcomes[-1].seconds:.0f} s)", flush=True)
    for _ in range(5):
        code = wait(process)
        if code == 0:
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
        code = wait(process)
    wrong = [where for where, digest in case.digests(RANDOM).items() if base[where] != digest]
    note = f"first difference: {wrong[0]}\n{case.log.read_text()[-3000:]}" if wrong else ""
    print(f"seed {seed}: {commands} commands, {dict(kills)}, {wrong or 'the same bits'}", flush=True)
    case.close(keep=bool(wrong))
    return Outcome(f"seed {seed}", json.dumps(kills), True, commands, time.monotonic() - started, not wrong, note)


def drive(options: dict) -> int:
    """The command without Prefect."""
    from flows.session import train_session
    from miles_core.errors import InputError, StageError
    from miles_core.pipeline.iteration import ensure_policy, finished, run_iteration

    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    try:
        with train_session("tiny", options) as session:
            for number in range(session.config.run.num_rollout):
                step = session.step(number)
                if finished(step):
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
    parser.add_argument("--points", default=",".join(POINTS))
    parser.add_argument("--victims", default=",".join(VICTIMS))
    parser.add_argument("--minutes", type=float, default=20, help="start nothing new after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cli", action="store_true")
    parser.add_argument("--chunk", type=int, default=len(POINTS), help="points a run of the matrix")
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="miles-crash-"))
    undisturbed = Case(home, "undisturbed", given.cli)
    longest = LONGEST if given.mode == "matrix" else RANDOM
    if wait(undisturbed.start(longest)):
        raise SystemExit(undisturbed.log.read_text())
    base, models = undisturbed.digests(longest), undisturbed.home / "models"
    assert "missing" not in base.values() and len(set(base.values())) == len(base)
    print(f"undisturbed: {len(base)} stages", flush=True)
    started = time.monotonic()
    until = started + 60 * given.minutes
    with ThreadPoolExecutor(given.jobs) as pool:
        if given.mode == "matrix":
            outcomes = matrix(pool, home, models, base, given, until)
        else:
            outcomes = random_runs(pool, home, models, base, given, until)
    write(given.mode, outcomes, time.monotonic() - started, given.jobs)
    good = all(outcome.same for outcome in outcomes)
    undisturbed.close(keep=not good)
    return 0 if good else 1


def matrix(
    pool: ThreadPoolExecutor, home: Path, models: Path, base: dict[str, str], given: argparse.Namespace, until: float
) -> list[Outcome]:
    """The lanes of all victims."""
    points = given.points.split(",")
    chunks = [points[i : i + given.chunk] for i in range(0, len(points), given.chunk)]
    jobs = [
        pool.submit(lane, Case(home, f"{victim}-{n}", given.cli, models), base, victim, chunk, until)
        for n, chunk in enumerate(chunks)
        for victim in given.victims.split(",")
    ]
    return [outcome for job in jobs for outcome in job.result()]


def random_runs(
    pool: ThreadPoolExecutor, home: Path, models: Path, base: dict[str, str], given: argparse.Namespace, until: float
) -> list[Outcome]:
    """As many runs as fit the time, `jobs` at once."""

    def some(seed: int) -> list[Outcome]:
        done = []
        while time.monotonic() < until:
            done.append(shake(Case(home, f"seed-{seed}", given.cli, models), base, seed, until))
            seed += given.jobs
        return done

    return [outcome for found in pool.map(some, range(given.seed, given.seed + given.jobs)) for outcome in found]


def write(mode: str, outcomes: list[Outcome], seconds: float, jobs: int) -> None:
    """The figures, and for the matrix a table."""
    figures: dict[str, object] = {
        "cases": len(outcomes),
        "same_bits": sum(o.same for o in outcomes),
        "commands": sum(o.commands for o in outcomes),
        "minutes": round(seconds / 60, 1),
        "jobs": jobs,
    }
    if mode == "matrix":
        figures["table"] = {
            p: {o.victim: word(o) for o in outcomes if o.what == p} for p in dict.fromkeys(o.what for o in outcomes)
        }
    else:
        figures["kills"] = sum(sum(json.loads(o.victim).values()) for o in outcomes)
        figures["runs"] = [asdict(o) for o in outcomes]
    figures["not_same"] = [asdict(o) for o in outcomes if not o.same]
    figures["more_than_one_resume"] = [asdict(o) for o in outcomes if o.same and mode == "matrix" and o.commands > 2]
    report = {
        "figures": figures,
        "command": " ".join(["python benchmarks/crash_matrix.py", *sys.argv[1:]]),
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "machine": f"{os.cpu_count()} CPU cores, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }
    target = Path(os.environ.get("OUT") or Path(__file__).parent / "results") / f"crash_{mode}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{figures['same_bits']} of {figures['cases']} cases ended with the same bits; {target.name}", flush=True)


if __name__ == "__main__":
    sys.exit(drive(json.loads(sys.argv[2])) if sys.argv[1] == "drive" else main())
