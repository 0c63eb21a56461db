"""The rollout loop: groups into microgroups, each generated once, all at the same time.

The functions here stand where the hooks --rollout-function-path and --custom-generate-function-path stand, and
are called with their arguments.
"""

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles_core.data.sample import Sample
from miles_core.errors import InputError
from miles_core.rollout.protocol import GenerateRequest
from miles_core.rollout.step_strategies import select_strategy, step_seed


@dataclass
class RolloutFnTrainOutput:
    """What a rollout function returns: groups of samples, and metrics of its own."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] = field(default_factory=dict)


class DataSource(Protocol):
    """Where a rollout function takes its groups from."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]: ...


class Generator(Protocol):
    """Where a microgroup is generated, parsed and written."""

    async def generate(self, request: GenerateRequest, microgroup: list[Sample]) -> None: ...


GENERATOR: ContextVar[Generator] = ContextVar("generator")


def generate_rollout(
    args: Any, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """Generate rollout_batch_size groups. Default of --rollout-function-path."""
    groups = data_source.get_samples(args.rollout_batch_size)
    asyncio.run(_generate_groups(args, rollout_id, groups, evaluation))
    return RolloutFnTrainOutput(groups)


async def _generate_groups(args: Any, rollout_id: int, groups: list[list[Sample]], evaluation: bool) -> None:
    size = args.rollout_microgroup_size
    seed = step_seed(args.rollout_seed, rollout_id)
    async with asyncio.TaskGroup() as tasks:
        for group in groups:
            for start in range(0, len(group), size):
                microgroup = group[start : start + size]
                params = sampling_params(args, microgroup, seed)
                tasks.create_task(generate_microgroup(args, microgroup, params, evaluation=evaluation))


async def generate_microgroup(
    args: Any, microgroup: list[Sample], sampling_params: dict[str, Any], *, evaluation: bool = False
) -> list[Sample]:
    """Generate one microgroup by one request. Default of --custom-generate-function-path.

    The samples' tensors go from the engine into the store; they do not pass through here.
    """
    await GENERATOR.get().generate(GenerateRequest(**sampling_params), microgroup)
    return microgroup


def sampling_params(args: Any, microgroup: list[Sample], seed: int) -> dict[str, Any]:
    """A request's fields for a microgroup; `seed` keys the step strategy by iteration."""
    first = microgroup[0]
    steps, returned = select_strategy(args)(args, first, args.diffusion_num_steps, seed)
    if returned is not None:
        raise InputError("the step strategy returns return_step_indices, which must be None: return (indices, None)")
    guided = args.diffusion_guidance_scale > 1
    return {
        "prompt": first.prompt,
        "negative_prompt": (args.diffusion_negative_prompt or "") if guided else None,
        "seed": first.seed,
        "num_outputs": len(microgroup),
        "height": args.diffusion_height,
        "width": args.diffusion_width,
        "num_inference_steps": args.diffusion_num_steps,
        "guidance_scale": args.diffusion_guidance_scale,
        "sde_type": args.diffusion_sde_type,
        "noise_level": args.diffusion_noise_level,
        "log_prob_no_const": args.diffusion_log_prob_no_const,
        "sde_step_indices": None if steps is None else tuple(steps),
        "generator_device": args.diffusion_generator_device,
        "debug": args.diffusion_debug_mode,
    }
