"""Microgroups to engines: least outstanding work first, failures elsewhere, dead engines replaced.

A result goes from the engine to a parser by reference; the driver sees receipts and parts.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from miles_core.data.sample import Sample
from miles_core.errors import StageError, StoreError
from miles_core.rollout.parsing import conditioning_id
from miles_core.rollout.protocol import GenerateRequest, SyncReply
from miles_core.runtime.workers import Workers, reason_of
from miles_core.store.files import Files
from miles_core.store.parts import Part

# One request in work and one behind it: an engine never waits for the driver.
_DEPTH = 2


class ParserDied(StageError):
    """The process that was writing a microgroup died; Ray starts it again, and the microgroup is made again."""


class Dispatcher:
    """Implements rollout_function.Generator over a run's engines and parsers.

    adapter, digest, version: the policy in force. names(number) gives a new part's path for a microgroup's number.
    """

    def __init__(
        self,
        workers: Workers,
        files: Files,
        *,
        adapter: Part,
        digest: str,
        version: int,
        encoder_digest: str,
        name_part: Callable[[int], str],
        name_conditioning: Callable[[str], str],
        landed: Callable[[int, Part], None],
        kept: dict[int, Part],
    ) -> None:
        self.workers, self.files = workers, files
        self.adapter, self.digest, self.version, self.encoder_digest = adapter, digest, version, encoder_digest
        self.name_part, self.name_conditioning, self.landed, self.kept = name_part, name_conditioning, landed, kept
        self.parts: dict[int, Part] = {}
        self.conditioning: dict[str, Part] = {}
        self.outstanding = [0] * workers.config.cluster.rollout_num_engines
        self.parsing = [0] * workers.config.rollout.rollout_parser_num_workers
        self._room = asyncio.Condition()
        self._reviving = asyncio.Lock()
        self._describing: dict[str, asyncio.Lock] = {}
        self._size = workers.config.rollout.rollout_microgroup_size

    def load_policy(self) -> None:
        """Give every engine that holds another policy the one in force."""
        self.workers.with_engines(lambda engine: hold(self.workers, engine, self.files, self.adapter, self.digest))

    async def generate(self, request: GenerateRequest, microgroup: list[Sample]) -> None:
        """Make, parse and write one microgroup, or find it kept. Raises StageError after the last try."""
        number = microgroup[0].index // self._size
        identity = conditioning_id(
            request.prompt,
            request.negative_prompt,
            self.encoder_digest,
            self.workers.config.training.diffusion_forward_dtype,
        )
        if number in self.kept:
            self._land(number, self.kept[number])
            return
        failures: list[str] = []
        tried: set[int] = set()
        while True:
            index = await self._acquire(tried)
            engine = self.workers.engine(index)
            try:
                part = await self._attempt(engine, number, request, microgroup, identity)
                self._land(number, part)
                return
            except ParserDied as fault:
                failures.append(str(fault))
            except self.workers.ray.exceptions.RayActorError as fault:
                failures.append(f"engine-{index}: its process died ({reason_of(fault)})")
                await self._revive(index, engine)
            except self.workers.ray.exceptions.RayTaskError as fault:
                if isinstance(fault.cause, StoreError):
                    raise fault.cause from None
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

    async def _attempt(
        self, engine: Any, number: int, request: GenerateRequest, microgroup: list[Sample], identity: str
    ) -> Part:
        result, receipt = engine.generate.options(num_returns=2).remote(request)
        await asyncio.wait_for(_wait(receipt), self.workers.seconds)
        lock = self._describing.setdefault(identity, asyncio.Lock())
        async with lock:
            described = identity in self.conditioning
            call = self._write(number, result, request, microgroup, identity, not described)
            if not described:
                part, self.conditioning[identity] = await self._parsed(call)
                return part
        part, _ = await self._parsed(call)
        return part

    async def _parsed(self, call: Any) -> tuple[Part, Any]:
        try:
            written: tuple[Part, Any] = await asyncio.wait_for(_wait(call), self.workers.seconds)
        except self.workers.ray.exceptions.RayActorError as fault:
            raise ParserDied(f"the parser's process died ({reason_of(fault)})") from None
        return written

    def _write(
        self, number: int, result: Any, request: GenerateRequest, group: list[Sample], identity: str, describe: bool
    ) -> Any:
        parser = number % len(self.parsing)
        steps = request.sde_step_indices
        return self.workers.parsers()[parser].write.remote(
            self.files,
            result,
            request=request,
            data_path=self.name_part(number),
            conditioning_path=self.name_conditioning(identity) if describe else None,
            samples=[{"sample_index": s.index, "group_index": s.group_index} for s in group],
            sde_steps=tuple(range(request.num_inference_steps)) if steps is None else steps,
            policy_digest=self.digest,
            policy_version=self.version,
            conditioning_id=identity,
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

    def _replace(self, index: int, dead: Any) -> None:
        self.workers.replace_engine(index, dead)
        self.workers.with_engine(index, lambda e: hold(self.workers, e, self.files, self.adapter, self.digest))

    def _land(self, number: int, part: Part) -> None:
        self.parts[number] = part
        self.landed(number, part)


def hold(workers: Workers, engine: Any, files: Files, adapter: Part, digest: str) -> None:
    """See to it that an engine holds this policy: pushed from the store where it reports another."""
    held = workers.get([engine.checksum.remote()], "an engine's checksum")[0]
    if held != digest:
        push(workers, engine, files, adapter, digest)


def push(workers: Workers, engine: Any, files: Files, adapter: Part, digest: str) -> SyncReply:
    """Push a policy to an engine. Raises StageError where it then reports another digest, or bound no module."""
    reply: SyncReply = workers.get([engine.load_policy.remote(files, adapter)], "the policy push")[0]
    if reply.policy_digest != digest or reply.modules_bound == 0:
        raise StageError(
            f"{reply.engine} reports policy {reply.policy_digest[:12]} on {reply.modules_bound} modules after the push of "
            f"{digest[:12]}: the adapter did not arrive"
        )
    return reply


async def _wait(reference: Any) -> Any:
    return await reference
