"""The dispatch of an evaluation: engine → parser → scorer → one part a microgroup, nothing in between in the store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.rollout.dispatch import EngineDispatch
from miles_core.rollout.protocol import GenerateRequest
from miles_core.runtime.workers import Workers
from miles_core.store.files import Files
from miles_core.store.parts import Part

if TYPE_CHECKING:
    from miles_core.pipeline.inputs import EvalSet


class EvaluationDispatch(EngineDispatch[Part]):
    """evaluated: the sets of the samples. name_part(number) gives a new path for a microgroup's number, which is that of
    its first sample. A scorer that dies or is silent is replaced, and what was made is scored again by the next one,
    `reward_max_retries` times, as in training."""

    def __init__(
        self,
        workers: Workers,
        files: Files,
        *,
        evaluated: EvalSet,
        name_part: Callable[[int], str],
        **policy_and_parts: Any,
    ) -> None:
        super().__init__(workers, files, **policy_and_parts)
        self.evaluated, self.name_part = evaluated, name_part

    def _number(self, microgroup: list[Sample]) -> int:
        return microgroup[0].index

    async def _store(self, number: int, result: Any, request: GenerateRequest, microgroup: list[Sample]) -> Part:
        async def encode(parser: Any) -> Any:
            made, rows = parser.call(
                "encode",
                result,
                request=request,
                eval_set=self.evaluated.set_of(microgroup[0].group_index),
                prompt_index=microgroup[0].group_index,
                sample_indices=[sample.index for sample in microgroup],
                policy_digest=self.digest,
                policy_version=self.version,
                returns=2,
            )
            await rows
            return made

        made = await self._parsed(number, encode)
        return await self._scored(number, made, microgroup)

    async def _scored(self, number: int, made: Any, microgroup: list[Sample]) -> Part:
        ray, workers = self.workers.ray, self.workers
        scorers = await asyncio.to_thread(workers.scorers, workers.config, self.evaluated)
        metadata = {sample.index: sample.metadata for sample in microgroup}
        tries = 0
        while True:
            index = (number + tries) % len(scorers)
            scorer, path = scorers[index], self.name_part(number)
            try:
                call = scorer.call(
                    "score_evaluation", self.files, made, path, list(self.evaluated.components), metadata
                )
                part: Part = await asyncio.wait_for(_wait(call), workers.seconds)
                return part
            except (ray.exceptions.RayActorError, TimeoutError) as fault:
                gone = self._gone(scorer.name, fault)
                if workers.aborted or tries >= workers.config.reward.reward_max_retries:
                    raise StageError(
                        f"{path} could not be scored after {tries} retries ({gone}); run the same command again to resume"
                    ) from None
                await asyncio.to_thread(workers.replace_scorer, scorers, index, scorer, workers.config, self.evaluated)
                tries += 1
            except ray.exceptions.RayTaskError as fault:
                if isinstance(fault.cause, FileExistsError):
                    continue
                raise fault.cause if isinstance(fault.cause, Exception) else fault from None


async def _wait(reference: Any) -> Any:
    return await reference
