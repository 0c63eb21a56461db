"""The rollout loop: groups into microgroups, each generated once, all at the same time.

The functions here stand where the hooks --rollout-function-path and --custom-generate-function-path stand, and
are called with their arguments.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles_core.config import flag
from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.rollout.protocol import GenerateRequest
from miles_core.rollout.step_strategies import select_strategy, step_seed
from miles_core.user_code import load_own, own_function


@dataclass
class RolloutFnTrainOutput:
    """What a rollout function returns: groups of samples, and metrics of its own."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass
class RolloutFnEvalOutput:
    """What a rollout function returns of an evaluation: samples by set (`{name: {"samples": […]}}`), and metrics of its own."""

    data: dict[str, dict[str, Any]]
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
    """Generate over_sampling_batch_size groups. Default of --rollout-function-path."""
    groups = data_source.get_samples(args.over_sampling_batch_size)
    asyncio.run(_generate_groups(args, rollout_id, groups, evaluation))
    return RolloutFnTrainOutput(groups)


def run_rollout(
    args: Any, rollout_id: int, data_source: DataSource, groups: list[list[Sample]], *, evaluation: bool = False
) -> None:
    """The user's --rollout-function-path (--eval-function-path in an evaluation) over `groups`, the samples that `data_source`
    will give; generate_rollout where there is none. Raises StageError where it raises or leaves out a sample."""
    option = "eval_function_path" if evaluation and args.eval_function_path else "rollout_function_path"
    function = load_own(option, args)
    if function is None:
        generate_rollout(args, rollout_id, data_source, evaluation)
        return
    drawn = [sample.index for group in groups for sample in group]
    who, of = f"{flag(option)} {getattr(args, option)}", f"on samples {min(drawn)}..{max(drawn)}"
    try:
        output = call_rollout_fn(function, args, rollout_id, data_source, evaluation=evaluation)
    except* StageError as failures:
        raise _first(failures) from None
    except* Exception as failures:
        fault = _first(failures)
        raise StageError(
            f"{who} failed {of}: {type(fault).__name__}: {fault}; mend it and run the same command again"
        ) from fault
    returned = _indices(output)
    if returned is None or sorted(returned) != sorted(drawn):
        told = "something else" if returned is None else f"{len(returned)} samples"
        raise StageError(
            f"{who} returned {told} for the {len(drawn)} samples {min(drawn)}..{max(drawn)}: take the groups of "
            "data_source.get_samples and return all of them once, as RolloutFnTrainOutput(samples=groups)"
        )


def call_rollout_fn(
    function: Callable[..., Any], args: Any, rollout_id: int, data_source: DataSource, *, evaluation: bool = False
) -> Any:
    """A rollout function's output, a list (of groups) or a dict (of evaluation sets) wrapped. One that takes no `evaluation`
    is not given it."""
    takes = inspect.signature(function).parameters.values()
    named = any(p.name == "evaluation" or p.kind is p.VAR_KEYWORD for p in takes)
    output = function(args, rollout_id, data_source, **({"evaluation": evaluation} if named else {}))
    if isinstance(output, list):
        return RolloutFnTrainOutput(output)
    return RolloutFnEvalOutput(output) if isinstance(output, dict) else output


def _indices(output: Any) -> list[int] | None:
    """Indices of the samples that a rollout function returned; None where it is no such output."""
    if isinstance(output, RolloutFnEvalOutput):
        sets = [one.get("samples") if isinstance(one, dict) else None for one in output.data.values()]
        groups: Any = [one if isinstance(one, list) else [None] for one in sets]
    elif isinstance(output, RolloutFnTrainOutput):
        groups = output.samples
    else:
        return None
    flat = [s for group in groups for s in (group if isinstance(group, list) else [group])]
    flat = [s for one in flat for s in (one if isinstance(one, list) else [one])]
    return [s.index for s in flat] if all(isinstance(s, Sample) for s in flat) else None


def _first(failures: BaseExceptionGroup) -> BaseException:
    error: BaseException = failures
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _generate_groups(args: Any, rollout_id: int, groups: list[list[Sample]], evaluation: bool) -> None:
    size = args.rollout_microgroup_size
    seed, generate = step_seed(args.rollout_seed, rollout_id), select_generate(args)
    async with asyncio.TaskGroup() as tasks:
        for group in groups:
            for start in range(0, len(group), size):
                microgroup = group[start : start + size]
                params = sampling_params(args, microgroup, seed)
                tasks.create_task(generate(args, microgroup, params, evaluation=evaluation))


async def generate_microgroup(
    args: Any, microgroup: list[Sample], sampling_params: dict[str, Any], *, evaluation: bool = False
) -> list[Sample]:
    """Generate one microgroup by one request. Default of --custom-generate-function-path.

    The samples' tensors go from the engine into the store; they do not pass through here.
    """
    await GENERATOR.get().generate(GenerateRequest(**sampling_params), microgroup)
    return microgroup


def select_generate(args: Any) -> Callable[..., Coroutine[Any, Any, list[Sample]]]:
    """What generates one microgroup: generate_microgroup, or the user's --custom-generate-function-path, which calls it."""
    function = own_function("custom_generate_function_path", args)
    if function is None:
        return generate_microgroup
    takes = inspect.signature(function).parameters.values()
    named = any(p.name == "evaluation" or p.kind is p.VAR_KEYWORD for p in takes)
    who = f"--custom-generate-function-path {args.custom_generate_function_path}"

    async def generate(
        args: Any, microgroup: list[Sample], params: dict[str, Any], *, evaluation: bool
    ) -> list[Sample]:
        one = _OneMicrogroup(GENERATOR.get(), who, params)
        GENERATOR.set(one)
        answer: Any = await function(args, microgroup, params, **({"evaluation": evaluation} if named else {}))
        if not one.made or not isinstance(answer, list) or len(answer) != len(microgroup):
            raise StageError(
                f"{who} returned {len(answer) if isinstance(answer, list) else type(answer).__name__} for {len(microgroup)} "
                "samples, or generated nothing: await generate_microgroup(args, microgroup, sampling_params) and return its list"
            )
        return answer

    return generate


class _OneMicrogroup:
    """The generator that a user's function meets: it makes the microgroup that the function was given."""

    def __init__(self, inner: Generator, who: str, params: Mapping[str, Any]) -> None:
        self._inner, self._who, self.made = inner, who, False
        self._fixed = {name: params[name] for name in ("prompt", "seed", "num_outputs")}

    async def generate(self, request: GenerateRequest, microgroup: list[Sample]) -> None:
        for name, value in self._fixed.items():
            if getattr(request, name) != value:
                raise StageError(
                    f"{self._who} changed {name} from {value!r} to {getattr(request, name)!r}: the store knows its samples by "
                    "that, leave it"
                )
        await self._inner.generate(request, microgroup)
        self.made = True


def sampling_params(args: Any, microgroup: list[Sample], seed: int) -> dict[str, Any]:
    """A request's fields for a microgroup; `seed` keys the step strategy by iteration."""
    first = microgroup[0]
    steps = _sde_steps(args, microgroup, seed)
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
        "sde_step_indices": steps,
        "generator_device": args.diffusion_generator_device,
        "debug": args.diffusion_debug_mode,
    }


def _sde_steps(args: Any, microgroup: list[Sample], seed: int) -> tuple[int, ...] | None:
    """The SDE steps of a request, which are one for its samples. Raises StageError for an answer that is none."""
    strategy = select_strategy(args)
    found = {_steps(strategy(args, sample, args.diffusion_num_steps, seed), args) for sample in microgroup}
    if len(found) > 1:
        raise StageError(
            f"--diffusion-step-strategy-path {args.diffusion_step_strategy_path} gives the samples of one microgroup different "
            "steps: let the seed alone decide, or give --rollout-microgroup-size 1"
        )
    return found.pop()


def _steps(answer: Any, args: Any) -> tuple[int, ...] | None:
    last, who = args.diffusion_num_steps - 1, f"--diffusion-step-strategy-path {args.diffusion_step_strategy_path}"
    if not isinstance(answer, tuple | list) or len(answer) != 2 or answer[1] is not None:
        raise StageError(f"{who} returned {answer!r}: return (sde_step_indices, None)")
    if answer[0] is None:
        return None
    steps = tuple(int(step) for step in answer[0])
    if not steps or len(set(steps)) != len(steps) or not all(0 <= step <= last for step in steps):
        raise StageError(
            f"{who} returned the steps {list(steps)}: return distinct ones of 0..{last}, one at least, or None for all"
        )
    return tuple(sorted(steps))
