"""Dispatch of samples to the built-in scorers; a scorer's failure is an error after its tries, never a number."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_core.data.sample import Sample
from miles_core.errors import InputError, StageError
from miles_core.rewards.jpeg import JPEG_VERSION, jpeg_compressibility, jpeg_incompressibility
from miles_core.rewards.ocr import OcrReader, ocr_reward
from miles_core.rewards.ocr_models import OcrDirs
from miles_core.rewards.pickscore_models import PickFolders
from miles_core.rewards.quoted import quoted_target, target_fault
from miles_core.rewards.remote import REMOTE, RemoteReward
from miles_core.rewards.rm_types import RM_TYPES
from miles_core.rewards.scores import Score, rgb_hwc_uint8, with_retries
from miles_core.rewards.several import alone, together, weights_of

if TYPE_CHECKING:
    from miles_core.rewards.pickscore import PickScorer


class Scorers:
    """The built-in scorers of a process. OCR and PickScore are loaded at their first use, or by `warm_up`. device: of
    PickScore."""

    def __init__(
        self,
        ocr_dirs: OcrDirs | None = None,
        ocr_min_confidence: float = 0.5,
        pickscore: PickFolders | None = None,
        device: str = "cpu",
    ) -> None:
        self.ocr_dirs = ocr_dirs
        self.ocr_min_confidence = ocr_min_confidence
        self.pickscore, self.device = pickscore, device
        self._reader: OcrReader | None = None
        self._picker: PickScorer | None = None
        self._remote: RemoteReward | None = None

    def warm_up(self) -> None:
        """Load what is given: OCR, which then reads one blank image, and PickScore."""
        if self.pickscore is not None:
            self.load_pickscore()
        if self.ocr_dirs is not None:
            self.load_ocr().read(np.full((64, 128, 3), 255, np.uint8))

    def load_ocr(self) -> OcrReader:
        """The process's reader, made once. Raises StageError where its models are not given or cannot be loaded."""
        if self._reader is None:
            if self.ocr_dirs is None:
                raise StageError("this worker was started without OCR models and a sample has rm_type ocr")
            try:
                self._reader = OcrReader(*self.ocr_dirs, self.ocr_min_confidence)
            except InputError:
                raise
            except Exception as fault:
                raise StageError(
                    f"the OCR models in {' and '.join(self.ocr_dirs)} cannot be loaded: {fault}"
                ) from fault
        return self._reader

    def load_pickscore(self) -> PickScorer:
        """The process's PickScore, made once. Raises StageError where its folders are not given or cannot be loaded."""
        if self._picker is None:
            if self.pickscore is None:
                raise StageError("this worker was started without PickScore and a sample has rm_type pickscore")
            from miles_core.rewards.pickscore import PickScorer

            self._picker = PickScorer(self.pickscore, self.device)
        return self._picker

    def remote(self, args: Any) -> RemoteReward:
        """The process's way to the reward service, made once. Raises InputError where args.rm_url is none."""
        if self._remote is None:
            self._remote = RemoteReward(args)
        return self._remote

    def pick_scores(self, images: Sequence[np.ndarray], prompts: Sequence[str]) -> list[Score]:
        """PickScores of (H, W, 3) uint8 images, each with its own prompt, as one batch."""
        picker = self.load_pickscore()
        return [Score(value, "pickscore", picker.version) for value in picker.scores(images, prompts)]

    def score(self, rm_type: str, image: np.ndarray, prompt: str) -> Score:
        """Score of an (H, W, 3) uint8 RGB image; whatever the scorer raises is passed on."""
        if rm_type == "pickscore":
            return self.pick_scores([image], [prompt])[0]
        if rm_type == "ocr":
            target = quoted_target(prompt) or ""
            reader = self.load_ocr()
            recognized = reader.read(image)
            return Score(ocr_reward(recognized, target), rm_type, reader.version, recognized, target)
        if rm_type == "jpeg_compressibility":
            return Score(jpeg_compressibility(image), rm_type, JPEG_VERSION)
        if rm_type == "jpeg_incompressibility":
            return Score(jpeg_incompressibility(image), rm_type, JPEG_VERSION)
        raise ValueError(f"unknown rm_type {rm_type!r}: choose {', '.join(RM_TYPES)}")


async def batched_async_rm(args: Any, samples: list[Sample], **kwargs: Any) -> list[float]:
    """A reward per sample, in order; each by its metadata's rm_type, or args.rm_type, or the weighted sum of args.rm_types
    whatever its metadata says.

    kwargs: `scorers`, the process's Scorers; `scores`, optionally a dict that receives each sample's Score by
    its index. A failed score is tried args.reward_max_retries times more. Raises StageError that names the
    sample.
    """
    scorers: Scorers = kwargs["scorers"]
    scores: dict[int, Score] = kwargs.get("scores", {})
    if weights := weights_of(args):
        each: dict[str, dict[int, Score]] = {name: {} for name in weights}
        bare = [replace(sample, metadata=sample.metadata | {"rm_type": None}) for sample in samples]
        for name, some in each.items():
            await batched_async_rm(alone(args, name), bare, scorers=scorers, scores=some)
        for sample in samples:
            scores[sample.index] = together({name: some[sample.index] for name, some in each.items()}, weights)
        return [scores[sample.index].reward for sample in samples]
    picked = [sample for sample in samples if (sample.rm_type or args.rm_type) == "pickscore"]
    size = getattr(args, "pickscore_batch_size", 8)
    for first in range(0, len(picked), size):
        batch = picked[first : first + size]
        found = await asyncio.to_thread(pick_batch, args, batch, scorers)
        scores |= {sample.index: score for sample, score in zip(batch, found, strict=True)}
    if sent := [sample for sample in samples if (sample.rm_type or args.rm_type) == REMOTE]:
        found = await asyncio.to_thread(scorers.remote(args).scores, sent)
        scores |= {sample.index: score for sample, score in zip(sent, found, strict=True)}
    for sample in samples:
        if sample.index not in scores:
            scores[sample.index] = await asyncio.to_thread(score_sample, args, sample, scorers)
    return [scores[sample.index].reward for sample in samples]


def pick_batch(args: Any, samples: list[Sample], scorers: Scorers) -> list[Score]:
    """PickScores of a batch. Raises StageError that names the samples, tries and cause."""
    scorers.load_pickscore()
    images, prompts = [rgb_hwc_uint8(sample) for sample in samples], [sample.prompt for sample in samples]
    started = time.perf_counter()
    scores, tries = with_retries(
        lambda: scorers.pick_scores(images, prompts),
        args.reward_max_retries,
        f"rm_type pickscore failed on samples {samples[0].index} to {samples[-1].index}",
    )
    seconds = (time.perf_counter() - started) / len(samples)
    return [replace(score, tries=tries, seconds=seconds) for score in scores]


def score_sample(args: Any, sample: Sample, scorers: Scorers) -> Score:
    """One sample's Score. Raises StageError that names sample, rm_type, tries and cause."""
    if weights := weights_of(args):
        bare = replace(sample, metadata=sample.metadata | {"rm_type": None})
        return together({name: score_sample(alone(args, name), bare, scorers) for name in weights}, weights)
    rm_type = sample.rm_type or args.rm_type
    if rm_type is None:
        raise StageError(f"sample {sample.index} names no rm_type and the run has none: give --rm-type")
    if rm_type not in RM_TYPES:
        raise StageError(f"sample {sample.index} has the unknown rm_type {rm_type!r}: choose {', '.join(RM_TYPES)}")
    if rm_type == REMOTE:
        return scorers.remote(args).scores([sample])[0]
    if rm_type == "ocr":
        if fault := target_fault(sample.prompt):
            raise StageError(f"the prompt of sample {sample.index} {fault}")
        scorers.load_ocr()
    image = rgb_hwc_uint8(sample)
    started = time.perf_counter()
    score, tries = with_retries(
        lambda: scorers.score(rm_type, image, sample.prompt),
        args.reward_max_retries,
        f"rm_type {rm_type} failed on sample {sample.index}",
    )
    return Score(
        score.reward, rm_type, score.rm_version, score.recognized, score.target, tries, time.perf_counter() - started
    )
