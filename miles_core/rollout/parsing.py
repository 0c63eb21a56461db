"""From an engine's result to the rows of a rollout, and back to conditioning tensors.

Runs in parser processes: tensors go from the engine to Parquet without passing the driver.
"""

import io
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypedDict

import pyarrow as pa
import torch
from PIL import Image

from miles_core.errors import StageError
from miles_core.rollout.microgroup import Microgroup
from miles_core.rollout.protocol import GeneratedOutput, GenerateRequest, GenerateResult
from miles_core.runtime.faults import fault_point
from miles_core.store.digest import ROW_DIGEST, with_row_digests
from miles_core.store.files import Files
from miles_core.store.parts import Part, remake_table, write_table
from miles_core.store.schemas import CONDITIONING, EVALUATED, latents_schema, rollout_schema

PNG_COMPRESS_LEVEL = 1


class SampleKey(TypedDict):
    """Which sample of the run an output is."""

    sample_index: int
    group_index: int


class ParserWorker:
    """Encodes and writes what engines return; holds nothing between calls."""

    def write(
        self,
        files: Files,
        result: GenerateResult,
        request: GenerateRequest,
        data_path: str,
        latents_path: str,
        conditioning_path: str | None,
        *,
        samples: Sequence[SampleKey],
        sde_steps: Sequence[int],
        policy_digest: str,
        policy_version: int,
        conditioning_id: str,
    ) -> tuple[Microgroup, Part | None]:
        """Write a microgroup: its conditioning where that file does not exist yet, its trajectories, and last its
        rows, which make it count.

        Raises FileExistsError where `data_path` or `latents_path` is taken, StageError for NaN or inf, DamagedError
        where the conditioning file that exists is not whole.
        """
        rows, latents = rollout_tables(
            result,
            request,
            samples=samples,
            sde_steps=sde_steps,
            policy_digest=policy_digest,
            policy_version=policy_version,
            conditioning_id=conditioning_id,
        )
        beside = None
        if conditioning_path is not None:
            beside = remake_table(files, conditioning_path, conditioning_table(result, request, conditioning_id))
        trajectories = write_table(files, latents_path, latents)
        fault_point("rollout:written")
        return Microgroup(write_table(files, data_path, rows), trajectories), beside


def evaluated_table(
    result: GenerateResult,
    request: GenerateRequest,
    *,
    eval_set: str,
    prompt_index: int,
    sample_indices: Sequence[int],
    policy_digest: str,
    policy_version: int,
) -> pa.Table:
    """What an evaluation's request made, a row an output, in order (schema EVALUATED); nothing of the trajectories.

    Raises StageError for NaN or inf, or outputs without a sample.
    """
    if not request.num_outputs == len(result.outputs) == len(sample_indices):
        raise StageError(
            f"engine {result.engine} returned {len(result.outputs)} outputs for {request.num_outputs} requested and "
            f"{len(sample_indices)} samples"
        )
    for index, output in zip(sample_indices, result.outputs, strict=True):
        _check(index, output)
    count = len(result.outputs)
    each = {
        "sample_index": list(sample_indices),
        "seed": [output.seed for output in result.outputs],
        "image": [{"bytes": image_png(output.image), "path": None} for output in result.outputs],
    }
    all_alike = {
        "eval_set": eval_set,
        "prompt_index": prompt_index,
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt if request.guided else None,
        "num_outputs": request.num_outputs,
        "height": request.height,
        "width": request.width,
        "guidance_scale": request.guidance_scale,
        "num_steps": request.num_inference_steps,
        "policy_digest": policy_digest,
        "policy_version": policy_version,
        "engine": result.engine,
        "started_at": datetime.fromtimestamp(result.started_at, UTC),
        "generate_seconds": result.seconds,
    }
    return pa.table(each | {name: [value] * count for name, value in all_alike.items()}, schema=EVALUATED)


def image_png(image: torch.Tensor) -> bytes:
    """PNG of an image (3, H, W) in [0, 1]: 8-bit RGB, rounded to the nearest of 256 levels."""
    levels = (image.float() * 255).round().clamp(0, 255).to(torch.uint8)
    sink = io.BytesIO()
    Image.fromarray(levels.permute(1, 2, 0).contiguous().cpu().numpy()).save(
        sink, format="PNG", compress_level=PNG_COMPRESS_LEVEL
    )
    return sink.getvalue()


def rollout_tables(
    result: GenerateResult,
    request: GenerateRequest,
    *,
    samples: Sequence[SampleKey],
    sde_steps: Sequence[int],
    policy_digest: str,
    policy_version: int,
    conditioning_id: str,
) -> tuple[pa.Table, pa.Table]:
    """Rows (`row_digest` empty) and trajectories of the outputs, in order; `latents_digest` ties a row to its
    trajectory. Stores the latents at i and i + 1 of each step of `sde_steps` alone. Raises StageError for NaN or inf,
    a latent that is not fp32, or outputs without a sample."""
    if len(samples) != len(result.outputs) or request.num_outputs != len(result.outputs):
        raise StageError(
            f"engine {result.engine} returned {len(result.outputs)} outputs for {request.num_outputs} requested and "
            f"{len(samples)} samples"
        )
    steps = sorted(set(sde_steps))
    positions = sorted({position for i in steps for position in (i, i + 1)})
    for key, output in zip(samples, result.outputs, strict=True):
        _check(key["sample_index"], output)
    columns = zip(
        *(_row(key, output, positions, steps) for key, output in zip(samples, result.outputs, strict=True)), strict=True
    )
    indices, groups, seeds, images, sigmas, timesteps, log_probs, latents, outputs = (list(c) for c in columns)
    count = len(result.outputs)
    trajectories = _trajectories(indices, positions, latents, outputs if request.debug else [])
    values = {
        "sample_index": indices,
        "group_index": groups,
        "prompt": [request.prompt] * count,
        "negative_prompt": [request.negative_prompt if request.guided else None] * count,
        "conditioning_id": [conditioning_id] * count,
        "seed": seeds,
        "request_seed": [request.seed] * count,
        "num_outputs": [request.num_outputs] * count,
        "image": [{"bytes": image, "path": None} for image in images],
        "height": [request.height] * count,
        "width": [request.width] * count,
        "guidance_scale": [request.guidance_scale] * count,
        "noise_level": [request.noise_level] * count,
        "sde_type": [request.sde_type] * count,
        "sigmas": sigmas,
        "timesteps": timesteps,
        "sde_step_indices": [steps] * count,
        "log_probs": log_probs,
        "latents_digest": trajectories.column(ROW_DIGEST).to_pylist(),
        "policy_digest": [policy_digest] * count,
        "policy_version": [policy_version] * count,
        "engine": [result.engine] * count,
        "started_at": [datetime.fromtimestamp(result.started_at, UTC)] * count,
        "seconds": [result.seconds] * count,
        ROW_DIGEST: [""] * count,
    }
    schema = rollout_schema(sde_steps=len(steps), steps=request.num_inference_steps)
    return pa.table([_array(values[field.name], field.type) for field in schema], schema=schema), trajectories


def conditioning_table(result: GenerateResult, request: GenerateRequest, conditioning_id: str) -> pa.Table:
    """The request's conditioning, one row per tensor in name order, `row_digest` empty.

    Raises StageError for NaN or inf.
    """
    rows = []
    for name, tensor in sorted(result.conditioning.items()):
        if not torch.isfinite(tensor).all():
            raise StageError(f"conditioning {name} of prompt {request.prompt!r} holds NaN or inf")
        rows.append(
            {
                "conditioning_id": conditioning_id,
                "prompt": request.prompt,
                "negative_prompt": request.negative_prompt if request.guided else None,
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "data": tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes(),
                ROW_DIGEST: "",
            }
        )
    return pa.Table.from_pylist(rows, schema=CONDITIONING)


def read_conditioning(table: pa.Table) -> dict[str, dict[str, torch.Tensor]]:
    """conditioning_id → name → tensor in its own dtype and shape, no batch dimension."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for row in table.select(["conditioning_id", "name", "dtype", "shape", "data"]).to_pylist():
        flat = torch.frombuffer(bytearray(row["data"]), dtype=getattr(torch, row["dtype"]))
        found.setdefault(row["conditioning_id"], {})[row["name"]] = flat.reshape(row["shape"])
    return found


def _check(sample_index: int, output: GeneratedOutput) -> None:
    for name, tensor in (("log_probs", output.log_probs), ("latents", output.latents), ("image", output.image)):
        if not torch.isfinite(tensor).all():
            raise StageError(f"sample {sample_index}: {name} holds NaN or inf; nothing of its microgroup is kept")
    for name, tensor in (("log_probs", output.log_probs), ("latents", output.latents)):
        if tensor.dtype != torch.float32:
            raise StageError(f"sample {sample_index}: {name} came as {tensor.dtype}, float32 is stored")


def _row(key: SampleKey, output: GeneratedOutput, positions: list[int], steps: list[int]) -> tuple[object, ...]:
    return (
        key["sample_index"],
        key["group_index"],
        output.seed,
        image_png(output.image),
        output.sigmas,
        output.timesteps[: len(output.log_probs)],
        output.log_probs,
        output.latents[positions],
        None if output.model_outputs is None else output.model_outputs[steps],
    )


def _trajectories(
    indices: list[int], positions: list[int], latents: list[torch.Tensor], outputs: list[torch.Tensor]
) -> pa.Table:
    schema = latents_schema(
        latent_shape=latents[0].shape[1:],
        positions=len(positions),
        latent_dtype=pa.float32(),
        outputs=len(outputs[0]) if outputs else 0,
    )
    columns: dict[str, list] = {
        "sample_index": indices,
        "latent_steps": [positions] * len(indices),
        "latents": latents,
        "model_outputs": outputs,
        ROW_DIGEST: [""] * len(indices),
    }
    arrays = [_array(columns[field.name], field.type) for field in schema]
    return with_row_digests(pa.table(arrays, schema=schema))


def _array(values: list, kind: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):
        flat = torch.stack(values).reshape(-1).contiguous().numpy()
        return pa.FixedSizeListArray.from_arrays(pa.array(flat, kind.value_type), type=kind)
    return pa.array(values, kind)
