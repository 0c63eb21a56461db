"""What a model family provides, under the same names in all: components, LoRA targets, conditioning,
classifier-free guidance, timesteps, FSDP plan. One file per family beside this one."""

import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn

from miles_core.errors import InputError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LIBRARIES = ("diffusers", "transformers")


def torch_dtype(name: str) -> torch.dtype:
    """fp32 or bf16 as a torch dtype. Raises InputError."""
    if name not in _DTYPES:
        raise InputError(f"dtype {name!r} is not known: choose {' or '.join(_DTYPES)}.")
    return _DTYPES[name]


@dataclass
class EngineComponents:
    """What generation needs, in eval mode. The VAE is fp32 whatever the dtype of the rest."""

    transformer: nn.Module
    vae: nn.Module
    text_encoders: dict[str, nn.Module]
    tokenizers: dict[str, Any]
    scheduler_config: dict[str, Any]

    def modules(self) -> list[nn.Module]:
        """Every module that holds weights."""
        return [self.transformer, self.vae, *self.text_encoders.values()]


class TrainPipelineConfig(ABC):
    """A family. Trainer and embedded engine compute the model's output through the same `forward`, so that the
    importance ratio before the first optimizer step is 1 to rounding."""

    family: ClassVar[str]
    pipeline_class: ClassVar[str]
    lora_target_modules: ClassVar[tuple[str, ...]]
    latent_channels: ClassVar[int]
    vae_scale_factor: ClassVar[int]

    @abstractmethod
    def fsdp_blocks(self, transformer: nn.Module) -> list[nn.Module]:
        """Modules that `fully_shard` wraps one by one before the root."""

    @abstractmethod
    def encode_prompt(self, components: EngineComponents, prompt: str) -> dict[str, torch.Tensor]:
        """Conditioning of one text by name, without a batch dimension, in the text encoders' dtype."""

    @abstractmethod
    def model_output(
        self,
        transformer: nn.Module,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """One forward: latents (B, C, h, w) and conditioning (B, ...) in the weights' dtype, timesteps (B,) fp32."""

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(C, h, w) of an image of `height` x `width` pixels."""
        return self.latent_channels, height // self.vae_scale_factor, width // self.vae_scale_factor

    def sigmas_and_timesteps(
        self, scheduler_config: Mapping[str, Any], num_steps: int, *, height: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """sigmas (T + 1,), last 0, and timesteps (T,), fp32 on the CPU, as diffusers'
        FlowMatchEulerDiscreteScheduler.set_timesteps gives them."""
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(dict(scheduler_config))
        scheduler.set_timesteps(num_steps, mu=self.dynamic_shift(scheduler.config, height, width))
        return scheduler.sigmas, scheduler.timesteps

    def dynamic_shift(self, scheduler_config: Mapping[str, Any], height: int, width: int) -> float | None:
        """mu of a schedule that depends on the resolution; None where the shift is fixed."""
        if scheduler_config.get("use_dynamic_shifting"):
            raise InputError(
                f"{self.family} with use_dynamic_shifting in its scheduler is not supported: use a fixed shift."
            )
        return None

    def forward(
        self,
        transformer: nn.Module,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        conditioning: Mapping[str, torch.Tensor],
        guidance_scale: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Model output with classifier-free guidance, (B, C, h, w) fp32.

        latents (B, C, h, w), timesteps (B,), conditioning `pos.<name>` and `neg.<name>` (B, ...). Guidance is on
        when there is a `neg.` and `guidance_scale` > 1: neg + g (pos - neg). As sglang's CFGPolicy does it: one
        forward a branch, positive first, combined in `dtype`; no autocast.
        """
        latents, timesteps = latents.to(dtype), timesteps.to(torch.float32)
        branches = ["pos", "neg"] if guidance_scale > 1 and any(k.startswith("neg.") for k in conditioning) else ["pos"]
        outputs = [
            self.model_output(transformer, latents, timesteps, _branch(conditioning, name, dtype)) for name in branches
        ]
        if len(outputs) == 1:
            return outputs[0].float()
        pos, neg = outputs
        return (neg + guidance_scale * (pos - neg)).float()


class DiffusersModelBackend:
    """Loads the components of a diffusers pipeline folder; never reaches for a hub."""

    def load_transformer(self, folder: Path, dtype: str) -> nn.Module:
        """The denoiser, in eval mode, weights and buffers in `dtype`, on the CPU."""
        return self._module(Path(folder), "transformer", torch_dtype(dtype))

    def load_engine_components(self, folder: Path, dtype: str) -> EngineComponents:
        """All that generation needs, on the CPU. Raises InputError where the folder lacks a component."""
        folder = Path(folder)
        index = _index(folder)
        encoders = sorted(name for name, entry in index.items() if name.startswith("text_encoder") and entry[1])
        return EngineComponents(
            transformer=self.load_transformer(folder, dtype),
            vae=self._module(folder, "vae", torch.float32),
            text_encoders={name: self._module(folder, name, torch_dtype(dtype)) for name in encoders},
            tokenizers=self.load_tokenizers(folder),
            scheduler_config=json.loads((folder / "scheduler" / "scheduler_config.json").read_text()),
        )

    def load_tokenizers(self, folder: Path) -> dict[str, Any]:
        """The tokenizers by the folder's name (tokenizer, tokenizer_2, …)."""
        names = sorted(name for name, entry in _index(folder).items() if name.startswith("tokenizer") and entry[1])
        return {
            name: self._component(folder, name).from_pretrained(folder / name, local_files_only=True) for name in names
        }

    def _module(self, folder: Path, name: str, dtype: torch.dtype) -> nn.Module:
        kind = self._component(folder, name)
        keyword = "torch_dtype" if kind.__module__.startswith("diffusers") else "dtype"
        module = kind.from_pretrained(folder / name, local_files_only=True, use_safetensors=True, **{keyword: dtype})
        return cast(nn.Module, module).eval()

    def _component(self, folder: Path, name: str) -> Any:
        library, kind = _index(folder).get(name) or ("", "")
        if library not in _LIBRARIES or not (folder / name).is_dir():
            raise InputError(
                f"{folder} has no {name} of diffusers or transformers: give a complete diffusers pipeline."
            )
        return getattr(importlib.import_module(library), kind)


def _index(folder: Path) -> dict[str, list[str]]:
    index = json.loads((folder / "model_index.json").read_text())
    return {name: entry for name, entry in index.items() if isinstance(entry, list)}


def _branch(conditioning: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    prefix = name + "."
    return {k.removeprefix(prefix): v.to(dtype) for k, v in conditioning.items() if k.startswith(prefix)}
