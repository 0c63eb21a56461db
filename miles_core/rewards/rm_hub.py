"""Dispatch of samples to the built-in scorers; a scorer's failure is an error after its tries, never a number."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from miles_core.data.sample import Sample
from miles_core.errors import InputError, StageError
from miles_core.rewards.jpeg import JPEG_VERSION, jpeg_compressibility, jpeg_incompressibility
from miles_core.rewards.ocr import OcrReader, ocr_reward
from miles_core.rewards.ocr_models import OcrDirs
from miles_core.rewards.pickscore_models import PickFolders
from miles_core.rewards.quoted import quoted_target, target_fault
from miles_core.rewards.rm_types import RM_TYPES

if TYPE_CHECKING:
    from miles_core.rewards.pickscore import PickScorer

T = TypeVar("T")


@dataclass(frozen=True)
class Score:
    """A sample's score and how it came about; `seconds` of all tries together."""

    reward: float
    rm_type: str
    rm_version: str
    recognized: str | None = None
    target: str | None = None
    tries: int = 1
    seconds: float = 0.0


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
    """A reward per sample, in order; each by its metadata's rm_type, or args.rm_type.

    kwargs: `scorers`, the process's Scorers; `scores`, optionally a dict that receives each sample's Score by
    its index. A failed score is tried args.reward_max_retries times more. Raises StageError that names the
    sample.
    """
    scorers: Scorers = kwargs["scorers"]
    scores: dict[int, Score] = kwargs.get("scores", {})
    picked = [sample for sample in samples if (sample.rm_type or args.rm_type) == "pickscore"]
    size = getattr(args, "pickscore_batch_size", 8)
    for first in range(0, len(picked), size):
        batch = picked[first : first + size]
        found = await asyncio.to_thread(pick_batch, args, batch, scorers)
        scores |= {sample.index: score for sample, score in zip(batch, found, strict=True)}
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
    rm_type = sample.rm_type or args.rm_type
    if rm_type is None:
        raise StageError(f"sample {sample.index} names no rm_type and the run has none: give --rm-type")
    if rm_type not in RM_TYPES:
        raise StageError(f"sample {sample.index} has the unknown rm_type {rm_type!r}: choose {', '.join(RM_TYPES)}")
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


def with_retries(call: Callable[[], T], max_retries: int, what: str) -> tuple[T, int]:
    """(what it returned, tries). Raises StageError, with `what`, the tries and the last cause, once all tries failed."""
    tries = 0
    while True:
        tries += 1
        try:
            return call(), tries
        except Exception as fault:  # a scorer may raise anything; none of it may become a number
            if tries > max_retries:
                raise StageError(f"{what} in each of {tries} tries: {type(fault).__name__}: {fault}") from fault


def rgb_hwc_uint8(sample: Sample) -> np.ndarray:
    """(H, W, 3) uint8 of a sample's generated_output, (3, H, W) float in [0, 1]."""
    pixels = np.asarray(sample.generated_output, dtype=np.float32).transpose(1, 2, 0)
    if not np.isfinite(pixels).all():
        raise StageError(f"the image of sample {sample.index} holds values that are not finite")
    return np.round(np.clip(pixels, 0, 1) * 255).astype(np.uint8)


def rgb_frames(sample: Sample) -> list[np.ndarray]:
    """The frames of a sample as (H, W, 3) uint8: one for an image."""
    return [rgb_hwc_uint8(sample)]
