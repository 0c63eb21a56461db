"""RunConfig: one checked configuration of a run; its flat view is the `args` of hooks."""

from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from miles_core.config.base import Group
from miles_core.config.groups import (
    AlgorithmGroup,
    ClusterGroup,
    DataGroup,
    DebugGroup,
    EvaluationGroup,
    LoraGroup,
    OptimizerGroup,
    RewardGroup,
    RolloutGroup,
    RunGroup,
    TrainingGroup,
)
from miles_core.config.guard import GuardGroup
from miles_core.config.logging_groups import LoggingGroup
from miles_core.config.sampling import NONZERO_STD, SamplingGroup
from miles_core.errors import InputError
from miles_core.store.stages import StageName


class RunConfig(Group):
    """All fields of a run, grouped by concern and validated together."""

    run: RunGroup = Field(default_factory=RunGroup)
    cluster: ClusterGroup = Field(default_factory=ClusterGroup)
    training: TrainingGroup = Field(default_factory=TrainingGroup)
    optimizer: OptimizerGroup = Field(default_factory=OptimizerGroup)
    rollout: RolloutGroup = Field(default_factory=RolloutGroup)
    data: DataGroup = Field(default_factory=DataGroup)
    sampling: SamplingGroup = Field(default_factory=SamplingGroup)
    algorithm: AlgorithmGroup = Field(default_factory=AlgorithmGroup)
    reward: RewardGroup = Field(default_factory=RewardGroup)
    lora: LoraGroup = Field(default_factory=LoraGroup)
    evaluation: EvaluationGroup = Field(default_factory=EvaluationGroup)
    debug: DebugGroup = Field(default_factory=DebugGroup)
    guard: GuardGroup = Field(default_factory=GuardGroup)
    logging: LoggingGroup = Field(default_factory=LoggingGroup)

    @property
    def samples_per_rollout(self) -> int:
        """Samples an iteration: rollout_batch_size x n_samples_per_prompt."""
        return self.data.rollout_batch_size * self.data.n_samples_per_prompt

    @property
    def global_batch_size(self) -> int:
        """Samples an optimizer step, derived where it is not given."""
        return self.data.global_batch_size or self.samples_per_rollout // (self.data.num_steps_per_rollout or 1)

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps an iteration."""
        return self.samples_per_rollout // self.global_batch_size

    @property
    def over_sampling_batch_size(self) -> int:
        """Prompts a wave."""
        return self.sampling.over_sampling_batch_size or self.data.rollout_batch_size

    @property
    def in_waves(self) -> bool:
        """Whether prompts are drawn in waves, each generated and scored before it is known whether another is needed."""
        filtered = self.sampling.dynamic_sampling_filter_path is not None
        return filtered or self.over_sampling_batch_size > self.data.rollout_batch_size

    @property
    def idle(self) -> frozenset[str]:
        """Fields that no result depends on as the others are: a wave's size where there are none, a filter that is unset."""
        sizes = () if self.in_waves else ("over_sampling_batch_size",)
        filters = () if self.sampling.dynamic_sampling_filter_path else ("dynamic_sampling_filter_path",)
        return frozenset((*sizes, *filters))

    @property
    def eval_num_steps(self) -> int:
        """Denoising steps of evaluation."""
        return self.evaluation.diffusion_eval_num_steps or self.rollout.diffusion_num_steps

    @property
    def scorers(self) -> tuple[str, ...]:
        """The run's own: --rm-types, else --rm-type; a prompt's metadata may name another in the place of the latter."""
        return self.reward.rm_types or ((self.reward.rm_type,) if self.reward.rm_type else ())

    @property
    def negative_prompt(self) -> str | None:
        """Negative prompt of the guidance; None where guidance is off."""
        return (self.rollout.diffusion_negative_prompt or "") if self.rollout.diffusion_guidance_scale > 1 else None

    @property
    def ref_mode(self) -> str:
        """none or lora_base."""
        return self.algorithm.ref_mode or ("lora_base" if self.algorithm.diffusion_kl_beta > 0 else "none")

    @property
    def compares_outputs(self) -> bool:
        """Whether model outputs are kept and compared (--diffusion-debug-mode)."""
        return self.debug.diffusion_debug_mode or self.debug.debug_alignment

    @property
    def skips_optimizer_step(self) -> bool:
        """Whether the policy is left as it is (--debug-skip-optimizer-step)."""
        return self.debug.debug_skip_optimizer_step or self.debug.debug_alignment

    @model_validator(mode="after")
    def _together(self) -> "RunConfig":
        for check in CHECKS:
            check(self)
        return self

    def flat(self) -> dict[str, Any]:
        """Every field by its flag's name, derived ones filled in."""
        values = {name: getattr(getattr(self, group), name) for name, (group, _) in FIELDS.items()}
        values |= {
            "global_batch_size": self.global_batch_size,
            "num_steps_per_rollout": self.steps_per_rollout,
            "over_sampling_batch_size": self.over_sampling_batch_size,
            "ref_mode": self.ref_mode,
            "diffusion_eval_num_steps": self.eval_num_steps,
            "diffusion_debug_mode": self.compares_outputs,
            "debug_skip_optimizer_step": self.skips_optimizer_step,
            "debug_alignment": self.compares_outputs and self.skips_optimizer_step,
        }
        return values

    def args(self) -> SimpleNamespace:
        """The flat view that hooks receive."""
        return SimpleNamespace(**self.flat())

    @property
    def own_code(self) -> dict[str, str]:
        """Dotted paths of the user's own functions, by field."""
        flat, strategy, group_filter = self.flat(), "diffusion_step_strategy_path", "dynamic_sampling_filter_path"
        own = {
            strategy: strategy_name(flat[strategy]) == OWN,
            group_filter: flat[group_filter] not in (None, NONZERO_STD),
        }
        return {name: flat[name] for name in FIELDS if own.get(name, is_code(name) and flat[name])}

    def affecting(self, stage: StageName) -> dict[str, Any]:
        """The fields, by name, that `stage`'s result depends on, as JSON values."""
        flat, stages = self.flat(), set(depending(stage, in_waves=self.in_waves))
        named = (name for name in FIELDS if stages & set(affects(name)) and not by_content(name))
        return {name: _json(flat[name]) for name in named if name not in self.idle}

    def replace(self, **changes: Any) -> "RunConfig":
        """A new configuration with these flat fields changed, validated as a whole.

        Raises InputError in one sentence that names the flag.
        """
        nested: dict[str, dict[str, Any]] = {g: {} for g in GROUPS}
        for name, (group, _) in FIELDS.items():
            nested[group][name] = changes.get(name, getattr(getattr(self, group), name))
        return build(nested)


GROUPS: dict[str, type[Group]] = {
    name: cast(type[Group], info.annotation) for name, info in RunConfig.model_fields.items()
}
FIELDS: dict[str, tuple[str, FieldInfo]] = {
    name: (group, info) for group, kind in GROUPS.items() for name, info in kind.model_fields.items()
}


def affects(name: str) -> tuple[StageName, ...]:
    """Stages whose result depends on the field directly."""
    extra = cast(dict[str, Any], FIELDS[name][1].json_schema_extra)
    return tuple(extra["affects"])


def depending(stage: StageName, *, in_waves: bool) -> tuple[StageName, ...]:
    """The stages whose options a stage's result depends on: its own, and for prompts that are drawn in waves those of what
    is generated and scored."""
    return ("prompts", "rollout", "rewards") if stage == "prompts" and in_waves else (stage,)


def is_code(name: str) -> bool:
    """Whether the field is the dotted path of a user's own function."""
    return bool(cast(dict[str, Any], FIELDS[name][1].json_schema_extra)["code"])


def by_content(name: str) -> bool:
    """Whether the field is a path that counts by what it names."""
    extra = cast(dict[str, Any], FIELDS[name][1].json_schema_extra)
    return bool(extra["by_content"])


def choices(name: str) -> tuple[str, ...]:
    """The words that the field takes, where it takes no others; else none."""
    kind = FIELDS[name][1].annotation
    kinds = get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is Union else (kind,)
    return tuple(word for one in kinds if get_origin(one) is Literal for word in get_args(one))


def meaning(name: str) -> str:
    """The field's sentence, with its choices."""
    words = choices(name)
    listed = f". {'One of' if len(words) > 1 else 'Only'} {', '.join(words)}" if words else ""
    return f"{FIELDS[name][1].description or ''}{listed}"


def build(nested: dict[str, dict[str, Any]]) -> RunConfig:
    """RunConfig from grouped values; the first fault becomes one sentence."""
    try:
        return RunConfig.model_validate(nested)
    except ValidationError as fault:
        raise InputError(_sentence(fault)) from None


def flag(name: str) -> str:
    """--kebab-case of a field's name."""
    return "--" + name.replace("_", "-")


def _sentence(fault: ValidationError) -> str:
    first = fault.errors()[0]
    place, message = first["loc"], first["msg"].removeprefix("Value error, ")
    if len(place) < 2:
        return message
    message = message[0].lower() + message[1:]
    return f"{flag(str(place[1]))} {first['input']!r}: {message}."


def _json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


from miles_core.config.checks import CHECKS, OWN, strategy_name  # noqa: E402  checks read RunConfig's type
