"""Every fault point against every process, and random kills: does the run end with the bits of an undisturbed one?

    python benchmarks/crash_matrix.py matrix [--jobs 1] [--points a,b] [--victims flow,engine] [--minutes 600]
    python benchmarks/crash_matrix.py random --minutes 20 [--jobs 1] [--seed 0]

matrix: a run of two iterations pauses at the point in its second one, the victim is killed -9, the same command is given
again until it ends well. random: one process of the run, any, is killed -9 after a random time, again and again. Without
--cli the stages run without Prefect, by the same code below it. Writes benchmarks/results/crash_<mode>.json, or into the
folder that the environment variable OUT names.
"""

import argparse
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
from miles_core.store.files import Files
from miles_core.store.run_store import RunStore
from miles_core.store.stages import ITERATION_STAGES

ITERATIONS = 2
OPTIONS = {
    "num_rollout": ITERATIONS,
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
# Passages before the second iteration: 8 microgroups, 2 ranks with 2 steps of 2 forwards and their reference.
INSIDE_PASSAGE = {
    "rollout:landed": 11,
    "rollout:generate": 11,
    "rollout:write": 11,
    "rollout:written": 11,
    "rewards:landed": 11,
    "rewards:score": 11,
    "update:forward": 11,
    "update:after_step": 6,
    "update:write": 10,
    "sync:push": 5,
    "sync:pushed": 5,
}
VICTIMS = {
    "flow": "the command itself",
    "keeper": "the keeper of the Ray head",
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
    """One run of its own under a shared home."""

    def __init__(self, home: Path, name: str, cli: bool) -> None:
        self.home, self.root, self.cli = home, home / "roots" / name, cli
        self.root.mkdir(parents=True, exist_ok=True)
        self.log = self.root / "log.txt"

    def start(self, **variables: str) -> subprocess.Popen:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MILES_", "RAY_"))}
        options = OPTIONS | {"run_id": "run", "artifact_root": str(self.root)}
        if self.cli:
            flags = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
            command = [str(Path(sys.executable).parent / "miles"), "train", "tiny", *flags]
        else:
            command = [sys.executable, __file__, "drive", json.dumps(options)]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                env=kept | {"MILES_HOME": str(self.home), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def run(self) -> None:
        process = self.start()
        if process.wait(PATIENCE_SECONDS):
            raise SystemExit(self.log.read_text())

    def finish(self, process: subprocess.Popen, limit: int = 6) -> int:
        """Wait for the command and give it again until it ends well; how often it was given in all."""
        for given in range(1, limit):
            if wait(process) == 0:
                return given
            process = self.start()
        return limit if wait(process) == 0 else -1

    def digests(self) -> dict[str, str]:
        store = RunStore(Files(str(self.root)), "run")
        found = {}
        for iteration in range(ITERATIONS):
            for stage in ITERATION_STAGES:
                manifest = store.on_line(stage, iteration)
                found[f"{iteration}/{stage}"] = manifest.content_digest if manifest else "missing"
        return found


def wait(process: subprocess.Popen) -> int:
    """The command's exit code; one that hangs is killed."""
    try:
        return process.wait(PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return -99


def victims_of(process: subprocess.Popen) -> dict[str, list[psutil.Process]]:
    """The processes of a command by kind."""
    found: dict[str, list[psutil.Process]] = {kind: [] for kind in VICTIMS}
    try:
        found["flow"] = [psutil.Process(process.pid)]
        children = found["flow"][0].children(recursive=True)
    except psutil.NoSuchProcess:
        return found
    for child in children:
        try:
            name, words = child.name(), child.cmdline()
        except psutil.Error:
            continue
        if any("miles_core.runtime.keeper" in word for word in words):
            found["keeper"].append(child)
        elif name in ("raylet", "gcs_server"):
            found["raylet" if name == "raylet" else "gcs"].append(child)
        for kind, title in VICTIMS.items():
            if name.startswith("ray::") and (words or [name])[0].startswith(title):
                found[kind].append(child)
    return found


def cell(home: Path, base: dict[str, str], point: str, victim: str, cli: bool) -> Outcome:
    """One point against one process."""
    started = time.monotonic()
    case = Case(home, f"{point}-{victim}".replace(":", "-"), cli)
    stage, place = point.split(":")
    boundary = place in ("start", "before_commit", "after_commit", "end")
    passage = (1 if stage == "policy" else 2) if boundary else INSIDE_PASSAGE[point]
    counts = case.root / "counts"
    counts.mkdir()
    process = case.start(MILES_FAULT=f"{point}:{passage}:slow=4", MILES_FAULT_COUNTS=str(counts))
    reached = counts / f"{point.replace(':', '-')}@-{passage}"
    while not reached.exists() and process.poll() is None:
        time.sleep(0.02)
    there = victims_of(process)[victim]
    for one in there[:1]:
        one.kill()
    commands = case.finish(process)
    same = case.digests() == base
    plain = same and reached.exists() and commands <= 2
    note = "" if plain else case.log.read_text()[-3000:]
    outcome = Outcome(point, victim, bool(there) and reached.exists(), commands, time.monotonic() - started, same, note)
    if same:
        shutil.rmtree(case.root)
    print(f"{point:<22} {victim:<8} {word(outcome)} ({outcome.seconds:.0f} s)", flush=True)
    return outcome


def word(outcome: Outcome) -> str:
    """What became of a case, in a word or two."""
    if not outcome.same:
        return "DIFFERENT" if outcome.commands > 0 else "NEVER ENDED WELL"
    if not outcome.found:
        return "not there"
    return "went on" if outcome.commands == 1 else f"resumed {outcome.commands - 1}x"


def shake(home: Path, base: dict[str, str], number: int, seed: int, until: float, cli: bool) -> Outcome:
    """One run whose processes are killed at random until it is done."""
    dice, started, kills = random.Random(seed), time.monotonic(), Counter()
    case = Case(home, f"random-{number}", cli)
    commands = 0
    while commands < 40:
        process = case.start()
        commands += 1
        if time.monotonic() < until:
            try:
                process.wait(dice.uniform(1, 30))
            except subprocess.TimeoutExpired:
                there = {kind: found for kind, found in victims_of(process).items() if found}
                kind = dice.choice(sorted(there)) if there else None
                if kind:
                    kills[kind] += 1
                    try:
                        dice.choice(there[kind]).kill()
                    except psutil.NoSuchProcess:
                        kills[kind] -= 1
        if wait(process) == 0:
            break
    same = case.digests() == base
    note = f"kills: {dict(kills)}" if same else case.log.read_text()[-1500:]
    if same:
        shutil.rmtree(case.root)
    outcome = Outcome(f"random-{number}", str(dict(kills)), True, commands, time.monotonic() - started, same, note)
    print(f"run {number}: {commands} commands, {dict(kills)}, {'same' if same else 'DIFFERENT'}", flush=True)
    return outcome


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
    given = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="miles-crash-"))
    base_case = Case(home, "undisturbed", given.cli)
    base_case.run()
    base = base_case.digests()
    assert "missing" not in base.values() and len(set(base.values())) == len(base)
    print(f"undisturbed: {len(base)} stages", flush=True)
    started = time.monotonic()
    with ThreadPoolExecutor(given.jobs) as pool:
        if given.mode == "matrix":
            pairs = [(p, v) for p in given.points.split(",") for v in given.victims.split(",")]
            until = started + 60 * given.minutes
            found = pool.map(lambda p: cell(home, base, *p, given.cli) if time.monotonic() < until else None, pairs)
            outcomes = [outcome for outcome in found if outcome]
        else:
            outcomes = random_runs(pool, home, base, given, started + 60 * given.minutes)
    write(given.mode, outcomes, time.monotonic() - started, given.jobs)
    if given.cli:
        subprocess.run([Path(sys.executable).parent / "miles", "down"], env=os.environ | {"MILES_HOME": str(home)})
    good = all(outcome.same for outcome in outcomes)
    if good:
        shutil.rmtree(home, ignore_errors=True)
    return 0 if good else 1


def random_runs(
    pool: ThreadPoolExecutor, home: Path, base: dict[str, str], given: argparse.Namespace, until: float
) -> list[Outcome]:
    """As many runs as fit the time, `jobs` at once."""

    def lane(first: int) -> list[Outcome]:
        done, number = [], first
        while time.monotonic() < until:
            done.append(shake(home, base, number, given.seed + number, until, given.cli))
            number += given.jobs
        return done

    return [outcome for found in pool.map(lane, range(given.jobs)) for outcome in found]


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
        figures["kills"] = sum(sum(json.loads(o.victim.replace("'", '"')).values()) for o in outcomes)
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
