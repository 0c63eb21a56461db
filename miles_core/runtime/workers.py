"""A driver's actors, started when a stage first needs them and ended with the command.

A stage that is reused needs none: a finished run starts no Ray, engine or trainer. The actors of a run that is trained
are named and outlive a command that is killed; the next one takes over those that are idle, clean and made from the
same things, and ends the others before it looks at anything they may have written.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from miles_core.config import RunConfig
from miles_core.errors import InputError, StageError
from miles_core.runtime.cluster import ray_cluster
from miles_core.runtime.heads import end_left_heads
from miles_core.runtime.identity import actor_identity

if TYPE_CHECKING:
    from miles_core.pipeline.inputs import Inputs
    from miles_core.runtime.fenced import Actor, Status


T = TypeVar("T")
_ANSWER_SECONDS = 10.0


class ProcessDied(StageError):
    """An actor's process died during a call; the actor may be replaced and the call made again."""


class Workers:
    """Engines, parsers, scorers and trainer ranks of one run.

    run: what names the run's actors, the same for every command that trains it; empty for actors that end with this
    command. epoch: the lock's. faults: what `faults.arm` returned.
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
    ) -> None:
        self.config, self.inputs, self.state, self.say = config, inputs, state, say
        self.run, self.epoch, self.faults = run, epoch, faults or {}
        self._stack = contextlib.ExitStack()
        self._connecting = threading.Lock()
        self._starting = {kind: threading.RLock() for kind in ("engines", "parsers", "scorers", "trainer")}
        self._ray: Any = None
        self._head_lives: Callable[[], bool] = lambda: True
        self.aborted = False
        self._left: dict[str, tuple[Actor, Status]] = {}
        self._engines: list[Actor] | None = None
        self._parsers: list[Actor] | None = None
        self._scorers: dict[str, list[Actor]] = {}
        self._trainer: list[Actor] | None = None
        self._made: list[Actor] = []
        self._trained_as = config

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *fault: Any) -> None:
        keep = self.config.cluster.keep_actors and kind is None
        if self._ray is not None and not keep:
            self.abort()
        self._stack.close()
        if self.run and not keep:
            end_left_heads(self.state, self.run)

    @property
    def ray(self) -> Any:
        """The ray module, connected."""
        with self._connecting:
            if self._ray is None:
                self.say("starting Ray")
                cluster = self.config.cluster
                self._head_lives = self._stack.enter_context(
                    ray_cluster(
                        self.state,
                        run=self.run,
                        namespace=self.run or None,
                        keep=cluster.keep_actors,
                        idle_seconds=60.0 * cluster.actor_idle_minutes,
                    )
                )
                import ray

                self._ray = ray
                self._take_over()
            return self._ray

    def connect(self) -> None:
        """Connect to Ray now. Call it in the main thread: Ray takes over signals, which are put back there alone."""
        assert self.ray

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

    def renew(self) -> None:
        """Tell every actor that its command lives. Raises StageError where the command's Ray head died."""
        if not self._head_lives():
            raise StageError("the Ray head of this command died; run the same command again to resume")
        for actor in list(self._made):
            with contextlib.suppress(Exception):
                actor.status()

    def abort(self) -> None:
        """End every actor, so that threads that wait for one fail at once and do not start another."""
        self.aborted = True
        if not self._head_lives():
            return
        for actor in [*self._made, *(actor for actor, _ in self._left.values())]:
            with contextlib.suppress(Exception):
                self._ray.kill(actor.handle)

    @property
    def device(self) -> str:
        """cpu or cuda."""
        chosen = self.config.cluster.device
        if chosen != "auto":
            return chosen
        return "cuda" if self.ray.cluster_resources().get("GPU", 0) else "cpu"

    def need_devices(self) -> None:
        """Raises InputError where the run needs more GPUs than there are: Ray would wait for them for ever."""
        cluster = self.config.cluster
        ranks = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node
        wanted, there = ranks + cluster.rollout_num_engines, int(self.ray.cluster_resources().get("GPU", 0))
        if self.device == "cuda" and there < wanted:
            raise InputError(
                f"{ranks} trainer ranks and {cluster.rollout_num_engines} engines take a GPU each and the Ray cluster has "
                f"{there}: give --device cpu, or fewer by --actor-num-gpus-per-node and --rollout-num-engines"
            )

    @property
    def seconds(self) -> float:
        """Limit of one actor call."""
        return 60.0 * self.config.cluster.distributed_timeout_minutes

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
                self._end(dead)
                engines[index] = self._new_engine(index)
            return engines[index]

    def parsers(self) -> list[Actor]:
        """Processes that encode and write."""
        with self._starting["parsers"]:
            if self._parsers is None:
                count = self.config.rollout.rollout_parser_num_workers
                self._parsers = [self._new_parser(i) for i in range(count)]
            return self._parsers

    def replace_parser(self, index: int, dead: Actor) -> None:
        """A new parser in the place of one that is dead or does not answer, unless that was done already."""
        with self._starting["parsers"]:
            parsers = self.parsers()
            if parsers[index] is dead:
                self._end(dead)
                parsers[index] = self._new_parser(index)

    def scorers(self, config: RunConfig, inputs: Inputs) -> list[Actor]:
        """Scorer processes for this reward configuration; a rerun's differ from the run's."""
        args = config.flat()
        key = repr((sorted(config.affecting("rewards").items()), inputs.ocr_folders, inputs.components))
        with self._starting["scorers"]:
            if key not in self._scorers:
                count = config.reward.ocr_num_workers if "ocr" in inputs.components else 1
                self._say_start("scorers", "scorer", count)
                self._scorers[key] = [self._new_scorer(i, args, inputs) for i in range(count)]
            return self._scorers[key]

    def replace_scorer(self, group: list[Actor], index: int, dead: Actor, config: RunConfig, inputs: Inputs) -> None:
        """A new scorer in the place of one that is dead or does not answer, unless that was done already."""
        with self._starting["scorers"]:
            if group[index] is dead:
                self._end(dead)
                group[index] = self._new_scorer(index, config.flat(), inputs)

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
        limit = self.seconds + _ANSWER_SECONDS
        deadline, seen = time.monotonic() + limit, [(0, 0)] * len(ranks)
        waiting = list(calls)
        while waiting:
            ready, waiting = self.ray.wait(waiting, num_returns=1, timeout=1.0)
            if ready:
                self.get(ready, f"trainer rank {calls.index(ready[0])}")
                deadline = time.monotonic() + limit
                continue
            done = self._ask([rank.handle.progress.remote() for rank in ranks])
            if done is not None and done != seen:
                deadline, seen = time.monotonic() + limit, done
                watch(*done[0])
            elif time.monotonic() > deadline:
                raise StageError(
                    f"the trainer has not moved for {self.seconds / 60:g} minutes (--distributed-timeout-minutes): "
                    f"{self._where(ranks)}; run the same command again to resume"
                )

    def _ask(self, references: list[Any]) -> list[Any] | None:
        """Answers to questions that take no time; None where one does not answer at once."""
        try:
            answers: list[Any] = self.ray.get(references, timeout=_ANSWER_SECONDS)
            return answers
        except (self.ray.exceptions.GetTimeoutError, self.ray.exceptions.RayActorError):
            return None

    def _where(self, ranks: list[Actor]) -> str:
        """What each rank is at, in words."""
        places = []
        for number, rank in enumerate(ranks):
            status = self._ask([rank.status()])
            places.append(f"rank {number} {'does not answer' if status is None else 'is at ' + status[0].at}")
        return ", ".join(places)

    def end_trainer(self) -> None:
        """End the trainer ranks; the next call starts new ones."""
        with self._starting["trainer"]:
            for rank in self._trainer or []:
                self._end(rank)
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

    def get(self, references: list[Any], what: str) -> list[Any]:
        """Wait for actor calls. Raises the actor's own error, or StageError after the time limit."""
        try:
            return self.ray.get(references, timeout=self.seconds)
        except self.ray.exceptions.GetTimeoutError:
            raise StageError(
                f"{what} did not answer within {self.seconds / 60:g} minutes (--distributed-timeout-minutes); "
                "run the same command again to resume"
            ) from None
        except self.ray.exceptions.RayActorError as fault:
            raise ProcessDied(
                f"{what}: the process died ({reason_of(fault)}); run the same command again to resume"
            ) from None
        except self.ray.exceptions.RayTaskError as fault:
            raise fault.cause if isinstance(fault.cause, Exception) else fault from None

    def _start_trainer(self) -> list[Actor]:
        self.need_devices()
        cluster = self.config.cluster
        world, device = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node, self.device
        names = [f"trainer-{rank}" for rank in range(world)]
        identity = self._identity("TrainerActor")
        if all(name in self._left and self._left[name][1].identity == identity for name in names):
            return [self._take(name) for name in names]
        self.say("starting the trainer")
        ranks = [self._actor("TrainerActor", name, fresh=True) for name in names]
        host, port = self.get([ranks[0].call("address")], "the start of the trainer")[0]
        start = [
            actor.call(
                "start",
                self._trained_as,
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
        try:
            self.get(start, "the start of the trainer")
        except BaseException:
            for actor in ranks:
                self._end(actor)
            raise
        return ranks

    # Actors

    def _say_start(self, what: str, name: str, count: int) -> None:
        if any(f"{name}-{i}" not in self._left for i in range(count)):
            self.say(f"starting the {what}")

    def _new_engine(self, index: int) -> Actor:
        device = self.device
        arguments = (self.config, str(self.inputs.checkpoint), self.inputs.family, device)
        return self._actor("EngineActor", f"engine-{index}", *arguments)

    def _new_parser(self, index: int) -> Actor:
        return self._actor("ParserActor", f"parser-{index}")

    def _new_scorer(self, index: int, args: dict[str, Any], inputs: Inputs) -> Actor:
        return self._actor("RewardActor", f"scorer-{index}", args, inputs.ocr_folders)

    def _actor(self, kind: str, name: str, *arguments: Any, fresh: bool = False) -> Actor:
        """An actor of that name: the one that an earlier command left where it fits, else a new one."""
        if self.aborted:
            raise StageError("the command was ended; run it again to resume")
        ray = self.ray
        # Ray is configured by the environment when it is imported, and the actors' modules import it.
        from miles_core.runtime import actors
        from miles_core.runtime.fenced import Actor, Terms

        identity = self._identity(kind, *arguments)
        left = self._left.get(name)
        if left and left[1].identity == identity and not fresh:
            return self._take(name)
        if left:
            self._left.pop(name)[0].end()
        options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": {"watch": 1}}
        if kind in ("EngineActor", "TrainerActor") and self.device == "cuda":
            options["num_gpus"] = 1
        if self.run:
            options |= {"name": name, "lifetime": "detached"}
        idle = 60.0 * self.config.cluster.actor_idle_minutes if self.run else 0.0
        terms = Terms(name, self.epoch, identity, idle, self.faults)
        handle = ray.remote(**options)(getattr(actors, kind)).remote(terms, *arguments)
        actor = Actor(name, handle, self.epoch)
        self._made.append(actor)
        return actor

    def _end(self, actor: Actor) -> None:
        actor.end()
        with contextlib.suppress(ValueError):
            self._made.remove(actor)

    def _take(self, name: str) -> Actor:
        actor, _ = self._left.pop(name)
        self._made.append(actor)
        return actor

    def _identity(self, kind: str, *arguments: Any) -> str:
        config = self._trained_as if kind == "TrainerActor" else self.config
        return actor_identity(kind, config, self.inputs, self.device, arguments[1:] if arguments else ())

    def _take_over(self) -> None:
        """Raise the epoch of every actor that an earlier command left; end those that are busy, dirty or silent."""
        if not self.run:
            return
        from miles_core.runtime.fenced import Actor

        for name in self._ray.util.list_named_actors():
            actor = Actor(name, self._ray.get_actor(name), self.epoch)
            status = self._entered(actor)
            if status is None or status.busy or status.dirty:
                actor.end()
            else:
                self._left[name] = (actor, status)
        if self._left:
            self.say(f"{len(self._left)} processes of an earlier command are taken over")

    def _entered(self, actor: Actor) -> Status | None:
        try:
            status: Status = self._ray.get(actor.enter(self.faults), timeout=_ANSWER_SECONDS)
            return status
        except (self._ray.exceptions.GetTimeoutError, self._ray.exceptions.RayError):
            return None


def reason_of(fault: Exception) -> str:
    """The line of an actor's death that says why: an error in its constructor stands at the end, others at the start."""
    lines = [line for line in str(fault).splitlines() if line.strip()]
    return lines[-1].strip() if "creation task" in lines[0] else lines[0].strip()
