"""What every rollout engine promises: requests, results and verbs. One behaviour, several engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from miles_core.errors import InputError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GenerateRequest:
    """One microgroup: `num_outputs` samples of one prompt; output i uses `seed + i`.

    `sde_step_indices` lists the steps taken as SDE steps (None: all of them); the others are ODE steps.
    Guidance is on when `guidance_scale > 1` and `negative_prompt` is not None. `debug`: with the model's outputs.
    """

    prompt: str
    negative_prompt: str | None
    seed: int
    num_outputs: int
    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float
    sde_type: str
    noise_level: float
    log_prob_no_const: bool
    sde_step_indices: tuple[int, ...] | None
    generator_device: str
    debug: bool = False

    @property
    def guided(self) -> bool:
        """Whether guidance is on."""
        return self.guidance_scale > 1 and self.negative_prompt is not None

    def sde_steps(self) -> frozenset[int]:
        """Steps taken as SDE steps. Raises InputError for a request that cannot be met: sglang accepts an empty or outlying
        list, and silently makes none."""
        if self.height % 16 or self.width % 16:
            raise InputError(f"an image of {self.height} x {self.width} is not possible: give multiples of 16.")
        every = range(self.num_inference_steps)
        if self.sde_type == "ode":
            return frozenset()
        if self.sde_step_indices is None:
            return frozenset(every)
        if not self.sde_step_indices or not set(self.sde_step_indices) <= set(every):
            raise InputError(
                f"the SDE steps {list(self.sde_step_indices)} are not steps of the schedule 0..{every[-1]}: "
                "name at least one and none outside."
            )
        return frozenset(self.sde_step_indices)

    def check_device(self, cuda: bool) -> None:
        """Raises InputError where the noise is to be drawn on a GPU that the engine has not."""
        if self.generator_device == "cuda" and not cuda:
            raise InputError(
                "--diffusion-generator-device cuda needs a GPU here: give --diffusion-generator-device cpu."
            )


@dataclass
class GeneratedOutput:
    """image (3, H, W) float32 in [0, 1]; log_probs (T,) float32, 0 on ODE steps; latents (T + 1, C, h, w) in
    the dtype the log-prob was computed from; timesteps (T + 1,) float32, last 0; sigmas (T + 1,) float32. model_outputs
    (T, C, h, w) float32, guidance applied, where the request asked for them."""

    seed: int
    image: torch.Tensor
    log_probs: torch.Tensor
    latents: torch.Tensor
    timesteps: torch.Tensor
    sigmas: torch.Tensor
    model_outputs: torch.Tensor | None = None


@dataclass
class GenerateResult:
    """Outputs in order, and the conditioning once for the request.

    conditioning: `pos.encoder_hidden_states` (L, D), `pos.pooled_projections` (P,), and the same under `neg.`
    when guidance is on; empty where it was not asked for.
    """

    outputs: list[GeneratedOutput]
    conditioning: dict[str, torch.Tensor] = field(default_factory=dict)
    engine: str = ""
    started_at: float = 0.0
    seconds: float = 0.0

    def opened(self) -> GenerateResult:
        """Itself; an engine elsewhere answers with what has to be decoded first."""
        return self


class Answer(Protocol):
    """What an engine returns for a parser to open."""

    @property
    def engine(self) -> str: ...

    @property
    def seconds(self) -> float: ...

    def opened(self) -> GenerateResult: ...


@dataclass(frozen=True)
class SyncReply:
    """What an engine holds after a push: digest of the tensors that arrived (computed from the engine's own
    parameters, not from the message), modules that took a LoRA pair, bytes, seconds."""

    engine: str
    policy_digest: str
    modules_bound: int
    bytes: int
    seconds: float


class RolloutEngine(Protocol):
    """Verbs of an engine. Each is idempotent where repeating makes sense (sleep, wake, stop). An engine that is asleep
    answers health and checksum, and raises StageError for generate and update_weights."""

    name: str

    def start(self) -> None: ...

    def health(self) -> bool: ...

    def generate(self, request: GenerateRequest) -> GenerateResult: ...

    def answer(self, request: GenerateRequest, *, describe: bool) -> Answer:
        """The same to be opened elsewhere; with `describe` it holds the conditioning."""
        ...

    def update_weights(self, adapter: bytes, *, lora_alpha: int, lora_rank: int) -> SyncReply:
        """Replace the LoRA by `adapter` (safetensors bytes, PEFT names without `base_model.model.`)."""
        ...

    def checksum(self) -> str:
        """Content digest of the adapter in force; empty string for the bare base model."""
        ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def stop(self) -> None: ...

    def when_gone(self, then: Callable[[], None]) -> None:
        """Call `then` where what computes ends on its own; an engine in this process never does."""
        ...
