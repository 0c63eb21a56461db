"""The embedded rollout engine: diffusers components in this process, no server.

It takes the seeds, steps and conditioning of sglang's /rollout/generate, so that both engines answer a request
alike: on the CPU in fp32 the model outputs of a request with one output are bit-equal where the conditioning is.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from diffusers.utils.torch_utils import randn_tensor
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from miles_core.algorithms.sde import CpsSdeStepBackend, DiffusersSdeStepBackend, SdeStepBackend, ode_step
from miles_core.errors import InputError, StageError
from miles_core.families.base import DiffusersModelBackend, EngineComponents, torch_dtype
from miles_core.families.resolve import train_pipeline_config
from miles_core.rollout.protocol import GeneratedOutput, GenerateRequest, GenerateResult, SyncReply
from miles_core.weights.digest import policy_digest

ADAPTER = "default"
CACHED_PROMPTS = 32


class DiffusersEngine:
    """A RolloutEngine (miles_core.rollout.protocol). Calls from several threads are served one after another.

    checkpoint: pipeline folder. dtype: fp32 or bf16, of the forward. The LoRA stays unmerged, as in the trainer.
    """

    def __init__(
        self,
        *,
        name: str,
        checkpoint: str,
        family: str,
        dtype: str,
        device: str,
        lora_target_modules: tuple[str, ...] | None = None,
    ) -> None:
        self.name = name
        self._checkpoint = Path(checkpoint)
        self._family = train_pipeline_config(family)
        self._dtype_name, self._dtype = dtype, torch_dtype(dtype)
        self._device = torch.device(device)
        self._targets = lora_target_modules or self._family.lora_target_modules
        self._lock = threading.RLock()
        self._components: EngineComponents | None = None
        self._asleep = False
        self._lora: _Lora | None = None
        self._prompts: OrderedDict[str, dict[str, Tensor]] = OrderedDict()

    def start(self) -> None:
        """Load the components; a second call changes nothing."""
        with self._lock:
            if self._components is not None:
                return
            components = DiffusersModelBackend().load_engine_components(self._checkpoint, self._dtype_name)
            for module in components.modules():
                module.requires_grad_(False).to(self._device)
            self._components, self._asleep = components, False
            self._lora = _Lora(components.transformer, self._targets)

    def health(self) -> bool:
        return self._components is not None

    def generate(self, request: GenerateRequest) -> GenerateResult:
        """K = num_outputs samples of one prompt as one batch; all tensors of the result lie on the CPU.

        Raises StageError where the engine is asleep or not started, InputError for a request that cannot be met.
        """
        with self._lock, torch.no_grad():
            started_at, clock = time.time(), time.perf_counter()
            components = self._awake()
            request.check_device(torch.cuda.is_available())
            steps = request.sde_steps()
            conditioning = self._conditioning(components, request)
            seen: list[Tensor] = []
            latents, log_probs, sigmas, timesteps = self._denoise(components, request, conditioning, steps, seen)
            told = torch.stack(seen, dim=1).float().cpu() if request.debug else [None] * request.num_outputs
            images = _decode(components.vae, latents[-1]).float().cpu()
            trajectory, probabilities = torch.stack(latents, dim=1).cpu(), torch.stack(log_probs, dim=1).cpu()
            ended = torch.cat([timesteps, timesteps.new_zeros(1)]).cpu()
            outputs = [
                GeneratedOutput(
                    request.seed + i, images[i], probabilities[i], trajectory[i], ended, sigmas.cpu(), told[i]
                )
                for i in range(request.num_outputs)
            ]
            return GenerateResult(
                outputs=outputs,
                conditioning={name: tensor.cpu() for name, tensor in conditioning.items()},
                engine=self.name,
                started_at=started_at,
                seconds=time.perf_counter() - clock,
            )

    def answer(self, request: GenerateRequest, *, describe: bool) -> GenerateResult:
        """What `generate` returns; the conditioning is in it either way."""
        return self.generate(request)

    def update_weights(self, adapter: bytes, *, lora_alpha: int, lora_rank: int) -> SyncReply:
        """Replace the LoRA by `adapter` (safetensors bytes, PEFT names without `base_model.model.`).

        Raises StageError, and keeps the policy in force, where the engine is asleep, a tensor is unknown, missing, of
        another shape or not finite, or where no module takes one.
        """
        clock = time.perf_counter()
        with self._lock, torch.no_grad():
            self._awake()
            lora = self._require_lora()
            try:
                tensors = load_safetensors(adapter)
            except SafetensorError as fault:
                raise StageError(f"engine {self.name}: the pushed adapter is no safetensors file ({fault})") from None
            bound = lora.replace(tensors, rank=lora_rank, alpha=lora_alpha, dtype=self._dtype, engine=self.name)
            return SyncReply(self.name, self.checksum(), bound, len(adapter), time.perf_counter() - clock)

    def checksum(self) -> str:
        """Content digest of the adapter in force, from the engine's own parameters; "" for the base model."""
        with self._lock:
            tensors = self._require_lora().tensors(self.name)
            return policy_digest(save_safetensors(tensors)) if tensors else ""

    def sleep(self) -> None:
        """Give the device's memory back; `generate` and `update_weights` are refused until `wake`."""
        with self._lock:
            self._move(torch.device("cpu"))
            self._asleep = True

    def wake(self) -> None:
        with self._lock:
            self._move(self._device)
            self._asleep = False

    def stop(self) -> None:
        with self._lock:
            self._components, self._lora, self._asleep = None, None, False
            self._prompts.clear()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def when_gone(self, then: Callable[[], None]) -> None:
        """Nothing to watch: it computes in this process."""

    def _move(self, device: torch.device) -> None:
        if self._components is None or self._device.type == "cpu":
            return
        for module in self._components.modules():
            module.to(device)
        self._prompts.clear()
        torch.cuda.empty_cache()

    def _awake(self) -> EngineComponents:
        if self._components is None:
            raise StageError(f"engine {self.name} is not started")
        if self._asleep:
            raise StageError(f"engine {self.name} is asleep: wake it before it generates or takes a policy")
        return self._components

    def _require_lora(self) -> "_Lora":
        if self._lora is None:
            raise StageError(f"engine {self.name} is not started")
        return self._lora

    def _conditioning(self, components: EngineComponents, request: GenerateRequest) -> dict[str, Tensor]:
        found = {f"pos.{k}": v for k, v in self._encoded(components, request.prompt).items()}
        if request.guided and request.negative_prompt is not None:
            found |= {f"neg.{k}": v for k, v in self._encoded(components, request.negative_prompt).items()}
        return found

    def _encoded(self, components: EngineComponents, prompt: str) -> dict[str, Tensor]:
        if prompt not in self._prompts:
            self._prompts[prompt] = self._family.encode_prompt(components, prompt)
            if len(self._prompts) > CACHED_PROMPTS:
                self._prompts.popitem(last=False)
        self._prompts.move_to_end(prompt)
        return self._prompts[prompt]

    def _denoise(
        self,
        components: EngineComponents,
        request: GenerateRequest,
        conditioning: dict[str, Tensor],
        sde_steps: frozenset[int],
        outputs: list[Tensor],
    ) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
        """latents (K, C, h, w) at all T + 1 positions and log-probs (K,) of all T steps, fp32; sigmas, timesteps.
        With request.debug the model's output at each step goes into `outputs`."""
        count, device = request.num_outputs, self._device
        shape = (count, *self._family.latent_shape(request.height, request.width))
        sigmas, timesteps = self._family.sigmas_and_timesteps(
            components.scheduler_config, request.num_inference_steps, height=request.height, width=request.width
        )
        sigmas, timesteps = sigmas.to(device), timesteps.to(device)
        batched = {k: v.expand(count, *v.shape) for k, v in conditioning.items()}
        generators = [torch.Generator(request.generator_device).manual_seed(request.seed + i) for i in range(count)]
        backend = _backend(request)
        sample = randn_tensor(shape, generator=generators, device=device, dtype=torch.float32)
        latents, log_probs = [sample], []
        for i in range(request.num_inference_steps):
            output = self._family.forward(
                components.transformer, sample, timesteps[i].expand(count), batched, request.guidance_scale, self._dtype
            )
            if request.debug:
                outputs.append(output)
            if i in sde_steps:
                noise = _noise(shape, generators).to(device)
                sample, log_prob = backend.step(output, sample, sigmas[i], sigmas[i + 1], sigmas[1], noise)
            else:
                sample, log_prob = ode_step(output, sample, sigmas[i], sigmas[i + 1]), sample.new_zeros(count)
            latents.append(sample)
            log_probs.append(log_prob)
        return latents, log_probs, sigmas, timesteps


class _Lora:
    """The adapter inside a transformer: what is expected, what is in force.

    The forward uses the parameters in the model's dtype; `_pushed` keeps the tensors as they arrived, so that the
    digest of a bf16 engine is that of the fp32 masters it was given.
    """

    def __init__(self, transformer: nn.Module, targets: tuple[str, ...]) -> None:
        self._transformer: Any = transformer
        self._targets = targets
        self._modules = {
            name: (module.in_features, module.out_features)
            for name, module in transformer.named_modules()
            if isinstance(module, nn.Linear) and any(name == t or name.endswith("." + t) for t in targets)
        }
        self._pushed: dict[str, Tensor] = {}
        self._in_force: tuple[int, int] | None = None

    def replace(self, tensors: dict[str, Tensor], *, rank: int, alpha: int, dtype: torch.dtype, engine: str) -> int:
        """Bind `tensors`, all or none; returns the number of modules that took a pair."""
        self._check(tensors, rank, engine)
        if self._in_force != (rank, alpha):
            self._wrap(rank, alpha)
        for name, tensor in tensors.items():
            parameter = self._parameter(name)
            parameter.data = tensor.to(device=parameter.device, dtype=dtype)
            parameter.requires_grad_(False)
        self._pushed = tensors
        return len(tensors) // 2

    def tensors(self, engine: str) -> dict[str, Tensor]:
        """The adapter in force by name, on the CPU; empty for the base model. Raises StageError where the
        parameters are not what was pushed."""
        held = {}
        for name, pushed in self._pushed.items():
            live = self._parameter(name).data.cpu()
            if live.dtype == pushed.dtype:
                held[name] = live.contiguous()
            elif torch.equal(live, pushed.to(live.dtype)):
                held[name] = pushed
            else:
                raise StageError(f"engine {engine}: parameter {name} is not the one that was pushed")
        return held

    def _check(self, tensors: dict[str, Tensor], rank: int, engine: str) -> None:
        expected = {}
        for module, (inputs, outputs) in self._modules.items():
            expected[f"{module}.lora_A.weight"] = (rank, inputs)
            expected[f"{module}.lora_B.weight"] = (outputs, rank)
        if not expected:
            raise StageError(f"engine {engine}: no module is called {', '.join(self._targets)}, so no adapter can bind")
        unknown, missing = sorted(set(tensors) - set(expected)), sorted(set(expected) - set(tensors))
        if unknown:
            raise StageError(f"engine {engine}: {len(unknown)} pushed tensors bind to no module, such as {unknown[0]}")
        if missing:
            raise StageError(f"engine {engine}: the push lacks {len(missing)} tensors, such as {missing[0]}")
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != expected[name]:
                raise StageError(
                    f"engine {engine}: {name} has shape {tuple(tensor.shape)} where rank {rank} needs {expected[name]}"
                )
            if not torch.isfinite(tensor).all():
                raise StageError(f"engine {engine}: {name} holds NaN or inf")

    def _wrap(self, rank: int, alpha: int) -> None:
        if self._in_force is not None:
            self._transformer.delete_adapters(ADAPTER)
        self._transformer.add_adapter(
            LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(self._targets)), adapter_name=ADAPTER
        )
        self._in_force = rank, alpha

    def _parameter(self, name: str) -> nn.Parameter:
        module, _, kind = name.removesuffix(".weight").rpartition(".")
        return cast(nn.Parameter, self._transformer.get_parameter(f"{module}.{kind}.{ADAPTER}.weight"))


def _backend(request: GenerateRequest) -> SdeStepBackend:
    if request.sde_type == "cps":
        return CpsSdeStepBackend(noise_level=request.noise_level, log_prob_no_const=request.log_prob_no_const)
    if request.sde_type in ("sde", "ode"):
        return DiffusersSdeStepBackend(
            noise_level=request.noise_level,
            log_prob_no_const=request.log_prob_no_const,
            sde_type="ode" if request.sde_type == "ode" else "sde",
        )
    raise InputError(f"--diffusion-sde-type {request.sde_type!r} is not known: choose sde, cps or ode.")


def _noise(shape: tuple[int, ...], generators: list[torch.Generator]) -> Tensor:
    """Noise (K, C, h, w), row i from generator i.

    Each generator draws for the whole batch and gives its first row: sglang's flow_rollout_controller draws so
    (`torch.randn(latents_shape, out=buffer[i : i + 1])`), which is why K is part of a sample's identity.
    """
    rows = [torch.randn(shape, generator=g, device=g.device, dtype=torch.float32)[:1] for g in generators]
    return torch.cat(rows)


def _decode(vae: Any, latents: Tensor) -> Tensor:
    """Images (K, 3, H, W) in [0, 1] of latents (K, C, h, w)."""
    scaled = latents.to(vae.dtype) / vae.config.scaling_factor + vae.config.shift_factor
    return cast(Tensor, (vae.decode(scaled, return_dict=False)[0] / 2 + 0.5).clamp(0, 1))
