"""The reward worker: reads a rollout part, scores its samples, writes one rewards part."""

import asyncio
import io
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from PIL import Image

from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.rewards.custom import CustomReward
from miles_core.rewards.ocr_models import OcrDirs
from miles_core.rewards.pickscore_models import PickFolders
from miles_core.rewards.rm_hub import Scorers, batched_async_rm
from miles_core.rewards.scores import Score
from miles_core.store.digest import ROW_DIGEST
from miles_core.store.files import Files
from miles_core.store.parts import Part, read_table, write_table
from miles_core.store.schemas import evaluation_schema, rewards_schema

ROLLOUT_COLUMNS = ["sample_index", "group_index", "prompt", "seed", "image", ROW_DIGEST]


class RewardWorker:
    """Scores in a process of its own, with or without Ray.

    args: the run's flat configuration (rm_type, custom_rm_path, reward_max_retries, ocr_min_confidence), and code_path.
    ocr_dirs: the OCR models, None where no sample of the run is scored by OCR. name: stands in the `worker` column.
    pickscore: its folders, likewise; device: cpu or cuda, of PickScore.
    """

    def __init__(
        self,
        args: Mapping[str, Any],
        ocr_dirs: tuple[str, str] | None = None,
        name: str = "reward",
        pickscore: PickFolders | None = None,
        device: str = "cpu",
    ) -> None:
        self.args = SimpleNamespace(**args)
        self.name = name
        ocr = OcrDirs(*ocr_dirs) if ocr_dirs else None
        self.scorers = Scorers(ocr, self.args.ocr_min_confidence, pickscore, device)
        self.custom = CustomReward(self.args) if getattr(self.args, "custom_rm_path", None) else None

    def warm_up(self) -> None:
        """Load what scoring needs, so that the first part does not wait for it."""
        self.scorers.warm_up()

    def score(
        self,
        files: Files,
        rollout_part: Part,
        out_path: str,
        components: list[str],
        metadata: Mapping[int, Mapping[str, Any] | None],
    ) -> Part:
        """Score a rollout part's rows, in order, and write them as one rewards part at `out_path`.

        components: the scorers of the run, one column each. metadata: sample_index -> the metadata of its prompt, or
        None, for every sample of the part. Raises StageError that names the sample, and
        writes nothing, where a sample cannot be scored; DamagedError where the rollout part is damaged;
        FileExistsError where `out_path` is taken.
        """
        rows = read_table(files, rollout_part, ROLLOUT_COLUMNS).to_pylist()
        columns = {
            "sample_index": [row["sample_index"] for row in rows],
            "group_index": [row["group_index"] for row in rows],
            "rollout_digest": [row[ROW_DIGEST] for row in rows],
        }
        columns |= self._scored([_sample(row, metadata) for row in rows], rollout_part.path, components)
        return write_table(files, out_path, pa.table(columns, schema=rewards_schema(components)))

    def probe(
        self,
        files: Files,
        rollout_part: Part,
        start: int,
        stop: int,
        components: list[str],
        metadata: Mapping[int, Mapping[str, Any] | None],
    ) -> None:
        """Score the part's rows from `start` up to `stop` and write nothing. Arguments and errors as in `score`."""
        rows = read_table(files, rollout_part, ROLLOUT_COLUMNS).slice(start, stop - start).to_pylist()
        self._scored([_sample(row, metadata) for row in rows], rollout_part.path, components)

    def score_evaluation(
        self,
        files: Files,
        made: pa.Table,
        out_path: str,
        components: list[str],
        metadata: Mapping[int, Mapping[str, Any] | None],
    ) -> Part:
        """Score what an evaluation's request made (schema EVALUATED) and write both as one part at `out_path`.

        Arguments and errors as in `score`.
        """
        rows = made.select(["sample_index", "prompt_index", "prompt", "seed", "image"]).to_pylist()
        samples = [_sample(row | {"group_index": row["prompt_index"]}, metadata) for row in rows]
        scored = self._scored(samples, out_path, components)
        scored["score_seconds"] = scored.pop("seconds")
        columns = {name: made.column(name) for name in made.column_names} | scored
        return write_table(files, out_path, pa.table(columns, schema=evaluation_schema(components)))

    def _scored(self, samples: list[Sample], path: str, components: list[str]) -> dict[str, list[Any]]:
        """Columns of the samples' scores, in order."""
        scores: dict[int, Score] = {}
        if self.custom:
            scores = {s.index: score for s, score in zip(samples, self.custom.scores(samples), strict=True)}
            rewards = [scores[sample.index].reward for sample in samples]
        else:
            rewards = asyncio.run(batched_async_rm(self.args, samples, scorers=self.scorers, scores=scores))
        if not len(rewards) == len(scores) == len(samples):
            raise StageError(f"{len(samples)} samples of {path} got {len(rewards)} rewards: a row each is needed")
        for sample, reward in zip(samples, rewards, strict=True):
            _check(sample, reward, scores[sample.index], components)
        ordered = [scores[sample.index] for sample in samples]
        return {
            "reward": rewards,
            "rm_type": [s.rm_type for s in ordered],
            "rm_version": [s.rm_version for s in ordered],
            **{f"score_{c}": [s.component(c) for s in ordered] for c in components},
            "recognized": [s.recognized for s in ordered],
            "target": [s.target for s in ordered],
            "tries": [s.tries for s in ordered],
            "worker": [self.name] * len(samples),
            "seconds": [s.seconds for s in ordered],
            ROW_DIGEST: [""] * len(samples),
        }


def decode_png(data: bytes | None, sample_index: int) -> torch.Tensor:
    """(3, H, W) float32 in [0, 1] of a PNG. Raises StageError that names the sample."""
    try:
        pixels = np.asarray(Image.open(io.BytesIO(data or b"")).convert("RGB"))
    except (OSError, SyntaxError, ValueError) as fault:
        raise StageError(f"the image of sample {sample_index} cannot be decoded: {fault}") from fault
    return torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / 255)


def _sample(row: dict[str, Any], metadata: Mapping[int, Mapping[str, Any] | None]) -> Sample:
    index = row["sample_index"]
    if index not in metadata:
        raise StageError(f"sample {index} of the rollout is not among the prompts: its rm_type is not known")
    return Sample(
        group_index=row["group_index"],
        index=index,
        prompt=row["prompt"],
        seed=row["seed"],
        metadata=dict(metadata[index] or {}),
        generated_output=decode_png(row["image"]["bytes"], index),
    )


def _check(sample: Sample, reward: float, score: Score, components: list[str]) -> None:
    if not math.isfinite(reward):
        raise StageError(f"rm_type {score.rm_type} gave sample {sample.index} the reward {reward}, which is not finite")
    if not score.scorers() <= set(components):
        raise StageError(
            f"sample {sample.index} has rm_type {score.rm_type}, not among the run's {', '.join(components)}"
        )
