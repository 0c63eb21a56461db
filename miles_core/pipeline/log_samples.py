"""The samples that a user's log function is given, from what the stages committed."""

import json
from collections.abc import Mapping
from typing import Any

from miles_core.data.sample import Sample
from miles_core.store.files import Files
from miles_core.store.manifest import Manifest
from miles_core.store.parts import Part, read_table


class LoggedSample(Sample):
    """A sample whose image is read when it is asked for."""

    stored: "_Stored"

    @property
    def generated_output(self) -> Any:
        """(3, H, W) float32 in [0, 1]. Raises DamagedError."""
        return self.stored.image(self.index)

    @generated_output.setter
    def generated_output(self, value: Any) -> None:
        return None


class _Stored:
    """The images of a stage's parts; the part that was read last is at hand."""

    def __init__(self, files: Files) -> None:
        self.files, self._at = files, dict[int, Part]()
        self._part: Part | None = None
        self._images: dict[int, Any] = {}

    def rows(self, manifest: Manifest, columns: list[str]) -> list[dict[str, Any]]:
        """The rows of a stage in sample order; where each image lies is kept in mind."""
        found = []
        for part in manifest.data:
            found += read_table(self.files, part, columns).to_pylist()
            self._at |= {row["sample_index"]: part for row in found[len(found) - part.rows :]}
        return sorted(found, key=lambda row: row["sample_index"])

    def image(self, index: int) -> Any:
        # Takes torch, which only a function that looks at images needs.
        from miles_core.rewards.worker import decode_png

        part = self._at[index]
        if part != self._part:
            rows = read_table(self.files, part, ["sample_index", "image"]).to_pylist()
            self._part, self._images = part, {row["sample_index"]: row["image"] for row in rows}
        return decode_png((self._images[index] or {}).get("bytes"), index)


def reward_samples(files: Files, rewards: Manifest) -> list[Sample]:
    """Indices and rewards alone, in sample order."""
    rows = _rows(files, rewards, ["sample_index", "group_index", "reward"])
    return [
        Sample(group_index=row["group_index"], index=row["sample_index"], prompt="", seed=0, reward=row["reward"])
        for row in rows
    ]


def rollout_samples(files: Files, made: Mapping[Any, Manifest]) -> list[Sample]:
    """The samples of an iteration in order: prompt, negative prompt, seed, metadata, reward, steps, log-probs, whether each was
    left out of the loss, and the image where it is asked for."""
    scored = {row["sample_index"]: row["reward"] for row in _rows(files, made["rewards"], ["sample_index", "reward"])}
    drawn = {r["sample_index"]: r["metadata"] for r in _rows(files, made["prompts"], ["sample_index", "metadata"])}
    kept = _rows(files, made["advantages"], ["sample_index", "remove_sample"])
    removed = {row["sample_index"] for row in kept if row["remove_sample"]}
    columns = ("timesteps", "sigmas", "log_probs", "sde_step_indices", "negative_prompt")
    asked = ["sample_index", "group_index", "prompt", "seed", *columns]
    stored, samples = _Stored(files), list[Sample]()
    for row in stored.rows(made["rollout"], asked):
        sample = _logged(
            stored, row, scored.get(row["sample_index"]), json.loads(drawn.get(row["sample_index"]) or "{}")
        )
        for name in columns:
            setattr(sample, name, row[name])
        sample.remove_sample = sample.index in removed
        samples.append(sample)
    return samples


def eval_data(files: Files, evaluation: Manifest) -> dict[str, dict[str, Any]]:
    """`rewards` and `samples` of each evaluation set, in sample order."""
    stored, data = _Stored(files), dict[str, dict[str, Any]]()
    for row in stored.rows(evaluation, ["eval_set", "sample_index", "prompt_index", "prompt", "seed", "reward"]):
        own = data.setdefault(row["eval_set"], {"rewards": [], "samples": []})
        own["rewards"].append(row["reward"])
        own["samples"].append(_logged(stored, row | {"group_index": row["prompt_index"]}, row["reward"], {}))
    return data


def _logged(stored: _Stored, row: Mapping[str, Any], reward: float | None, metadata: dict[str, Any]) -> LoggedSample:
    sample = LoggedSample(
        group_index=row["group_index"],
        index=row["sample_index"],
        prompt=row["prompt"],
        seed=row["seed"],
        metadata=metadata,
        reward=reward,
    )
    sample.stored = stored
    return sample


def _rows(files: Files, manifest: Manifest, columns: list[str]) -> list[dict[str, Any]]:
    return _Stored(files).rows(manifest, columns)
