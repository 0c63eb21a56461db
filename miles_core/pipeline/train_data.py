"""Train pairs of a user's own (--custom-convert-samples-to-train-data-path), committed with the advantages for update to read."""

import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from miles_core.config.folders import own_args
from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.pipeline.stage import Step
from miles_core.store.manifest import Manifest
from miles_core.store.parts import Part, read_table, write_table
from miles_core.store.run_store import Attempt
from miles_core.store.schemas import train_data_schema
from miles_core.user_code import own_function

TRAIN_DATA = "train_data/"
_OPTION = "custom_convert_samples_to_train_data_path"
_TRAJECTORY = ("prompt", "seed", "timesteps", "sigmas", "log_probs", "sde_step_indices")


def own_train_data(
    step: Step, attempt: Attempt, rewards: Manifest, samples: Sequence[Sample], rows: list[dict[str, Any]]
) -> list[Part]:
    """The pairs that the user's function makes of the kept samples, as a part; none where there is no such function.

    Its samples carry reward, prompt, seed, timesteps, sigmas, log_probs and sde_step_indices, and no images or latents.
    `rows`, the advantages, take the mean advantage of a sample's pairs, and leave the loss where it has none.
    """
    args = own_args(step.config)
    convert = own_function(_OPTION, args, f" in iteration {step.iteration}")
    if convert is None:
        return []
    from miles_core.training.objective import checked_pairs

    kept = {row["sample_index"] for row in rows if row["kept"]}
    chosen = [sample for sample in samples if sample.index in kept]
    _add_trajectories(step, rewards, chosen)
    pairs = checked_pairs(convert(args, chosen), chosen, f"--{_OPTION}".replace("_", "-"))
    if not pairs["step"]:
        raise StageError("--custom-convert-samples-to-train-data-path returned no train pair: return one at least")
    if wrong := [i for i, a in zip(pairs["sample_index"], pairs["advantage"], strict=True) if not math.isfinite(a)]:
        raise StageError(
            f"--custom-convert-samples-to-train-data-path returned an advantage of sample {wrong[0]} that is not finite"
        )
    del pairs["sample"]
    further = sorted(pairs.keys() - {"sample_index", "step", "advantage", "loss_mask"})
    of: dict[int, list[float]] = {}
    for index, advantage, mask in zip(pairs["sample_index"], pairs["advantage"], pairs["loss_mask"], strict=True):
        if mask > 0:
            of.setdefault(index, []).append(advantage)
    for row in rows:
        own = of.get(row["sample_index"])
        row["advantage"] = math.fsum(own) / len(own) if own else 0.0
        row["remove_sample"] = row["remove_sample"] or not own
    table = pa.Table.from_pydict(pairs | {"row_digest": [""] * len(pairs["step"])}, schema=train_data_schema(further))
    return [write_table(step.store.files, attempt.path(f"{TRAIN_DATA}pairs.parquet"), table)]


def _add_trajectories(step: Step, rewards: Manifest, samples: Sequence[Sample]) -> None:
    rollout = step.store.product(rewards.upstream["rollout"])
    if rollout is None:
        raise StageError(
            f"the rollout that {rewards.folder} scored is gone: an own function cannot be given its samples"
        )
    columns = ["sample_index", *_TRAJECTORY]
    table = pa.concat_tables([read_table(step.store.files, part, columns) for part in rollout.data])
    made = {row["sample_index"]: row for row in table.to_pylist()}
    for sample in samples:
        for name in _TRAJECTORY:
            setattr(sample, name, made[sample.index][name])
