"""Microgroups to engines: least outstanding work first, failures elsewhere, dead engines replaced.

A result goes from the engine to a parser by reference; the driver sees receipts and parts.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from miles_core.data.sample import Sample
from miles_core.errors import StageError, StoreError
from miles_core.rollout.microgroup import Microgroup
from miles_core.rollout.parsing import conditioning_id
from miles_core.rollout.protocol import GenerateRequest, SyncReply
from miles_core.runtime.roster import ProcessDied, reason_of
from miles_core.runtime.workers import Workers
from miles_core.store.files import Files
from miles_core.store.parts import Part

# One request in work and one behind it: an engine never waits for the driver.
_DEPTH = 2


class ParserDied(StageError):
    """The process that was writing a microgroup died and was replaced; the microgroup is made again."""


class Dispatcher:
    """Implements rollout_function.Generator over a run's engines and parsers.

    adapter, digest, version: the policy in force. name_parts(number) gives new paths for a microgroup's number: of its
    rows and of its latents.
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
        name_parts: Callable[[int], tuple[str, str]],
        name_conditioning: Callable[[str], str],
        landed: Callable[[int, Microgroup], None],
        kept: dict[int, Microgroup],
    ) -> None:
        self.workers, self.files = workers, files
        self.adapter, self.digest, self.version, self.encoder_digest = adapter, digest, version, encoder_digest
        self.name_parts, self.name_conditioning, self.landed, self.kept = name_parts, name_conditioning, landed, kept
        self.made: dict[int, Microgroup] = {}
        self.conditioning: dict[str, Part] = {}
        self.outstanding = [0] * workers.config.cluster.rollout_num_engines
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
        # Ray is configured by the environment when it is imported, and the actors' module imports it.
        from miles_core.runtime.actors import WrongPolicy

        failures: list[str] = []
        tried: set[int] = set()
        while True:
            index = await self._acquire(tried)
            engine = self.workers.engine(index)
            try:
                made = await self._attempt(engine, number, request, microgroup, identity)
                self._land(number, made)
                return
            except ParserDied as fault:
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

    async def _attempt(
        self, engine: Any, number: int, request: GenerateRequest, microgroup: list[Sample], identity: str
    ) -> Microgroup:
        result, receipt = engine.call("generate", request, self.digest, returns=2)
        await asyncio.wait_for(_wait(receipt), self.workers.seconds)
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
        index = number % self.workers.config.rollout.rollout_parser_num_workers
        while True:
            parser = self.workers.parsers()[index]
            call = self._told(parser, number, result, request, group, identity, describe=describe)
            try:
                written: tuple[Microgroup, Any] = await asyncio.wait_for(_wait(call), self.workers.seconds)
                return written
            except (self.workers.ray.exceptions.RayActorError, TimeoutError) as fault:
                await asyncio.to_thread(self.workers.replace_parser, index, parser)
                silent = f"no answer within {self.workers.seconds / 60:g} minutes"
                why = silent if isinstance(fault, TimeoutError) else f"its process died: {reason_of(fault)}"
                raise ParserDied(f"parser-{index}: {why}") from None
            except self.workers.ray.exceptions.RayTaskError as fault:
                if not isinstance(fault.cause, FileExistsError):
                    raise

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

    def _land(self, number: int, made: Microgroup) -> None:
        self.made[number] = made
        self.landed(number, made)


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
