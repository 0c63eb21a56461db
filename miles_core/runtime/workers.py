"""A driver's actors, started when a stage first needs them and ended with the command.

A stage that is reused needs none: a finished run starts no Ray, engine or trainer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from miles_core.config import RunConfig
from miles_core.config.folders import code_path, own_args
from miles_core.errors import InputError, StageError
from miles_core.runtime.roster import ANSWER_SECONDS, ProcessDied, Roster

if TYPE_CHECKING:
    from miles_core.pipeline.inputs import Inputs
    from miles_core.rollout.protocol import GenerateRequest
    from miles_core.runtime.fenced import Actor


T = TypeVar("T")


class Scored(Protocol):
    """What scorers are made for: the run's inputs, or an evaluation set."""

    @property
    def components(self) -> tuple[str, ...]: ...

    @property
    def ocr_folders(self) -> tuple[str, str] | None: ...

    @property
    def pickscore(self) -> tuple[str, str, str] | None: ...


class Workers(Roster):
    """Engines, parsers, scorers and trainer ranks of one run.

    run: what names the run's actors, the same for every command that trains it; empty for actors that end with this
    command. epoch: the lock's. faults: what `faults.arm` returned. fence: raises LockLost where the lock is lost.
    """

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        state: Path,
        say: Callable[[str], None] = lambda text: None,
        *,
        run: str = "",
        epoch: int = 0,
        faults: dict[str, str] | None = None,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config, inputs, state, say, run=run, epoch=epoch, faults=faults, fence=fence)
        self._starting = {kind: threading.RLock() for kind in ("engines", "parsers", "scorers", "trainer")}
        self._engines: list[Actor] | None = None
        self._parsers: list[Actor] | None = None
        self._scorers: dict[str, list[Actor]] = {}
        self._trainer: list[Actor] | None = None
        self._trained_as = config

    def start_all(self) -> None:
        """Start every kind now, side by side; a stage then waits for its own alone. For a command that will need all."""
        self.connect()
        self.engines()
        self.parsers()
        self.scorers(self.config, self.inputs)
        threading.Thread(target=self._start_trainer_soon, name="trainer", daemon=True).start()

    def _start_trainer_soon(self) -> None:
        # Who needs the trainer starts it again and is told why it failed.
        with contextlib.suppress(Exception):
            self._ranks()

    def need_devices(self) -> None:
        """Raises InputError where the run needs more GPUs than there are: Ray would wait for them for ever."""
        cluster = self.config.cluster
        ranks = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
        reward = self.config.reward
        scoring = reward.pickscore_num_workers * reward.pickscore_num_gpus_per_worker if self.inputs.pickscore else 0.0
        wanted, there = ranks + cluster.rollout_num_engines + scoring, int(self.ray.cluster_resources().get("GPU", 0))
        if self.device == "cuda" and there < wanted:
            own = f", PickScore {scoring:g}" if scoring else ""
            raise InputError(
                f"{ranks} trainer ranks and {cluster.rollout_num_engines} engines take a GPU each{own}, and the Ray cluster has "
                f"{there}: give --device cpu, or fewer by --actor-num-gpus-per-node, --rollout-num-engines and "
                "--pickscore-num-gpus-per-worker"
            )

    # Engines, parsers, scorers

    def engine(self, index: int) -> Actor:
        """The handle of one engine."""
        return self.engines()[index]

    def engines(self) -> list[Actor]:
        """All engines, started."""
        with self._starting["engines"]:
            if self._engines is None:
                self.need_devices()
                count = self.config.cluster.rollout_num_engines
                self._say_start("engines", "engine", count)
                self._engines = [self._new_engine(i) for i in range(count)]
            return self._engines

    def with_engine(self, index: int, work: Callable[[Actor], T]) -> T:
        """Do `work` with an engine; one whose process dies meanwhile is replaced and the work done with the new one.

        Raises ProcessDied after --rollout-max-retries replacements. A new engine holds no policy.
        """
        for left in reversed(range(self.config.rollout.rollout_max_retries + 1)):
            engine = self.engine(index)
            try:
                return work(engine)
            except ProcessDied:
                if not left or self.aborted:
                    raise
                self.replace_engine(index, engine)
        raise AssertionError("the last try returns or raises")

    def with_engines(self, work: Callable[[Actor], T]) -> list[T]:
        """Do `work` with every engine at once; results in order."""
        count = self.config.cluster.rollout_num_engines
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda index: self.with_engine(index, work), range(count)))

    def replace_engine(self, index: int, dead: Actor) -> Actor:
        """A new engine in the place of a dead one, unless that was done already; it holds no policy yet."""
        with self._starting["engines"]:
            engines = self.engines()
            if engines[index] is dead:
                self.end(dead)
                engines[index] = self._new_engine(index)
            return engines[index]

    def parsers(self) -> list[Actor]:
        """Processes that encode and write."""
        with self._starting["parsers"]:
            if self._parsers is None:
                count = self.config.rollout.rollout_parser_num_workers
                self._parsers = [self._new_parser(i) for i in range(count)]
            return self._parsers

    def probe(self, engine: Actor, request: GenerateRequest) -> Any:
        """A reference to an engine's answer to the probe request, once it has answered."""
        probe, receipt = engine.call("probe", request, returns=2)
        self.get([receipt], "the probe")
        return probe

    def parse(self, verb: str, *arguments: Any) -> Any:
        """Have a parser do something small; one whose process dies meanwhile is replaced and another asked.

        Raises ProcessDied after --rollout-max-retries replacements.
        """
        for left in reversed(range(self.config.rollout.rollout_max_retries + 1)):
            parser = self.parsers()[0]
            try:
                return self.get([parser.call(verb, *arguments)], f"the parser's {verb}")[0]
            except ProcessDied:
                if not left or self.aborted:
                    raise
                self.replace_parser(0, parser)
        raise AssertionError("the last try returns or raises")

    def replace_parser(self, index: int, dead: Actor) -> None:
        """A new parser in the place of one that is dead or does not answer, unless that was done already."""
        with self._starting["parsers"]:
            parsers = self.parsers()
            if parsers[index] is dead:
                self.end(dead)
                parsers[index] = self._new_parser(index)

    def scorers(self, config: RunConfig, inputs: Scored) -> list[Actor]:
        """Scorer processes for this reward configuration; a rerun's differ from the run's, and an evaluation's may."""
        args = vars(own_args(config))
        key, own = (
            repr(
                (
                    sorted(config.affecting("rewards").items()),
                    scored.ocr_folders,
                    scored.components,
                    scored.pickscore,
                    config.reward,
                )
            )
            for scored in (inputs, self.inputs)
        )
        with self._starting["scorers"]:
            if key not in self._scorers:
                count = self._scorer_count(config, inputs)
                name = "scorer" if key == own else "eval-scorer"
                self._say_start("scorers", name, count)
                self._scorers[key] = [self._new_scorer(f"{name}-{i}", args, inputs) for i in range(count)]
            return self._scorers[key]

    def replace_scorer(self, group: list[Actor], index: int, dead: Actor, config: RunConfig, inputs: Scored) -> None:
        """A new scorer in the place of one that is dead or does not answer, unless that was done already."""
        with self._starting["scorers"]:
            if group[index] is dead:
                self.end(dead)
                group[index] = self._new_scorer(dead.name, vars(own_args(config)), inputs)

    # The trainer

    def train(self, verb: str, *arguments: Any, watch: Callable[[int, int], None] | None = None) -> list[Any]:
        """Call a verb on every trainer rank, starting them first; results in rank order.

        `watch` is told now and then how many of how many forwards of an update are done. Raises StageError that names
        the rank and where it is where nothing has moved for the time limit.
        """
        ranks = self._ranks()
        calls = [rank.call(verb, *arguments) for rank in ranks]
        try:
            self._watch(ranks, calls, watch or (lambda done, total: None))
            return self.get(calls, f"the trainer's {verb}")
        except BaseException:
            # A rank that failed half-way holds neither the old policy nor the new one.
            self.end_trainer()
            raise

    def _ranks(self) -> list[Actor]:
        with self._starting["trainer"]:
            if self._trainer is None:
                self._trainer = self._start_trainer()
            return self._trainer

    def _watch(self, ranks: list[Actor], calls: list[Any], watch: Callable[[int, int], None]) -> None:
        """Wait for all ranks, or for the first that fails, as long as something moves."""
        # The ranks' own limit comes first: it knows more.
        limit = self.seconds + ANSWER_SECONDS
        deadline, seen = time.monotonic() + limit, [(0, 0)] * len(ranks)
        waiting = list(calls)
        while waiting:
            ready, waiting = self.ray.wait(waiting, num_returns=1, timeout=1.0)
            if ready:
                self.get(ready, f"trainer rank {calls.index(ready[0])}")
                deadline = time.monotonic() + limit
                continue
            done = self.ask([rank.handle.progress.remote() for rank in ranks])
            if done is not None and done != seen:
                deadline, seen = time.monotonic() + limit, done
                watch(*done[0])
            elif time.monotonic() > deadline:
                raise StageError(
                    f"the trainer has not moved for {self.seconds / 60:g} minutes (--distributed-timeout-minutes): "
                    f"{self._where(ranks)}; run the same command again to resume"
                )

    def _where(self, ranks: list[Actor]) -> str:
        """What each rank is at, in words."""
        places = []
        for number, rank in enumerate(ranks):
            status = self.ask([rank.status()])
            places.append(f"rank {number} {'does not answer' if status is None else 'is at ' + status[0].at}")
        return ", ".join(places)

    def end_trainer(self) -> None:
        """End the trainer ranks; the next call starts new ones."""
        with self._starting["trainer"]:
            for rank in self._trainer or []:
                self.end(rank)
            self._trainer = None

    @contextlib.contextmanager
    def trainer_of(self, config: RunConfig) -> Iterator[None]:
        """Trainer ranks of another configuration of the run for a while; before and after it they start afresh."""
        if config == self._trained_as:
            yield
            return
        before = self._trained_as
        self.end_trainer()
        self._trained_as = config
        try:
            yield
        finally:
            self.end_trainer()
            self._trained_as = before

    def _start_trainer(self) -> list[Actor]:
        self.need_devices()
        cluster = self.config.cluster
        world, device = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node, self.device
        names = [f"trainer-{rank}" for rank in range(world)]
        identity = self.identity("TrainerActor", self._trained_as)
        if all(self.left(name, identity) for name in names):
            return [self.take(name) for name in names]
        self.say("starting the trainer")
        ranks: list[Actor] = []
        try:
            ranks.extend(self.actor("TrainerActor", name, self._trained_as, fresh=True) for name in names)
            one_node = sum(node["Alive"] for node in self.ray.nodes()) == 1
            host, port = self.get([ranks[0].call("address", one_node)], "the start of the trainer")[0]
            start = [
                actor.call(
                    "start",
                    self._trained_as.replace(code_path=code_path(self._trained_as)),
                    str(self.inputs.checkpoint),
                    self.inputs.family,
                    rank=rank,
                    world_size=world,
                    master_address=host,
                    master_port=port,
                    device=device,
                )
                for rank, actor in enumerate(ranks)
            ]
            self.get(start, "the start of the trainer")
        except BaseException:
            for actor in ranks:
                self.end(actor)
            raise
        return ranks

    # Actors

    def expected(self) -> dict[str, str]:
        cluster, rollout = self.config.cluster, self.config.rollout
        scorers = self._scorer_count(self.config, self.inputs)
        counts = {
            ("EngineActor", "engine"): cluster.rollout_num_engines,
            ("ParserActor", "parser"): rollout.rollout_parser_num_workers,
            ("RewardActor", "scorer"): scorers,
            ("TrainerActor", "trainer"): cluster.actor_num_nodes * cluster.actor_num_gpus_per_node,
        }
        return {f"{name}-{i}": self.identity(kind, self.config) for (kind, name), n in counts.items() for i in range(n)}

    def _say_start(self, what: str, name: str, count: int) -> None:
        if not all(self.left(f"{name}-{i}") for i in range(count)):
            self.say(f"starting the {what}")

    def _new_engine(self, index: int) -> Actor:
        device = self.device
        logs = self.state.parent / "logs" / (self.run or "beside")
        arguments = (self.config, str(self.inputs.checkpoint), self.inputs.family, device, str(logs))
        return self.actor("EngineActor", f"engine-{index}", self.config, *arguments)

    def _new_parser(self, index: int) -> Actor:
        return self.actor("ParserActor", f"parser-{index}", self.config)

    def _new_scorer(self, name: str, args: dict[str, Any], inputs: Scored) -> Actor:
        device = self.device if inputs.pickscore else "cpu"
        gpus = self.config.reward.pickscore_num_gpus_per_worker if device == "cuda" else 0.0
        folders = inputs.ocr_folders, inputs.pickscore
        return self.actor("RewardActor", name, self.config, args, *folders, device, gpus=gpus)

    @staticmethod
    def _scorer_count(config: RunConfig, inputs: Scored) -> int:
        ocr = config.reward.ocr_num_workers if "ocr" in inputs.components else 1
        return max(ocr, config.reward.pickscore_num_workers if inputs.pickscore else 1)
