"""The actors of a command: made by name, taken over from an earlier command, asked, ended.

The actors of a run that is trained are named and outlive a command that is killed; the next one takes over those that
are idle, clean and made from the same things, and ends the others before it looks at anything they may have written.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from miles_core.config import RunConfig
from miles_core.errors import StageError
from miles_core.runtime.cluster import ray_cluster
from miles_core.runtime.heads import end_left_heads
from miles_core.runtime.identity import actor_identity

if TYPE_CHECKING:
    from miles_core.pipeline.inputs import Inputs
    from miles_core.runtime.fenced import Actor, Status

ANSWER_SECONDS = 10.0


class ProcessDied(StageError):
    """An actor's process died during a call; the actor may be replaced and the call made again."""


class Roster:
    """See Workers for the arguments."""

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        state: Path,
        say: Callable[[str], None],
        *,
        run: str,
        epoch: int,
        faults: dict[str, str] | None,
        fence: Callable[[], None],
    ) -> None:
        self.config, self.inputs, self.state, self.say = config, inputs, state, say
        self.run, self.epoch, self.faults, self.fence = run, epoch, faults or {}, fence
        self.aborted = False
        self._stack = contextlib.ExitStack()
        self._connecting = threading.RLock()
        self._ray: Any = None
        self._head_lives: Callable[[], bool] = lambda: True
        self._left: dict[str, tuple[Actor, Status]] = {}
        self._made: list[Actor] = []

    def __enter__(self) -> Self:
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
        actors = [*self._made, *(actor for actor, _ in self._left.values())]
        if self.run and os.environ.get("RAY_ADDRESS"):
            self._end_unless_taken_over(actors)
            return
        for actor in actors:
            with contextlib.suppress(Exception):
                self._ray.kill(actor.handle)

    def _end_unless_taken_over(self, actors: list[Actor]) -> None:
        """On a cluster that others use a newer command may have these very actors: each decides by its epoch, and one
        that does not answer is ended while the lock is still ours."""
        calls = {actor.handle.end.remote(actor.epoch): actor for actor in actors}
        _, silent = self._ray.wait(list(calls), num_returns=len(calls), timeout=5.0) if calls else ([], [])
        for call in silent:
            with contextlib.suppress(Exception):
                self.fence()
                self._ray.kill(calls[call].handle)

    @property
    def device(self) -> str:
        """cpu or cuda."""
        chosen = self.config.cluster.device
        if chosen != "auto":
            return chosen
        return "cuda" if self.ray.cluster_resources().get("GPU", 0) else "cpu"

    @property
    def seconds(self) -> float:
        """Limit of one actor call."""
        return 60.0 * self.config.cluster.distributed_timeout_minutes

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

    def ask(self, references: list[Any]) -> list[Any] | None:
        """Answers to questions that take no time; None where one does not answer at once."""
        try:
            answers: list[Any] = self.ray.get(references, timeout=ANSWER_SECONDS)
            return answers
        except (self.ray.exceptions.GetTimeoutError, self.ray.exceptions.RayActorError):
            return None

    def actor(
        self, kind: str, name: str, config: RunConfig, *arguments: Any, fresh: bool = False, gpus: float = 0.0
    ) -> Actor:
        """An actor of that name: the one that an earlier command left where it fits, else a new one."""
        if self.aborted:
            raise StageError("the command was ended; run it again to resume")
        ray = self.ray
        # Ray is configured by the environment when it is imported, and the actors' modules import it.
        from miles_core.runtime import actors
        from miles_core.runtime.fenced import Actor, Terms

        identity = self.identity(kind, config)
        if self.left(name, identity) and not fresh:
            return self.take(name)
        if self.left(name):
            self._left.pop(name)[0].end()
        options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": {"watch": 1}}
        if kind in ("EngineActor", "TrainerActor") and self.device == "cuda":
            gpus = 1.0
        if gpus:
            options["num_gpus"] = gpus
        if self.run:
            options |= {"name": name, "lifetime": "detached"}
        idle = 60.0 * self.config.cluster.actor_idle_minutes if self.run else 0.0
        terms = Terms(name, self.epoch, identity, idle, self.faults)
        try:
            handle = ray.remote(**options)(getattr(actors, kind)).remote(terms, *arguments)
        except ValueError as fault:
            raise StageError(f"{name} could not be started: {fault}; run the same command again to resume") from fault
        actor = Actor(name, handle, self.epoch)
        self._made.append(actor)
        return actor

    def end(self, actor: Actor) -> None:
        """End an actor of this command."""
        actor.end()
        with contextlib.suppress(ValueError):
            self._made.remove(actor)

    def take(self, name: str) -> Actor:
        """The actor of that name that an earlier command left."""
        actor, _ = self._left.pop(name)
        self._made.append(actor)
        return actor

    def left(self, name: str, identity: str | None = None) -> bool:
        """Whether an earlier command left an actor of this name, made from the same things where they are given."""
        found = self._left.get(name)
        return found is not None and identity in (None, found[1].identity)

    def identity(self, kind: str, config: RunConfig) -> str:
        """What an actor of this kind would be made from."""
        return actor_identity(kind, config, self.inputs, self.device)

    def expected(self) -> dict[str, str]:
        """The actors this command may need: names, and what each would be made from."""
        return {}

    def _take_over(self) -> None:
        """Raise the epoch of every actor that an earlier command left; end those that are busy, dirty, silent or of no
        use. Raises LockLost where a newer command has them."""
        if not self.run:
            return
        from miles_core.runtime.fenced import Actor

        self.fence()
        expected = self.expected()
        for name in self._ray.util.list_named_actors():
            # It may have ended since it was listed.
            with contextlib.suppress(ValueError):
                actor = Actor(name, self._ray.get_actor(name), self.epoch)
                status = self._entered(actor)
                if status is None or status.busy or status.dirty or status.identity != expected.get(name):
                    actor.end()
                else:
                    self._left[name] = (actor, status)
        if self._left:
            self.say(f"{len(self._left)} processes of an earlier command are taken over")

    def _entered(self, actor: Actor) -> Status | None:
        from miles_core.runtime.fenced import StaleEpoch

        try:
            status: Status = self._ray.get(actor.enter(self.faults), timeout=ANSWER_SECONDS)
            return status
        except self._ray.exceptions.RayTaskError as fault:
            if isinstance(fault.cause, StaleEpoch):
                self.fence()
                # The lock is ours: the run was removed and begun anew, and this is what the old one left.
                self._ray.kill(actor.handle)
            return None
        except (self._ray.exceptions.GetTimeoutError, self._ray.exceptions.RayError):
            return None


def reason_of(fault: Exception) -> str:
    """The line of an actor's death that says why: an error in its constructor stands at the end, others at the start."""
    lines = [line for line in str(fault).splitlines() if line.strip()]
    return lines[-1].strip() if "creation task" in lines[0] else lines[0].strip()
