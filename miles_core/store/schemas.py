"""Parquet schemas of the stages, with unit, shape and volatility of each column.

docs/source/generate.py makes docs/artifacts.md from here. A volatile column (times, hosts, who did it) does not enter the
content digest. Tensors are plain fixed-size lists with their shape in the field's metadata; every schema
carries the `huggingface` features, so that `datasets` shows images as images.
"""

import json
from collections.abc import Sequence

import pyarrow as pa

from miles_core.store.digest import ROW_DIGEST

SCHEMA_VERSION = 1

IMAGE = pa.struct([pa.field("bytes", pa.binary()), pa.field("path", pa.string())])


def column(
    name: str,
    kind: pa.DataType,
    doc: str,
    *,
    unit: str = "",
    shape: Sequence[int] = (),
    volatile: bool = False,
    nullable: bool = False,
) -> pa.Field:
    """One documented column."""
    meta = {"doc": doc, "unit": unit, "volatile": "true" if volatile else "false"}
    if shape:
        meta["shape"] = json.dumps(list(shape))
    return pa.field(name, kind, nullable=nullable, metadata=meta)


def tensor(name: str, kind: pa.DataType, shape: Sequence[int], doc: str, unit: str = "") -> pa.Field:
    """A tensor of one shape for all rows: a flat fixed-size list, row-major."""
    size = 1
    for n in shape:
        size *= n
    return column(name, pa.list_(pa.field("element", kind, nullable=False), size), doc, unit=unit, shape=shape)


def _schema(stage: str, fields: list[pa.Field]) -> pa.Schema:
    fields = [*fields, column(ROW_DIGEST, pa.string(), "SHA-256 over this row's non-volatile columns", volatile=True)]
    return pa.schema(
        fields,
        metadata={
            "stage": stage,
            "schema_version": str(SCHEMA_VERSION),
            "huggingface": json.dumps({"info": {"features": {f.name: _feature(f.type) for f in fields}}}),
        },
    )


def _feature(kind: pa.DataType) -> dict:
    if kind == IMAGE:
        return {"_type": "Image"}
    if pa.types.is_fixed_size_list(kind):
        return {"feature": _feature(kind.value_type), "length": kind.list_size, "_type": "List"}
    if pa.types.is_list(kind):
        return {"feature": _feature(kind.value_type), "_type": "List"}
    if pa.types.is_timestamp(kind):
        return {"dtype": f"timestamp[{kind.unit}, tz={kind.tz}]", "_type": "Value"}
    names = {pa.float16(): "float16", pa.float32(): "float32", pa.float64(): "float64", pa.bool_(): "bool"}
    return {"dtype": names.get(kind, str(kind)), "_type": "Value"}


_SAMPLE = [
    column("sample_index", pa.int64(), "number of the sample, growing through the whole run"),
    column("group_index", pa.int64(), "number of the group (one drawn prompt), growing through the whole run"),
]
_TIME = pa.timestamp("us", tz="UTC")

PROMPTS = _schema(
    "prompts",
    [
        *_SAMPLE,
        column("prompt", pa.string(), "prompt text"),
        column("seed", pa.int64(), "seed of this sample's noise: (rollout_seed + group_index * n) mod 2^31 + offset"),
        column("prompt_index", pa.int64(), "row of the prompt in the prompt file, from 0"),
        column("epoch", pa.int64(), "pass over the prompt file, from 0"),
        column("metadata", pa.string(), "the prompt's metadata as JSON"),
        column("rm_type", pa.string(), "reward type of this sample when its metadata names one", nullable=True),
    ],
)

# A row a group, beside prompts that were drawn in waves.
GROUPS = _schema(
    "prompts",
    [
        _SAMPLE[1],
        column("wave", pa.int32(), "wave that drew it, from 1"),
        column("passed", pa.bool_(), "the group filter's verdict"),
        column(
            "kept", pa.bool_(), "true where the group is trained on: one of the first rollout_batch_size that passed"
        ),
        column("reason", pa.string(), "why it is not trained on", nullable=True),
        column(
            "rewards",
            pa.list_(pa.field("element", pa.float64(), nullable=False)),
            "the rewards that the filter was given",
        ),
    ],
)


METRICS = pa.schema(
    [
        column("run", pa.string(), "name of the run"),
        column("iteration", pa.int64(), "number of the iteration; -1 is before training"),
        column("metric", pa.string(), "name of the figure, such as train/loss"),
        column("value", pa.float64(), "the figure; NaN and infinities as they came"),
        column("stage", pa.string(), "stage whose summary says it"),
        column("attempt", pa.string(), "attempt of that stage"),
        column("committed", _TIME, "when that attempt was committed", volatile=True),
        column("on_line", pa.bool_(), "whether that attempt is on the run's line"),
    ]
)


def rollout_schema(*, sde_steps: int, steps: int) -> pa.Schema:
    """Schema of a rollout's rows, trajectories apart: `sde_steps` is how many steps are trained, `steps` the
    schedule's length T."""
    return _schema(
        "rollout",
        [
            *_SAMPLE,
            column("prompt", pa.string(), "prompt text"),
            column("negative_prompt", pa.string(), "negative prompt; null where guidance is off", nullable=True),
            column("conditioning_id", pa.string(), "row of conditioning/ with this sample's text embeddings"),
            column("seed", pa.int64(), "seed of this sample's noise"),
            column("request_seed", pa.int64(), "seed of the request; output i uses request_seed + i"),
            column("num_outputs", pa.int32(), "outputs of the request; a replay needs the same number"),
            column("image", IMAGE, "the decoded sample, PNG, 8-bit RGB", nullable=True),
            column("height", pa.int32(), "image height", unit="pixel"),
            column("width", pa.int32(), "image width", unit="pixel"),
            column("guidance_scale", pa.float64(), "classifier-free guidance scale; 1 or less is off"),
            column("noise_level", pa.float64(), "noise level a of the SDE step"),
            column("sde_type", pa.string(), "sde, cps or ode"),
            tensor("sigmas", pa.float32(), (steps + 1,), "noise schedule, last entry 0"),
            tensor("timesteps", pa.float32(), (steps,), "timesteps given to the transformer"),
            column(
                "sde_step_indices",
                pa.list_(pa.field("element", pa.int32(), nullable=False)),
                "steps taken as SDE steps and trained on, from 0",
                shape=(sde_steps,),
            ),
            tensor("log_probs", pa.float32(), (steps,), "log-probability of each step, 0 on ODE steps", unit="nat"),
            column("latents_digest", pa.string(), "row_digest of this sample's row in latents/"),
            column("policy_digest", pa.string(), "content digest of the adapter that generated this sample"),
            column("policy_version", pa.int64(), "iteration whose update made that adapter; -1 is policy/init"),
            column("engine", pa.string(), "engine that made it", volatile=True),
            column("started_at", _TIME, "start of the request", volatile=True),
            column("seconds", pa.float64(), "time of the whole request in the engine", unit="s", volatile=True),
        ],
    )


def latents_schema(
    *, latent_shape: Sequence[int], positions: int, latent_dtype: pa.DataType, outputs: int = 0
) -> pa.Schema:
    """Schema of a rollout's trajectories: `latent_shape` is one latent's shape (C, H, W), `positions` how many
    trajectory positions are stored, `latent_dtype` the dtype the log-prob was computed from. `outputs`: how many model
    outputs beside them; 0 without --diffusion-debug-mode."""
    what = "the model's output, guidance applied, at each of `sde_step_indices`; with --diffusion-debug-mode alone"
    debug = [tensor("model_outputs", pa.float32(), (outputs, *latent_shape), what)] if outputs else []
    return _schema(
        "rollout",
        [
            _SAMPLE[0],
            column(
                "latent_steps",
                pa.list_(pa.field("element", pa.int32(), nullable=False)),
                "trajectory positions stored in `latents`: x_t at i and x_{t+1} at i + 1 for each trained step i",
                shape=(positions,),
            ),
            tensor("latents", latent_dtype, (positions, *latent_shape), "trajectory at `latent_steps`"),
            *debug,
        ],
    )


CONDITIONING = _schema(
    "conditioning",
    [
        column(
            "conditioning_id", pa.string(), "SHA-256 over prompt, negative prompt, encoder digest and dtype, 16 hex"
        ),
        column("prompt", pa.string(), "prompt text"),
        column("negative_prompt", pa.string(), "negative prompt; null where guidance is off", nullable=True),
        column("name", pa.string(), "name of the tensor, e.g. pos.encoder_hidden_states"),
        column("dtype", pa.string(), "torch dtype of the bytes, e.g. float32"),
        column("shape", pa.list_(pa.field("element", pa.int64(), nullable=False)), "shape of the tensor"),
        column("data", pa.binary(), "the tensor's bytes, row-major, little-endian"),
    ],
)


def rewards_schema(components: Sequence[str]) -> pa.Schema:
    """Schema of rewards; one nullable `score_<rm_type>` column per scorer in use."""
    return _schema(
        "rewards",
        [
            *_SAMPLE,
            column("rollout_digest", pa.string(), "row_digest of the rollout row that was scored"),
            column("reward", pa.float64(), "the sample's reward"),
            column("rm_type", pa.string(), "scorer of this sample"),
            column("rm_version", pa.string(), "version of that scorer, its models' digests included"),
            *_scores(components),
            column("tries", pa.int32(), "scorings until one succeeded", volatile=True),
            column("worker", pa.string(), "worker that scored it", volatile=True),
            column("seconds", pa.float64(), "time of scoring this sample", unit="s", volatile=True),
        ],
    )


def _scores(components: Sequence[str]) -> list[pa.Field]:
    return [
        *(column(f"score_{c}", pa.float64(), f"score by {c}", nullable=True) for c in components),
        column("recognized", pa.string(), "text that OCR read, lines joined", nullable=True),
        column("target", pa.string(), "text that the prompt asks for", nullable=True),
    ]


_EVALUATED = [
    column("sample_index", pa.int64(), "number of the sample in the evaluation, from 0"),
    column("eval_set", pa.string(), "name of the evaluation set"),
    column("prompt_index", pa.int64(), "number of the prompt in the evaluation, from 0: the sets follow each other"),
    column("prompt", pa.string(), "prompt text"),
    column("negative_prompt", pa.string(), "negative prompt; null where guidance is off", nullable=True),
    column(
        "seed", pa.int64(), "seed of this sample's noise: 3 * 2^30 + prompt_index * n + offset, in every evaluation"
    ),
    column("num_outputs", pa.int32(), "outputs of the request; a replay needs the same number"),
    column("image", IMAGE, "the decoded sample, PNG, 8-bit RGB"),
    column("height", pa.int32(), "image height", unit="pixel"),
    column("width", pa.int32(), "image width", unit="pixel"),
    column("guidance_scale", pa.float64(), "classifier-free guidance scale; 1 or less is off"),
    column("num_steps", pa.int32(), "denoising steps, all of them ODE steps"),
    column("policy_digest", pa.string(), "content digest of the adapter that generated this sample"),
    column("policy_version", pa.int64(), "iteration whose update made that adapter; -1 is policy/init"),
    column("engine", pa.string(), "engine that made it", volatile=True),
    column("started_at", _TIME, "start of the request", volatile=True),
    column("generate_seconds", pa.float64(), "time of the whole request in the engine", unit="s", volatile=True),
]
# What an engine made, before it is scored; never a part of its own.
EVALUATED = pa.schema(_EVALUATED)


def evaluation_schema(components: Sequence[str]) -> pa.Schema:
    """Schema of an evaluation: what was made and how it was scored; a nullable `score_<rm_type>` per scorer in use."""
    return _schema(
        "evaluation",
        [
            *_EVALUATED,
            column("reward", pa.float64(), "the sample's reward"),
            column("rm_type", pa.string(), "scorer of this sample"),
            column("rm_version", pa.string(), "version of that scorer, its models' digests included"),
            *_scores(components),
            column("tries", pa.int32(), "scorings until one succeeded", volatile=True),
            column("worker", pa.string(), "worker that scored it", volatile=True),
            column("score_seconds", pa.float64(), "time of scoring this sample", unit="s", volatile=True),
        ],
    )


ADVANTAGES = _schema(
    "advantages",
    [
        *_SAMPLE,
        column("raw_reward", pa.float64(), "reward before normalization"),
        column("advantage", pa.float64(), "normalized reward, before the clamp in the loss"),
        column("group_mean", pa.float64(), "mean reward of the group"),
        column("group_std", pa.float64(), "standard deviation of the group's rewards, ddof 0"),
        column("zero_std", pa.bool_(), "true where the whole group has one reward and teaches nothing"),
        column("kept", pa.bool_(), "false where the group is not trained on: dropped by the group filter, or surplus"),
        column("reason", pa.string(), "why it is not", nullable=True),
        column("remove_sample", pa.bool_(), "true where the sample is taken out of the loss alone"),
    ],
)

UPDATE = _schema(
    "update",
    [
        column("step", pa.int64(), "optimizer step inside this iteration, from 0"),
        column("global_step", pa.int64(), "optimizer step of the whole run, from 0"),
        column("samples", pa.int64(), "samples that entered this step"),
        column("pairs", pa.int64(), "train pairs (sample, timestep) that entered this step"),
        column("lr", pa.float64(), "learning rate of this step"),
        column("loss", pa.float64(), "train/loss: policy loss + KL term"),
        column("policy_loss", pa.float64(), "train/policy_loss: clipped surrogate"),
        column("kl_loss", pa.float64(), "train/kl_loss: KL to the reference before the factor beta"),
        column("grad_norm", pa.float64(), "train/grad_norm: global L2 norm before clipping"),
        column("clip_frac", pa.float64(), "train/clip_frac: share of pairs whose ratio was clipped"),
        column("ratio_mean", pa.float64(), "train/ratio_mean: mean importance ratio"),
        column("ratio_max_abs_dev", pa.float64(), "train/ratio_max_abs_dev: largest |ratio - 1|"),
        column("log_prob_mean_abs_diff", pa.float64(), "train/log_prob_mean_abs_diff: mean |new - old| log-prob"),
        column("adv_mean", pa.float64(), "mean clamped advantage of the step's pairs"),
        column("seconds", pa.float64(), "time of the step", unit="s", volatile=True),
    ],
)

OWN_METRIC = "metric_"


def update_schema(own: Sequence[str] | None = None) -> pa.Schema:
    """Schema of an update. own: further metrics of a user's loss formula, a nullable `metric_<name>` column each; what such
    a formula leaves out is null."""
    if own is None:
        return UPDATE
    always = {"step", "global_step", "samples", "pairs", "lr", "loss", "grad_norm", "seconds"}
    fields = [f.with_nullable(f.name not in always) for f in UPDATE if f.name != ROW_DIGEST]
    for name in own:
        doc = f"train/{name}: as the loss formula reports it"
        fields.append(column(f"{OWN_METRIC}{name}", pa.float64(), doc, nullable=True))
    return _schema("update", fields)


def train_data_schema(further: Sequence[str]) -> pa.Schema:
    """Schema of train pairs that a user's own conversion made, a row a pair; `further` columns reach the loss."""
    return _schema(
        "advantages",
        [
            column("sample_index", pa.int64(), "sample of the pair"),
            column("step", pa.int64(), "denoising step of the pair, from 0"),
            column("advantage", pa.float64(), "advantage of the pair"),
            column("loss_mask", pa.float64(), "1 where the pair enters the loss, else 0"),
            *(column(name, pa.float64(), f"{name}: as the conversion gives it") for name in further),
        ],
    )


SYNC = _schema(
    "sync",
    [
        column("engine", pa.string(), "engine that received the policy"),
        column("policy_digest", pa.string(), "content digest of the adapter the engine reports"),
        column("policy_version", pa.int64(), "iteration whose update made it"),
        column("modules_bound", pa.int64(), "modules of the engine that took a LoRA pair"),
        column("bytes", pa.int64(), "bytes of the adapter", unit="byte"),
        column(
            "probe_diff", pa.float64(), "relative distance of the engine's output from the trainer's after the push"
        ),
        column("probe_moved", pa.float64(), "relative distance the engine's output moved by the push"),
        column("push_seconds", pa.float64(), "time of push", unit="s", volatile=True),
        column("verify_seconds", pa.float64(), "time of verification", unit="s", volatile=True),
    ],
)

POLICY = _schema(
    "policy",
    [
        column("adapter", pa.string(), "name of the adapter"),
        column("base_digest", pa.string(), "digest of the base model's files"),
        column("policy_digest", pa.string(), "content digest of the adapter"),
        column("modules", pa.int64(), "modules that carry a LoRA pair"),
        column("parameters", pa.int64(), "trainable parameters"),
    ],
)
