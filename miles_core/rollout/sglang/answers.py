"""What /rollout/generate is asked and answers (sglang 0.5.23, entrypoints/post_training/rollout_api.py)."""

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from safetensors.torch import load as load_safetensors

from miles_core.errors import StageError
from miles_core.rollout.protocol import GeneratedOutput, GenerateRequest, GenerateResult


@dataclass(frozen=True)
class PackedResult:
    """An answer as it came over the wire, to be opened by a parser. conditioning: that of a request of its own for the
    conditioning alone, where it was asked for."""

    request: GenerateRequest
    body: bytes
    conditioning: bytes | None
    engine: str
    started_at: float
    seconds: float

    def opened(self) -> GenerateResult:
        """The same, decoded. Raises StageError for what is no answer to the request."""
        outputs = [_output(one, self.request, i) for i, one in enumerate(decoded(self.body, self.engine))]
        if len(outputs) != self.request.num_outputs:
            raise StageError(
                f"{self.engine} returned {len(outputs)} outputs for {self.request.num_outputs} requested ones"
            )
        described = {} if self.conditioning is None else conditioning_of(decoded(self.conditioning, self.engine)[0])
        return GenerateResult(outputs, described, self.engine, self.started_at, self.seconds)


def body_of(request: GenerateRequest, *, conditioning: bool = False, text_tokens: int | None = None) -> dict[str, Any]:
    """The JSON of a request. Everything the server has a default for is said: its debug tensors are on by default.
    text_tokens: what every text encoder reads; None: the server's own lengths."""
    # An absent negative prompt becomes the model's default one: guidance that is off is told by the scale.
    guidance = request.guidance_scale if request.guided else 1.0
    steps = None if request.sde_type == "ode" else request.sde_step_indices
    return {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "seed": request.seed,
        "generator_device": request.generator_device,
        "width": request.width,
        "height": request.height,
        "num_inference_steps": request.num_inference_steps,
        "num_outputs_per_prompt": request.num_outputs,
        "guidance_scale": guidance,
        "rollout": True,
        "rollout_sde_type": request.sde_type,
        "rollout_noise_level": request.noise_level,
        # A step without noise has no log-prob with constants; ours is 0 there.
        "rollout_log_prob_no_const": request.log_prob_no_const or request.sde_type == "ode",
        "rollout_debug_mode": request.debug and not conditioning,
        "rollout_return_denoising_env": conditioning,
        "rollout_return_dit_trajectory": not conditioning,
        "rollout_sde_step_indices": None if steps is None else list(steps),
        "suppress_logs": True,
        "extra_sampling_params": None if text_tokens is None else {"max_sequence_length": text_tokens},
    }


def for_conditioning(request: GenerateRequest) -> GenerateRequest:
    """The cheapest request that returns the same conditioning: it depends on the prompts and on guidance alone, and with
    the outputs it would come once an output."""
    return replace(request, num_outputs=1, num_inference_steps=1, sde_type="ode", sde_step_indices=None)


def decoded(body: bytes, engine: str) -> list[dict[str, Any]]:
    """The outputs of a response, tensors and all. Raises StageError for what is none."""
    try:
        answers = _tensors(msgspec.msgpack.decode(body))
    except Exception as fault:
        raise StageError(f"{engine} answered {len(body)} bytes that are no rollout: {fault}") from None
    if not isinstance(answers, list) or not all(isinstance(one, dict) for one in answers):
        raise StageError(f"{engine} answered no list of outputs")
    return answers


def conditioning_of(answer: dict[str, Any]) -> dict[str, torch.Tensor]:
    """`pos.…` and, with guidance, `neg.…`, without a batch dimension: the server keeps one of 1, or none, by the number
    of outputs."""
    environment = answer.get("denoising_env")
    if not environment or not environment.get("pos_cond_kwargs"):
        raise StageError("the server returned no conditioning")
    found = {}
    for side in ("pos", "neg"):
        for name, tensor in (environment.get(f"{side}_cond_kwargs") or {}).items():
            if isinstance(tensor, torch.Tensor):
                found[f"{side}.{name}"] = tensor.squeeze(0) if tensor.dim() > _DIMS.get(name, 9) else tensor
    return found


# Without a batch dimension.
_DIMS = {"encoder_hidden_states": 2, "pooled_projections": 1}


def _output(answer: dict[str, Any], request: GenerateRequest, index: int) -> GeneratedOutput:
    try:
        trajectory = answer["dit_trajectory"]
        return GeneratedOutput(
            seed=request.seed + index,
            image=answer["generated_output"].float(),
            log_probs=answer["rollout_log_probs"],
            latents=trajectory["latents"],
            timesteps=trajectory["timesteps"],
            sigmas=trajectory["sigmas"],
            model_outputs=answer["rollout_debug_tensors"]["rollout_model_outputs"].float() if request.debug else None,
        )
    except (KeyError, TypeError, AttributeError) as fault:
        raise StageError(f"the server's output lacks {fault}") from None


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        if value.get("__tensor__"):
            return load_safetensors(value["data"])["t"]
        return {name: _tensors(one) for name, one in value.items()}
    return [_tensors(one) for one in value] if isinstance(value, list) else value
