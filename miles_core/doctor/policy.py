"""Engine and trainer hold one policy and compute the same: ratio, parity, LoRA, clip range."""

from __future__ import annotations

from miles_core.doctor.check import Finding, passed, stopped, warned
from miles_core.doctor.subject import Subject
from miles_core.families.sizes import SHAPES, component_parameters, lora_parameters

RATIO_NOISE = {"fp32": 1.2e-7, "bf16": 1.4e-4}
"""Largest |ratio - 1| before the first step between two correct forwards, by dtype: the tiny SD3 on an H200."""
_ROUNDING = 10.0


def model(subject: Subject) -> Finding:
    """The pipeline is there, of a family that can be trained, and holds a transformer. Raises InputError."""
    folder, family = subject.checkpoint, subject.family
    parameters = component_parameters(folder)
    if "transformer" not in parameters:
        return stopped(f"{folder} holds no weights of a transformer", "--hf-checkpoint with a whole diffusers pipeline")
    of_rest = sum(parameters.values()) - parameters["transformer"]
    return passed(
        f"{family} in {folder}: {parameters['transformer']:,} parameters in the transformer, {of_rest:,} beside it"
    )


def lora(subject: Subject) -> Finding:
    """Whether the adapter binds to any module of the transformer, and each of its targets to one at least."""
    config, targets = subject.config.lora, subject.lora_targets
    pairs = lora_parameters(subject.checkpoint, targets, config.lora_rank)
    own = " ".join(SHAPES[subject.family].lora_target_modules)
    if not pairs:
        return stopped(
            f"the LoRA would bind to 0 modules: no linear layer of the transformer is called {', '.join(targets)}",
            f"leave out --lora-target-modules, which is then {own}",
        )
    found = f"{len(pairs)} modules take a pair of rank {config.lora_rank}, {sum(pairs):,} parameters to train"
    idle = [t for t in targets if not lora_parameters(subject.checkpoint, (t,), config.lora_rank)]
    if idle:
        return warned(
            f"{found}, and {', '.join(idle)} binds to none", f"leave out --lora-target-modules, which is then {own}"
        )
    return passed(found)


def clip_range(subject: Subject) -> Finding:
    """The clip range against the ratio's own rounding in the forward's dtype."""
    dtype, clip = subject.config.training.diffusion_forward_dtype, subject.config.algorithm.diffusion_clip_range
    noise = RATIO_NOISE[dtype]
    found = f"clip range {clip:g}; in {dtype} rounding alone moves the ratio by about {noise:.1e}"
    if clip <= noise:
        return warned(
            f"{found}, so that pairs are clipped at random",
            f"--diffusion-forward-dtype fp32, or --diffusion-clip-range {10 * noise:.0e}",
        )
    return passed(found)


def ratio(subject: Subject) -> Finding:
    """|ratio - 1| before the first optimizer step, on one microgroup that the engine made and the trainer replayed."""
    row, c = subject.trial.trained.result.metrics[0], subject.config
    return judge_ratio(
        row["ratio_max_abs_dev"],
        c.algorithm.diffusion_clip_range,
        c.training.diffusion_forward_dtype,
        f"over {row['pairs']} pairs of one microgroup, before the first step",
    )


def judge_ratio(off: float, clip: float, dtype: str, where: str) -> Finding:
    """off: the largest |ratio - 1|. Rounding in dtype and the clip range are two limits, each crossed or not."""
    rounding = _ROUNDING * RATIO_NOISE[dtype]
    found = f"at most {off:.1e} from 1 {where} (clip range {clip:g})"
    if not off <= max(clip, rounding):
        return stopped(
            f"{found}: trainer and engine do not compute the same policy",
            "see parity; --diffusion-forward-dtype fp32 tells rounding from a real difference",
        )
    if off > clip:
        return warned(
            f"{found}: rounding in {dtype} alone clips pairs",
            f"--diffusion-forward-dtype fp32, or --diffusion-clip-range {10 * off:.0e}",
        )
    if off > rounding:
        return warned(
            f"{found}, more than rounding in {dtype} explains",
            "--micro-batch-size equal to --rollout-microgroup-size, so that trainer and engine have one batch",
        )
    return passed(found)


def parity(subject: Subject) -> Finding:
    """The probe on engine and trainer: before the first step, and once an updated policy was pushed."""
    mismatch = subject.trial.trained.mismatch
    if mismatch:
        return stopped(
            mismatch, "engine and trainer must load one --hf-checkpoint, with the same libraries and the same dtype"
        )
    proof, row = subject.trial.proof, subject.trial.trained.result.metrics[0]
    found = (
        f"after a step and a push the engine's output lies {proof.diff:.1e} from the trainer's; the push moved it by "
        f"{proof.moved:.1e}, gradient norm {row['grad_norm']:.2g}"
    )
    if row["grad_norm"] == 0:
        return stopped(
            f"{found}: no gradient reaches the adapter", "another --lora-target-modules, or leave the option out"
        )
    return passed(found)
