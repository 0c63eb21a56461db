"""The trained transformer: frozen fp32 base, PEFT LoRA, FSDP2 per block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from miles_core.config import RunConfig
from miles_core.errors import StageError
from miles_core.families.base import torch_dtype

_ADAPTER = "default"


def attach_lora(
    transformer: nn.Module, *, rank: int, alpha: int, target_modules: tuple[str, ...], init: str, seed: int
) -> int:
    """Freeze the base and put a LoRA pair on each target; returns how many modules took one.

    A is drawn by PEFT (gaussian: N(0, 1/rank^2); kaiming: as nn.Linear) from `seed` alone and B is zero, so that
    every rank and every run starts from the same adapter. The caller's random state is left as it was. Raises
    StageError where no module takes the adapter: such a run would succeed and never learn.
    """
    transformer.requires_grad_(False)
    lora = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(target_modules),
        init_lora_weights=cast(Any, "gaussian" if init == "gaussian" else True),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(lora, transformer, _ADAPTER)
        except ValueError as fault:
            raise StageError(f"the LoRA bound to no module of the transformer: {fault}") from fault
    bound = len(lora_layers(transformer))
    if bound == 0:
        raise StageError(f"the LoRA bound to no module of the transformer; its targets are {', '.join(target_modules)}")
    return bound


def lora_layers(transformer: nn.Module) -> list[BaseTunerLayer]:
    """The modules that carry a LoRA pair."""
    return [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]


def shard(transformer: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, config: RunConfig) -> None:
    """FSDP2 on each block and on the root, in place.

    Masters stay fp32; forward in diffusion_forward_dtype, buffers included, as the engine holds them. Inputs are
    not cast: timesteps stay fp32.
    """
    dtype = torch_dtype(config.training.diffusion_forward_dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch_dtype(config.training.fsdp_reduce_dtype),
        cast_forward_inputs=False,
    )
    for module in transformer.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(transformer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


@contextmanager
def lora_disabled(transformer: nn.Module) -> Iterator[None]:
    """The base model inside, the policy again outside.

    PEFT's own disable_adapter also switches requires_grad off and on, which FSDP2 copies into the unsharded
    parameters when it makes them; so only the flag that the forward reads is switched.
    """
    layers = lora_layers(transformer)
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def lora_parameters(transformer: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by PEFT name (`transformer_blocks.0.attn.to_q.lora_A.weight`), in name order."""
    named = {n.replace(f".{_ADAPTER}.", "."): p for n, p in transformer.named_parameters() if p.requires_grad}
    return dict(sorted(named.items()))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor in full, on the CPU; every rank must ask at the same time."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().cpu().clone()


@torch.no_grad()
def assign(parameters: dict[str, nn.Parameter], tensors: dict[str, torch.Tensor]) -> None:
    """Copy whole tensors into (sharded) parameters. Raises StageError unless names and shapes are the same."""
    missing, foreign = sorted(set(parameters) - set(tensors)), sorted(set(tensors) - set(parameters))
    if missing or foreign:
        raise StageError(
            f"the adapter has other modules than this run's LoRA: {len(missing)} missing {missing[:2]}, "
            f"{len(foreign)} unknown {foreign[:2]}"
        )
    for name, parameter in parameters.items():
        value = tensors[name]
        if value.shape != parameter.shape:
            raise StageError(
                f"the adapter's {name} is {tuple(value.shape)}, this run's LoRA has {tuple(parameter.shape)}"
            )
    for name, parameter in parameters.items():
        value = tensors[name].to(parameter.dtype).to(parameter.device)
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(value)
