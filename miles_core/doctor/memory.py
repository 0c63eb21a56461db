"""Memory that the processes of a run take at least, against what there is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from miles_core.config import RunConfig
from miles_core.doctor.check import Finding, passed, stopped, warned
from miles_core.doctor.subject import Subject
from miles_core.families.sizes import SHAPES, Shapes, component_parameters, lora_parameters
from miles_core.observe.terminal import bytes_text

_DTYPE_BYTES = {"fp32": 4, "bf16": 2}
# Proportional set size of a process at the peak of `miles train tiny-ocr` on 2 CPU cores: an engine or trainer of a tiny
# model, a parser, an OCR scorer; the command, the Prefect server and the Ray head together.
_MODEL_PROCESS, _PLAIN_PROCESS, _OCR_PROCESS, _COMMAND = 0.70e9, 0.42e9, 0.67e9, 1.0e9
_TIGHT = 0.8
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Needs:
    """Bytes of weights and states in one trainer rank and in one engine, and of one microgroup's images and latents.

    Activations come on top and are not counted: the trial shows whether they fit.
    """

    trainer: float
    engine: float
    microgroup: float


def needs(config: RunConfig, parameters: dict[str, int], lora: int, shapes: Shapes) -> Needs:
    """parameters: of each component by its folder; lora: trained parameters.

    A rank loads the whole transformer in fp32 before it is sharded; weight, gradient and two moments of each LoRA
    parameter are fp32.
    """
    r, size = config.rollout, _DTYPE_BYTES[config.training.diffusion_forward_dtype]
    transformer, vae = parameters.get("transformer", 0), parameters.get("vae", 0)
    encoders = sum(parameters.values()) - transformer - vae
    height, width = r.diffusion_height, r.diffusion_width
    latents = (r.diffusion_num_steps + 1) * shapes.latent_elements(height, width)
    return Needs(
        trainer=4 * transformer + 16 * lora,
        engine=size * (transformer + encoders + lora) + 4 * vae,
        microgroup=4 * r.rollout_microgroup_size * (latents + 3 * height * width),
    )


def host_bytes(config: RunConfig, each: Needs, *, ocr: bool) -> float:
    """All processes of a run on one machine at their start: on GPUs as well, weights pass through host memory."""
    cluster = config.cluster
    ranks, engines = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node, cluster.rollout_num_engines
    scorers = config.reward.ocr_num_workers * _OCR_PROCESS if ocr else _PLAIN_PROCESS
    parsers = config.rollout.rollout_parser_num_workers * (_PLAIN_PROCESS + each.microgroup)
    trainers = ranks * (_MODEL_PROCESS + each.trainer)
    return _COMMAND + trainers + engines * (_MODEL_PROCESS + each.engine + each.microgroup) + parsers + scorers


def memory(subject: Subject, available: float | None = None) -> Finding:
    """Weights, LoRA, optimizer, images and processes against the memory of host and GPUs."""
    config, folder = subject.config, subject.checkpoint
    parameters = component_parameters(folder)
    trained = sum(lora_parameters(folder, subject.lora_targets, config.lora.lora_rank))
    each = needs(config, parameters, trained, SHAPES[subject.family])
    total = host_bytes(config, each, ocr="ocr" in config.scorers)
    model = f"weights and states of {bytes_text(each.trainer)} a trainer rank and {bytes_text(each.engine)} an engine"
    if os.environ.get("RAY_ADDRESS"):
        return passed(f"{model}; the nodes of the cluster at RAY_ADDRESS are not looked at")
    there = host_memory() if available is None else available
    found = f"{model}; all processes at least {bytes_text(total)} of {bytes_text(there)} free, activations not counted"
    smallest, largest = min(subject.gpus, default=0), max(each.trainer, each.engine)
    if subject.device == "cuda":
        found += f"; {bytes_text(smallest)} on the smallest GPU"
        if largest > smallest:
            return stopped(found, "--diffusion-forward-dtype bf16, a smaller --hf-checkpoint, or larger GPUs")
    if total > there:
        return stopped(found, _FEWER)
    if total > _TIGHT * there or (subject.device == "cuda" and largest > _TIGHT * smallest):
        return warned(f"{found}: it is tight", _FEWER)
    return passed(found)


_FEWER = (
    "end other processes, or fewer by --ocr-num-workers, --rollout-num-engines, --rollout-parser-num-workers and "
    "--actor-num-gpus-per-node"
)


def host_memory(cgroup: Path = _CGROUP) -> float:
    """Bytes that this process may still take: free on the machine, and within a container's limit (cgroup v2)."""
    free = float(psutil.virtual_memory().available)
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())["inactive_file"]
        return free if limit == "max" else min(free, max(0.0, float(limit) - float(used) + float(cached)))
    except (OSError, ValueError, KeyError):
        return free
