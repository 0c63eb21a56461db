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
from typing import TYPE_CHECKING, Any, TypeVar

from miles_core.config import RunConfig
from miles_core.errors import InputError, StageError
from miles_core.runtime.cluster import ray_cluster

if TYPE_CHECKING:
    from miles_core.pipeline.inputs import Inputs


T = TypeVar("T")


class ProcessDied(StageError):
    """An actor's process died during a call; the actor may be replaced and the call made again."""


class Workers:
    """Engines, parsers, scorers and trainer ranks of one run."""

    def __init__(
        self, config: RunConfig, inputs: Inputs, state: Path, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.config, self.inputs, self.state, self.say = config, inputs, state, say
        self._stack = contextlib.ExitStack()
        self._connecting = threading.Lock()
        self._starting = {kind: threading.RLock() for kind in ("engines", "parsers", "scorers", "trainer")}
        self._ray: Any = None
        self.aborted = False
        self._engines: list[Any] | None = None
        self._parsers: list[Any] | None = None
        self._scorers: dict[str, list[Any]] = {}
        self._trainer: list[Any] | None = None
        self._trained_as = config

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *fault: Any) -> None:
        self._stack.close()

    @property
    def ray(self) -> Any:
        """The ray module, connected."""
        with self._connecting:
            if self._ray is None:
                self.say("starting Ray")
                self._stack.enter_context(ray_cluster(self.state))
                import ray

                self._ray = ray
            return self._ray

    def connect(self) -> None:
        """Connect to Ray now. Call it in the main thread: Ray takes over signals, which are put back there alone."""
        assert self.ray

    def abort(self) -> None:
        """End every actor, so that threads that wait for one fail at once and do not start another."""
        self.aborted = True
        scorers = [actor for group in self._scorers.values() for actor in group]
        for actor in [*(self._engines or []), *(self._parsers or []), *scorers, *(self._trainer or [])]:
            with contextlib.suppress(Exception):
                self.ray.kill(actor)

    @property
    def started(self) -> bool:
        """Whether any actor or cluster was started."""
        return self._ray is not None

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

    def engine(self, index: int) -> Any:
        """The handle of one engine."""
        return self.engines()[index]

    def engines(self) -> list[Any]:
        """All engines, started."""
        with self._starting["engines"]:
            if self._engines is None:
                self.need_devices()
                self.say("starting the engines")
                self._engines = [self._new_engine(i) for i in range(self.config.cluster.rollout_num_engines)]
            return self._engines

    def with_engine(self, index: int, work: Callable[[Any], T]) -> T:
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

    def with_engines(self, work: Callable[[Any], T]) -> list[T]:
        """Do `work` with every engine at once; results in order."""
        count = self.config.cluster.rollout_num_engines
        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(lambda index: self.with_engine(index, work), range(count)))

    def replace_engine(self, index: int, dead: Any) -> Any:
        """A new engine in the place of a dead one, unless that was done already; it holds no policy yet."""
        with self._starting["engines"]:
            engines = self.engines()
            if engines[index] is dead:
                with contextlib.suppress(Exception):
                    self.ray.kill(dead)
                engines[index] = self._new_engine(index)
            return engines[index]

    def parsers(self) -> list[Any]:
        """Processes that encode and write."""
        with self._starting["parsers"]:
            if self._parsers is None:
                kind = self._kind("ParserActor", num_cpus=0, max_restarts=-1)
                self._parsers = [kind.remote() for _ in range(self.config.rollout.rollout_parser_num_workers)]
            return self._parsers

    def scorers(self, config: RunConfig, inputs: Inputs) -> list[Any]:
        """Scorer processes for this reward configuration; a rerun's differ from the run's."""
        args = config.flat()
        key = repr((sorted(config.affecting("rewards").items()), inputs.ocr_folders, inputs.components))
        with self._starting["scorers"]:
            if key not in self._scorers:
                self.say("starting the scorers")
                count = config.reward.ocr_num_workers if "ocr" in inputs.components else 1
                kind = self._kind("RewardActor", num_cpus=0, max_restarts=2)
                self._scorers[key] = [kind.remote(f"scorer-{i}", args, inputs.ocr_folders) for i in range(count)]
            return self._scorers[key]

    def train(self, verb: str, *arguments: Any, watch: Callable[[int, int], None] | None = None) -> list[Any]:
        """Call a verb on every trainer rank, starting them first; results in rank order.

        `watch` is told now and then how many of how many forwards of an update are done.
        """
        with self._starting["trainer"]:
            if self._trainer is None:
                self._trainer = self._start_trainer()
            ranks = self._trainer
        calls = [rank.call.remote(verb, *arguments) for rank in ranks]
        try:
            deadline, seen = time.monotonic() + self.seconds, (0, 0)
            while watch is not None and self.ray.wait(calls, num_returns=len(calls), timeout=1.0)[1]:
                done = self.ray.get(ranks[0].progress.remote(), timeout=self.seconds)
                if done != seen:
                    deadline, seen = time.monotonic() + self.seconds, done
                    watch(*done)
                elif time.monotonic() > deadline:
                    break
            return self.get(calls, f"the trainer's {verb}")
        except BaseException:
            # A rank that failed half-way holds neither the old policy nor the new one.
            self.end_trainer()
            raise

    def end_trainer(self) -> None:
        """End the trainer ranks; the next call starts new ones."""
        with self._starting["trainer"]:
            for rank in self._trainer or []:
                with contextlib.suppress(Exception):
                    self.ray.kill(rank)
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
                f"{what} did not answer within {self.seconds / 60:.0f} minutes (--distributed-timeout-minutes); "
                "run the same command again to resume"
            ) from None
        except self.ray.exceptions.RayActorError as fault:
            raise ProcessDied(
                f"{what}: the process died ({reason_of(fault)}); run the same command again to resume"
            ) from None
        except self.ray.exceptions.RayTaskError as fault:
            raise fault.cause if isinstance(fault.cause, Exception) else fault from None

    def _kind(self, name: str, **options: Any) -> Any:
        if self.aborted:
            raise StageError("the command was ended; run it again to resume")
        ray = self.ray
        # Ray is configured by the environment when it is imported, and the actors' module imports it.
        from miles_core.runtime import actors

        return ray.remote(**options)(getattr(actors, name))

    def _new_engine(self, index: int) -> Any:
        device = self.device
        resources: dict[str, Any] = {"num_gpus": 1} if device == "cuda" else {"num_cpus": 0}
        kind = self._kind("EngineActor", **resources)
        return kind.options(max_concurrency=1).remote(
            f"engine-{index}", self.config, str(self.inputs.checkpoint), self.inputs.family, device
        )

    def _start_trainer(self) -> list[Any]:
        self.need_devices()
        self.say("starting the trainer")
        cluster = self.config.cluster
        world, device = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node, self.device
        resources: dict[str, Any] = {"num_gpus": 1} if device == "cuda" else {"num_cpus": 0}
        kind = self._kind("TrainerActor", concurrency_groups={"watch": 1}, **resources)
        ranks = [kind.remote() for _ in range(world)]
        host, port = self.get([ranks[0].address.remote()], "the start of the trainer")[0]
        start = [
            actor.start.remote(
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
        self.get(start, "the start of the trainer")
        return ranks


def reason_of(fault: Exception) -> str:
    """The line of an actor's death that says why: an error in its constructor stands at the end, others at the start."""
    lines = [line for line in str(fault).splitlines() if line.strip()]
    return lines[-1].strip() if "creation task" in lines[0] else lines[0].strip()
