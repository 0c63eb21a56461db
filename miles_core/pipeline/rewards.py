"""rewards: score each rollout part as it lands, behind the engines."""

import math
import time
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from miles_core.config.guard import actions_of
from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.observe.health import grid_of
from miles_core.observe.metrics import mean_and_std
from miles_core.pipeline.feed import RolloutFeed, UpstreamFailed
from miles_core.pipeline.poison import find_poison
from miles_core.pipeline.stage import (
    Outcome,
    Product,
    Step,
    commit_stage,
    find_stage,
    run_stage,
    stage_fingerprint,
    why,
)
from miles_core.rewards.rm_types import metadata_of
from miles_core.runtime.faults import fault_point
from miles_core.runtime.roster import reason_of
from miles_core.store.digest import ROW_DIGEST
from miles_core.store.manifest import Manifest
from miles_core.store.parts import Part, inspect_table, read_table
from miles_core.store.run_store import Attempt


def score_behind(step: Step, feed: RolloutFeed) -> Outcome:
    """Score a rollout while it is being made, unless a committed attempt may answer already.

    An attempt under the same fingerprint can be told from a fresh one only by the finished rollout's digest: then
    scoring waits for it.
    """
    rollout_fingerprint, prompts = feed.wait_for_begin()
    wanted = stage_fingerprint(step, "rewards", {"rollout": rollout_fingerprint})
    made = (step.store.on_line("rewards", step.iteration), *step.store.committed("rewards", step.iteration))
    known = any(m is not None and m.fingerprint == wanted for m in made)
    parts: list[Part] = []
    if known:
        parts, rollout = feed.wait_for_manifest()
        found = find_stage(step, "rewards", {"rollout": rollout})
        if found:
            return run_stage(step, "rewards", {"rollout": rollout}, _unused)
    started = time.time()
    reason = why(step, "rewards", {})
    attempt = step.store.open_attempt("rewards", step.iteration, wanted, {}, resumable=True)
    fault_point("rewards:start")
    try:
        scoring = Scoring(step, attempt, _metadata(step, prompts), prompts.rows)
        for part in parts:
            scoring.put(part)
        while feed.manifest is None:
            landed = feed.next(timeout=0.05)
            if landed:
                scoring.put(landed)
            scoring.poll()
        rollout = feed.manifest
        scoring.check(rollout)
        product = scoring.finish(rollout)
    except UpstreamFailed:
        raise
    except Exception:
        for consumed in (prompts, feed.committed_now()):
            if consumed:
                step.store.verify(consumed)
        raise
    manifest = commit_stage(step, attempt, {"rollout": rollout}, product, started)
    return Outcome(manifest, False, reason, time.time() - started)


def score_wave(step: Step, attempt: Attempt, groups: list[list[Sample]], feed: RolloutFeed) -> dict[int, float]:
    """Rewards by sample of the groups of a wave, scored into an attempt as their parts come through `feed`."""
    samples = {sample.index: dict(sample.metadata) for group in groups for sample in group}
    scoring = Scoring(step, attempt, samples, len(samples))
    while not feed.ended:
        landed = feed.next(timeout=0.05)
        if landed:
            scoring.put(landed)
        scoring.poll()
    scoring.wait()
    tables = [read_table(step.store.files, part, ["sample_index", "reward"]) for part in scoring.done]
    return {row["sample_index"]: row["reward"] for table in tables for row in table.to_pylist()}


def _metadata(step: Step, prompts: Manifest) -> dict[int, dict[str, Any]]:
    columns = ["sample_index", "metadata"]
    return metadata_of(pa.concat_tables([read_table(step.store.files, p, columns) for p in prompts.data]))


def _unused(step: Step, attempt: Attempt, upstream: dict[str, Manifest]) -> Product:
    raise AssertionError("a committed attempt was found")


@dataclass(frozen=True)
class Sent:
    """A part at a scorer: which one, and how often it was sent before."""

    part: Part
    worker: int
    tries: int
    actor: Any


class Scoring:
    """The scorers at work on one iteration's parts: least outstanding first, kept parts not scored again."""

    def __init__(self, step: Step, attempt: Attempt, metadata: dict[int, dict[str, Any]], total: int) -> None:
        self.step, self.attempt = step, attempt
        self.files = step.store.files
        # Once for all parts: a call copies its arguments.
        self.metadata = step.workers.ray.put(metadata)
        self.total = total
        self.kept = self._kept()
        self.names = set(self.files.list(attempt.path("data")))
        self.done: list[Part] = []
        self.scored: list[str] = []
        self.pending: dict[object, Sent] = {}
        self.aside: list[Part] = []
        self.outstanding: list[int] = []
        self.moved = time.monotonic()

    def put(self, part: Part) -> None:
        """Take a rollout part: keep what an earlier try scored, else hand it to a scorer."""
        stem = _microgroup(part)
        self.scored.append(part.content)
        if stem in self.kept:
            kept, digests = self.kept[stem]
            rows = read_table(self.files, part, [ROW_DIGEST]).column(ROW_DIGEST).to_pylist()
            if rows == digests:
                self._finished(kept)
                return
        self._send(part, 0)

    def check(self, rollout: Manifest) -> None:
        """Raises StageError where what was scored is not what was committed: another command won the race."""
        if sorted(self.scored) != sorted(part.content for part in rollout.data):
            raise StageError(
                f"{rollout.folder} was committed by another command with other samples than those that were scored; run "
                "the same command again to score them"
            )

    def poll(self, timeout: float = 0.0) -> None:
        """Take in finished parts; put a part aside that no scorer survived in all its tries."""
        if not self.pending:
            return
        ray = self.step.workers.ray
        ready, _ = ray.wait(list(self.pending), num_returns=len(self.pending), timeout=timeout, fetch_local=True)
        for reference in ready:
            sent = self.pending.pop(reference)
            part, tries = sent.part, sent.tries
            self.outstanding[sent.worker] -= 1
            try:
                self._finished(ray.get(reference))
            except ray.exceptions.RayTaskError as fault:
                if isinstance(fault.cause, FileExistsError):
                    # Another command scores the same rollout the same way, in the same folder.
                    self._send(part, tries)
                    continue
                raise fault.cause if isinstance(fault.cause, Exception) else fault from None
            except ray.exceptions.RayActorError as fault:
                if self.step.workers.aborted:
                    raise StageError(
                        f"the scorer's process died {tries + 1} times on {part.path} ({reason_of(fault)}); "
                        "run the same command again to resume"
                    ) from None
                self._replace(sent.worker, sent.actor)
                self._send_again(sent)
            self.moved = time.monotonic()
        if time.monotonic() - self.moved > self.step.workers.seconds:
            self._replace_silent()

    def wait(self) -> None:
        """Until the last part is scored. Raises StageError that names the sample that no scorer survives."""
        while self.pending:
            self.poll(timeout=1.0)
        # What waited behind a poisoned part at the same scorer was put aside with it: alone, it is scored.
        aside, self.aside = self.aside, []
        failed = [(part, why_not) for part in aside if (why_not := self._score_alone(part))]
        if failed:
            raise StageError(self._poison(*failed[0]))

    def finish(self, rollout: Manifest) -> Product:
        """Wait for the last parts. The figures are of the rewards and, for the guard, of the rollout's images."""
        grid = {} if actions_of(self.step.config)["grid"] == "off" else grid_of(self.files, rollout)
        self.wait()
        scores = [f"score_{name}" for name in self.step.inputs.components]
        tables = [read_table(self.files, part, ["reward", *scores]) for part in self.done]
        return Product(self.done, summary_of(pa.concat_tables(tables)) | grid)

    def _send(self, part: Part, tries: int) -> None:
        scorers = self.step.workers.scorers(self.step.config, self.step.inputs)
        self.outstanding = self.outstanding or [0] * len(scorers)
        worker = min(range(len(scorers)), key=lambda i: (self.outstanding[i], (i + tries) % len(scorers)))
        components = list(self.step.inputs.components)
        actor = scorers[worker]
        reference = actor.call("score", self.files, part, self._free_name(part), components, self.metadata)
        self.outstanding[worker] += 1
        if not self.pending:
            self.moved = time.monotonic()
        self.pending[reference] = Sent(part, worker, tries, actor)

    def _replace_silent(self) -> None:
        """Nothing was scored for the time limit: replace the scorers that have work, and hand their parts out again."""
        silent, self.pending, self.moved = list(self.pending.values()), {}, time.monotonic()
        for sent in silent:
            self._replace(sent.worker, sent.actor)
            self.outstanding[sent.worker] = 0
        for sent in silent:
            self._send_again(sent)

    def _send_again(self, sent: Sent) -> None:
        if sent.tries < self.step.config.reward.reward_max_retries:
            self._send(sent.part, sent.tries + 1)
        else:
            self.aside.append(sent.part)

    def _score_alone(self, part: Part) -> str | None:
        """Why no scorer survives the part, None where it was scored after all."""
        components = list(self.step.inputs.components)
        try:
            scored, told = self._asked("score", self.files, part, self._free_name(part), components, self.metadata)
        except FileExistsError:
            return self._score_alone(part)
        if told is None:
            self._finished(scored)
        return told

    def _poison(self, part: Part, reason: str) -> str:
        components = list(self.step.inputs.components)
        found = find_poison(
            part.rows,
            lambda start, stop: self._asked("probe", self.files, part, start, stop, components, self.metadata)[1],
        )
        kept = "all other parts are scored and kept; run the same command again to resume"
        if found is None:
            return f"{reason} on {part.path}, though on no sample of it alone; {kept}"
        row = read_table(self.files, part, ["sample_index", "prompt", "seed"]).slice(found[0], 1).to_pylist()[0]
        return (
            f"{found[1]} on sample {row['sample_index']} (prompt {row['prompt']!r}, seed {row['seed']}) of {part.path}; "
            f"{kept}"
        )

    def _asked(self, method: str, *args: Any) -> tuple[Any, str | None]:
        """(answer, None) of a scorer that has nothing else to do, or (None, how it ended)."""
        workers = self.step.workers
        ray, actor = workers.ray, workers.scorers(self.step.config, self.step.inputs)[0]
        try:
            return ray.get(actor.call(method, *args), timeout=workers.seconds), None
        except ray.exceptions.RayTaskError as fault:
            raise fault.cause if isinstance(fault.cause, Exception) else fault from None
        except ray.exceptions.RayActorError as fault:
            told = f"the scorer's process died ({reason_of(fault)})"
            if workers.aborted:
                raise StageError(f"{told}; run the same command again to resume") from None
        except ray.exceptions.GetTimeoutError:
            told = f"no scorer answered within {workers.seconds / 60:g} minutes"
        self._replace(0, actor)
        return None, told

    def _replace(self, index: int, dead: Any) -> None:
        workers, config, inputs = self.step.workers, self.step.config, self.step.inputs
        workers.replace_scorer(workers.scorers(config, inputs), index, dead, config, inputs)

    def _free_name(self, part: Part) -> str:
        stem, number = _microgroup(part), 1
        while f"{stem}-{number}.parquet" in self.names:
            number += 1
        self.names.add(f"{stem}-{number}.parquet")
        return self.attempt.path(f"data/{stem}-{number}.parquet")

    def _finished(self, part: Part) -> None:
        self.done.append(part)
        fault_point("rewards:landed")
        self.step.progress("rewards", sum(p.rows for p in self.done), self.total)

    def _kept(self) -> dict[str, tuple[Part, list[str]]]:
        found = {}
        for name in self.files.list(self.attempt.path("data")):
            part = inspect_table(self.files, self.attempt.path(f"data/{name}"))
            if part:
                table = pq.read_table(pa.BufferReader(self.files.read(part.path)), columns=["rollout_digest"])
                found[_microgroup(part)] = (part, table.column("rollout_digest").to_pylist())
        return found


def summary_of(table: pa.Table) -> dict[str, Any]:
    """The figures of a rewards table, whatever the order of its rows; `score_means` by scorer, over the samples that
    each scored."""
    columns = {name: [v for v in table.column(name).to_pylist() if v is not None] for name in table.column_names}
    rewards = columns.pop("reward")
    mean, spread = mean_and_std(rewards)
    return {
        "samples": len(rewards),
        "reward_mean": mean,
        "reward_std": spread,
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "score_means": {n.removeprefix("score_"): math.fsum(v) / len(v) for n, v in columns.items() if v},
    }


def _microgroup(part: Part) -> str:
    return part.path.rsplit("/", 1)[1].split("-")[0]
