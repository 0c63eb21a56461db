"""What a run will take on the disk, told before its first iteration is computed; nothing is refused."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from miles_core.config import RunConfig
from miles_core.config.checks import strategy_name
from miles_core.config.guard import checkpoints_kept
from miles_core.families.sizes import SHAPES, lora_parameters
from miles_core.observe.terminal import bytes_text
from miles_core.pipeline.inputs import Inputs
from miles_core.pipeline.stage import Step
from miles_core.store.files import Files
from miles_core.store.run_store import RunStore
from miles_core.store.stages import ITERATION_STAGES

# Measured on Parquet parts and JSON of the tiny recipes: a part is mostly its schema.
_MICROGROUP_TABLES, _ITERATION_TABLES, _LORA_TENSOR_HEADERS = 28_000, 60_000, 800
_EVALUATION_TABLES = 19_000
# PNG of noise against its pixels; a real picture is smaller.
_PNG = 0.85
_DTYPE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Sizes:
    """Bytes of one iteration: latents and conditioning, the full checkpoint, and all that is kept for ever."""

    latents: float
    checkpoint: float
    rest: float

    @property
    def total(self) -> float:
        return self.latents + self.checkpoint + self.rest


def held(sizes: Sizes, iterations: int, *, full_checkpoints: int, latents_iterations: int) -> float:
    """Most bytes that a run of so many iterations holds at any time: an iteration is finished before older ones are
    pruned. 0 keeps all."""
    latents = min(iterations, latents_iterations + 1) if latents_iterations else iterations
    checkpoints = min(iterations, full_checkpoints + 1) if full_checkpoints else iterations
    return iterations * sizes.rest + latents * sizes.latents + checkpoints * sizes.checkpoint


def fitting(sizes: Sizes, done: int, free: float, *, full_checkpoints: int, latents_iterations: int) -> int:
    """How many iterations more than `done` fit into `free` bytes."""

    def more(count: int) -> float:
        now, then = (
            held(sizes, n, full_checkpoints=full_checkpoints, latents_iterations=latents_iterations)
            for n in (done, done + count)
        )
        return then - now

    low, high = 0, 1 + int(free / sizes.rest)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if more(middle) <= free else (low, middle - 1)
    return low


def estimate(config: RunConfig, inputs: Inputs) -> Sizes:
    """Bytes of an iteration before there is one."""
    r, shapes = config.rollout, SHAPES[inputs.family]
    # Of dynamic sampling a wave, the least.
    prompts = config.over_sampling_batch_size
    samples, steps, trained = (
        prompts * config.data.n_samples_per_prompt,
        r.diffusion_num_steps,
        r.diffusion_num_sde_steps,
    )
    positions = steps + 1
    if trained:
        window = strategy_name(r.diffusion_step_strategy_path) == "sde_window"
        positions = trained + 1 if window else min(2 * trained, steps + 1)
    latent = 4 * shapes.latent_elements(r.diffusion_height, r.diffusion_width)
    branches = 1 if config.negative_prompt is None else 2
    text = branches * shapes.conditioning_elements(inputs.checkpoint)
    text *= _DTYPE_BYTES[config.training.diffusion_forward_dtype]
    targets = config.lora.lora_target_modules or shapes.lora_target_modules
    pairs = lora_parameters(inputs.checkpoint, targets, config.lora.lora_rank)
    images = samples * 3 * r.diffusion_height * r.diffusion_width * _PNG
    tables = samples / r.rollout_microgroup_size * _MICROGROUP_TABLES + _ITERATION_TABLES
    return Sizes(
        latents=samples * positions * latent + prompts * text,
        checkpoint=12 * sum(pairs) + 2 * len(pairs) * _LORA_TENSOR_HEADERS,
        rest=images + tables + 4 * sum(pairs) + text + 4 * latent + _evaluated(config, inputs),
    )


def _evaluated(config: RunConfig, inputs: Inputs) -> float:
    """Bytes of evaluations, spread over the iterations."""
    r, e = config.rollout, config.evaluation
    if e.eval_interval is None or inputs.evaluation is None:
        return 0.0
    prompts, n = len(inputs.evaluation.prompts), e.n_samples_per_eval_prompt
    requests = prompts * -(-n // min(r.rollout_microgroup_size, n))
    images = prompts * n * 3 * r.diffusion_height * r.diffusion_width * _PNG
    return (images + requests * _EVALUATION_TABLES) / e.eval_interval


def measured(store: RunStore, config: RunConfig) -> tuple[int, Sizes] | None:
    """The newest iteration whose update is on the line, and its bytes; with its share of the newest evaluation's."""
    for iteration in reversed(store.line_iterations("update")):
        line = [m for m in (store.on_line(stage, iteration) for stage in ITERATION_STAGES) if m]
        parts = [(part.path.removeprefix(m.folder + "/").split("/")[0], part.bytes) for m in line for part in m.parts]
        latents = sum(size for top, size in parts if top in ("latents", "conditioning"))
        checkpoint = sum(size for top, size in parts if top == "checkpoint")
        everything = sum(size for _, size in parts) + sum(len(m.to_bytes()) for m in line)
        if latents and checkpoint:
            return iteration, Sizes(latents, checkpoint, everything - latents - checkpoint + _newest(store, config))
    return None


def _newest(store: RunStore, config: RunConfig) -> float:
    interval, evaluated = config.evaluation.eval_interval, store.line_iterations("evaluation")
    manifest = store.on_line("evaluation", evaluated[-1]) if interval and evaluated else None
    return (
        (sum(p.bytes for p in manifest.parts) + len(manifest.to_bytes())) / interval if manifest and interval else 0.0
    )


def free_bytes(files: Files) -> int | None:
    """Free space where the artifacts lie; None for a root that is no folder."""
    if not files.local:
        return None
    path = Path(files.root)
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.exists())).free


def disk_line(step: Step) -> str:
    """What an iteration takes, what the run will hold at most, what is free, and how many iterations fit."""
    known = measured(step.store, step.config)
    sizes = known[1] if known else estimate(step.config, step.inputs)
    source = f"as iteration {known[0]}" if known else "estimated"
    done = len(step.store.line_iterations("update"))
    return budget_line(step.config, sizes, source, done, free_bytes(step.store.files))


def budget_line(config: RunConfig, sizes: Sizes, source: str, done: int, free: int | None) -> str:
    """The line for a run of which `done` iterations are on the disk; free: bytes, None where that is not known."""
    keep = {
        "full_checkpoints": checkpoints_kept(config),
        "latents_iterations": config.run.keep_latents_iterations,
    }
    total = max(config.run.num_rollout, done)
    left = total - done
    text = (
        f"disk: {bytes_text(sizes.total)} an iteration ({source}), at most {bytes_text(held(sizes, total, **keep))} for "
        f"{total} iterations"
    )
    if free is None:
        return f"{text}; free space is not known there"
    fit = fitting(sizes, done, free, **keep)
    text += f", {bytes_text(free)} free: "
    if fit < left:
        return (
            f"{text}WARNING: only {fit} of the {left} iterations left fit; make room, or lower "
            "--keep-latents-iterations or --keep-full-checkpoints"
        )
    return f"{text}{fit} more iterations fit"
