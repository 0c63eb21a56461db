"""The probe: one fixed request whose first model output is compared between engine and trainer.

With one ODE step x1 = x0 + (sigma1 - sigma0) v, so v = (x1 - x0) / (sigma1 - sigma0): any engine that returns its
trajectory can be probed, and the trainer replays it from x0, the timestep and the conditioning.
"""

import torch
from safetensors.torch import load, save

from miles_core.rollout.protocol import GenerateRequest, GenerateResult
from miles_core.store.files import Files
from miles_core.store.parts import Part, read_bytes, remake_file
from miles_core.weights.probe_spec import ProbeResult
from miles_core.weights.verify import check_probe

Probe = dict[str, torch.Tensor]


def probe_of(request: GenerateRequest, result: GenerateResult) -> Probe:
    """latents (1, C, h, w), timestep (1,), model_output (1, C, h, w), guidance_scale (1,), cond.*."""
    output = result.outputs[0]
    x0, x1 = output.latents[0].float(), output.latents[1].float()
    probe = {
        "latents": x0[None].contiguous(),
        "timestep": output.timesteps[:1].float().contiguous(),
        "model_output": ((x1 - x0) / (output.sigmas[1] - output.sigmas[0]))[None].contiguous(),
        "guidance_scale": torch.tensor([request.guidance_scale], dtype=torch.float32),
    }
    return probe | {f"cond.{name}": tensor.contiguous() for name, tensor in result.conditioning.items()}


def write_probe(files: Files, path: str, probe: Probe) -> Part:
    """Write a probe beside an unfinished rollout; one that an earlier try left gives way to this engine's."""
    return remake_file(files, path, save(probe))


def compare(files: Files, after: Probe, before: Part, trainer: Part, tolerance: float) -> ProbeResult:
    """Compare an engine's probe after a push with the trainer's, and how far both moved from before."""
    old = load(read_bytes(files, before))
    replay = load(read_bytes(files, trainer))
    return check_probe(old["model_output"], after["model_output"], replay["before"], replay["after"], tolerance)
