"""Microgroups to engines: least outstanding work first, failures elsewhere, dead engines replaced.

A result goes from the engine to a parser by reference; the driver sees receipts and parts.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from miles_core.data.sample import Sample
from miles_core.errors import StageError, StoreError
from miles_core.rollout.microgroup import Microgroup, conditioning_id
from miles_core.rollout.protocol import GenerateRequest, SyncReply
from miles_core.runtime.roster import ProcessDied, reason_of
from miles_core.runtime.workers import Workers
from miles_core.store.files import Files
from miles_core.store.parts import Part

# One request in work and one behind it: an engine never waits for the driver.
_DEPTH = 2
Made = TypeVar("Made")


class HelperDied(StageError):
    """The process that was writing or scoring a microgroup died and was replaced; the microgroup is made again."""


class EngineDispatch(Generic[Made], ABC):
    """Implements rollout_function.Generator over a run's engines; `_store` says what becomes of what they make.

    adapter, digest, version: the policy in force. kept: what an earlier command left, by a microgroup's number.
    """

    def __init__(
        self,
        workers: Workers,
        files: Files,
        *,
        adapter: Part,
        digest: str,
        version: int,
        landed: Callable[[int, Made], None],
        kept: dict[int, Made],
    ) -> None:
        self.workers, self.files = workers, files
        self.adapter, self.digest, self.version = adapter, digest, version
        self.landed, self.kept = landed, kept
        self.made: dict[int, Made] = {}
        self.outstanding = [0] * workers.config.cluster.rollout_num_engines
        self._room = asyncio.Condition()
        self._reviving = asyncio.Lock()

    @abstractmethod
    def _number(self, microgroup: list[Sample]) -> int:
        """The microgroup's number: what names its files, in sample order."""

    def _undescribed(self, request: GenerateRequest) -> bool:
        """Whether the request's conditioning is still to be written."""
        return False

    @abstractmethod
    async def _store(self, number: int, result: Any, request: GenerateRequest, microgroup: list[Sample]) -> Made:
        """Have an engine's result (a reference) written. Raises HelperDied where that has to be made again."""

    def load_policy(self) -> None:
        """Give every engine that holds another policy the one in force."""
        self.workers.with_engines(lambda engine: hold(self.workers, engine, self.files, self.adapter, self.digest))

    async def generate(self, request: GenerateRequest, microgroup: list[Sample]) -> None:
        """Make, parse and write one microgroup, or find it kept. Raises StageError after the last try."""
        number = self._number(microgroup)
        if number in self.kept:
            self._land(number, self.kept[number])
            return
        # Ray is configured by the environment when it is imported, and the actors' module imports it.
        from miles_core.runtime.actors import WrongPolicy

        failures: list[str] = []
        tried: set[int] = set()
        while True:
            index = await self._acquire(tried)
            engine = self.workers.engine(index)
            try:
                made = await self._attempt(engine, number, request, microgroup)
                self._land(number, made)
                return
            except HelperDied as fault:
                failures.append(str(fault))
            except self.workers.ray.exceptions.RayActorError as fault:
                failures.append(f"engine-{index}: its process died ({reason_of(fault)})")
                await self._revive(index, engine)
            except self.workers.ray.exceptions.RayTaskError as fault:
                if isinstance(fault.cause, StoreError):
                    raise fault.cause from None
                if isinstance(fault.cause, WrongPolicy):
                    # It was replaced a moment ago, or by another's hand.
                    await self._give_policy(index, engine)
                    continue
                failures.append(f"engine-{index}: {fault.cause or fault}")
            except TimeoutError:
                failures.append(f"engine-{index}: no answer within {self.workers.seconds / 60:.0f} minutes")
                await self._revive(index, engine)
            finally:
                await self._release(index)
            tried.add(index)
            if len(failures) > self.workers.config.rollout.rollout_max_retries:
                samples = f"{microgroup[0].index}..{microgroup[-1].index}"
                raise StageError(
                    f"samples {samples} (prompt {request.prompt!r}) could not be generated: {'; '.join(failures)}; "
                    "run the same command again to resume"
                )

    async def _attempt(self, engine: Any, number: int, request: GenerateRequest, microgroup: list[Sample]) -> Made:
        describe = self._undescribed(request)
        result, receipt = engine.call("generate", request, self.digest, describe, returns=2)
        await asyncio.wait_for(_wait(receipt), self.workers.seconds)
        return await self._store(number, result, request, microgroup)

    async def _parsed(self, number: int, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """What comes of `call` of a parser, which is made again where another writer has taken a name.

        Raises HelperDied where the parser is gone or silent: it is replaced.
        """
        index = number % self.workers.config.rollout.rollout_parser_num_workers
        while True:
            parser = self.workers.parsers()[index]
            try:
                return await asyncio.wait_for(_wait(call(parser)), self.workers.seconds)
            except (self.workers.ray.exceptions.RayActorError, TimeoutError) as fault:
                await asyncio.to_thread(self.workers.replace_parser, index, parser)
                raise self._gone(f"parser-{index}", fault) from None
            except self.workers.ray.exceptions.RayTaskError as fault:
                if not isinstance(fault.cause, FileExistsError):
                    raise

    def _gone(self, name: str, fault: Exception) -> HelperDied:
        silent = f"no answer within {self.workers.seconds / 60:g} minutes"
        return HelperDied(
            f"{name}: {silent if isinstance(fault, TimeoutError) else f'its process died: {reason_of(fault)}'}"
        )

    async def _acquire(self, tried: set[int]) -> int:
        async with self._room:
            while True:
                fresh = [i for i in range(len(self.outstanding)) if i not in tried] or range(len(self.outstanding))
                index = min(fresh, key=lambda i: self.outstanding[i])
                if self.outstanding[index] < _DEPTH:
                    self.outstanding[index] += 1
                    return index
                await self._room.wait()

    async def _release(self, index: int) -> None:
        async with self._room:
            self.outstanding[index] -= 1
            self._room.notify_all()

    async def _revive(self, index: int, dead: Any) -> None:
        """Replace a dead engine and give it the policy in force before it serves; once for all who met it."""
        async with self._reviving:
            if self.workers.engine(index) is dead:
                await asyncio.to_thread(self._replace, index, dead)

    async def _give_policy(self, index: int, engine: Any) -> None:
        try:
            async with self._reviving:
                await asyncio.to_thread(hold, self.workers, engine, self.files, self.adapter, self.digest)
        except ProcessDied:
            await self._revive(index, engine)

    def _replace(self, index: int, dead: Any) -> None:
        self.workers.replace_engine(index, dead)
        self.workers.with_engine(index, lambda e: hold(self.workers, e, self.files, self.adapter, self.digest))

    def _land(self, number: int, made: Made) -> None:
        self.made[number] = made
        self.landed(number, made)


class Dispatcher(EngineDispatch[Microgroup]):
    """The dispatch of a rollout: parsers write rows, latents, and each conditioning once.

    name_parts(number) gives new paths for a microgroup's number: of its rows and of its latents.
    """

    def __init__(
        self,
        workers: Workers,
        files: Files,
        *,
        encoder_digest: str,
        name_parts: Callable[[int], tuple[str, str]],
        name_conditioning: Callable[[str], str],
        **policy_and_parts: Any,
    ) -> None:
        super().__init__(workers, files, **policy_and_parts)
        self.encoder_digest, self.name_parts, self.name_conditioning = encoder_digest, name_parts, name_conditioning
        self.conditioning: dict[str, Part] = {}
        self._describing: dict[str, asyncio.Lock] = {}

    def _number(self, microgroup: list[Sample]) -> int:
        return microgroup[0].index // self.workers.config.rollout.rollout_microgroup_size

    def _identity(self, request: GenerateRequest) -> str:
        dtype = self.workers.config.training.diffusion_forward_dtype
        return conditioning_id(request.prompt, request.negative_prompt, self.encoder_digest, dtype)

    def _undescribed(self, request: GenerateRequest) -> bool:
        return self._identity(request) not in self.conditioning

    async def _store(self, number: int, result: Any, request: GenerateRequest, microgroup: list[Sample]) -> Microgroup:
        identity = self._identity(request)
        lock = self._describing.setdefault(identity, asyncio.Lock())
        async with lock:
            if identity not in self.conditioning:
                made, self.conditioning[identity] = await self._write(
                    number, result, request, microgroup, identity, describe=True
                )
                return made
        made, _ = await self._write(number, result, request, microgroup, identity, describe=False)
        return made

    async def _write(
        self, number: int, result: Any, request: GenerateRequest, group: list[Sample], identity: str, *, describe: bool
    ) -> tuple[Microgroup, Any]:
        """Have a parser write a microgroup, under the next name where another writer has taken one."""
        written: tuple[Microgroup, Any] = await self._parsed(
            number, lambda parser: self._told(parser, number, result, request, group, identity, describe=describe)
        )
        return written

    def _told(
        self,
        parser: Any,
        number: int,
        result: Any,
        request: GenerateRequest,
        group: list[Sample],
        identity: str,
        *,
        describe: bool,
    ) -> Any:
        steps = request.sde_step_indices
        data_path, latents_path = self.name_parts(number)
        return parser.call(
            "write",
            self.files,
            result,
            request=request,
            data_path=data_path,
            latents_path=latents_path,
            conditioning_path=self.name_conditioning(identity) if describe else None,
            samples=[{"sample_index": s.index, "group_index": s.group_index} for s in group],
            sde_steps=tuple(range(request.num_inference_steps)) if steps is None else steps,
            policy_digest=self.digest,
            policy_version=self.version,
            conditioning_id=identity,
        )


def hold(workers: Workers, engine: Any, files: Files, adapter: Part, digest: str) -> None:
    """See to it that an engine holds this policy: pushed from the store where it reports another."""
    held = workers.get([engine.call("checksum")], "an engine's checksum")[0]
    if held != digest:
        push(workers, engine, files, adapter, digest)


def push(workers: Workers, engine: Any, files: Files, adapter: Part, digest: str) -> SyncReply:
    """Push a policy to an engine. Raises StageError where it then reports another digest, or bound no module."""
    reply: SyncReply = workers.get([engine.call("load_policy", files, adapter)], "the policy push")[0]
    if reply.policy_digest != digest or reply.modules_bound == 0:
        raise StageError(
            f"{reply.engine} reports policy {reply.policy_digest[:12]} on {reply.modules_bound} modules after the push of "
            f"{digest[:12]}: the adapter did not arrive"
        )
    return reply


async def _wait(reference: Any) -> Any:
    return await reference
