"""The input files of a run, resolved, checked and digested before anything starts."""

from dataclasses import dataclass
from pathlib import Path

from miles_core.config import RunConfig
from miles_core.config.folders import home
from miles_core.data.prompts import Prompt, load_prompts, named_set, prompts_digest, resolve_prompt_path
from miles_core.errors import InputError
from miles_core.families.resolve import checkpoint_digest, family_of, resolve_checkpoint
from miles_core.rewards.ocr_models import ocr_model_dirs, ocr_models_digest
from miles_core.rewards.rm_types import components_of
from miles_core.store.digest import canonical_json, sha256_hex
from miles_core.store.stages import StageName


@dataclass(frozen=True)
class EvalSet:
    """The prompts of an evaluation, and what scores the samples made of them."""

    name: str
    prompts: tuple[Prompt, ...]
    components: tuple[str, ...]
    ocr_folders: tuple[str, str] | None
    ocr_digest: str | None

    @property
    def digest(self) -> str:
        """SHA-256 over the set's name and what its file means."""
        return sha256_hex(canonical_json([self.name, prompts_digest(self.prompts)]))


@dataclass(frozen=True)
class Inputs:
    """Everything a run reads that is not in the store. Paths enter fingerprints by their digests."""

    checkpoint: Path
    checkpoint_digest: str
    family: str
    prompt_path: Path
    prompts_digest: str
    prompts: tuple[Prompt, ...]
    components: tuple[str, ...]
    ocr_folders: tuple[str, str] | None
    ocr_digest: str | None
    evaluation: EvalSet | None = None

    def affecting(self, stage: StageName) -> dict[str, str]:
        """Digests of the input files that a stage reads, by role."""
        if stage in ("policy", "rollout", "update"):
            return {"checkpoint": self.checkpoint_digest}
        if stage == "prompts":
            return {"prompt_data": self.prompts_digest}
        if stage == "rewards" and self.ocr_digest:
            return {"ocr_models": self.ocr_digest}
        if stage == "evaluation":
            return {"checkpoint": self.checkpoint_digest} | self._of_evaluation()
        return {}

    def _of_evaluation(self) -> dict[str, str]:
        if self.evaluation is None:
            return {}
        ocr = self.evaluation.ocr_digest
        return {"eval_prompt_data": self.evaluation.digest} | ({"ocr_models": ocr} if ocr else {})

    def all(self) -> dict[str, str]:
        """Every digest that training depends on, by role."""
        return self.affecting("policy") | self.affecting("prompts") | self.affecting("rewards")


def resolve_inputs(config: RunConfig, *, evaluation: bool = True) -> Inputs:
    """Find and check every input, those of evaluation too unless told otherwise.

    Raises InputError in one sentence for what is missing or broken.
    """
    if not config.rollout.hf_checkpoint:
        raise InputError("--hf-checkpoint is missing: give a diffusers pipeline folder, or tiny:sd3")
    if not config.data.prompt_data:
        raise InputError("--prompt-data is missing: give a .jsonl or text file with prompts")
    prompt_path = resolve_prompt_path(config.data.prompt_data)
    prompts = load_prompts(
        str(prompt_path),
        input_key=config.data.input_key,
        metadata_key=config.data.metadata_key,
        rm_type=config.reward.rm_type,
    )
    components = components_of(config.reward.rm_type, (p.metadata.get("rm_type") for p in prompts))
    ocr = _ocr(config, components)
    eval_set = resolve_eval_set(config) if evaluation else None
    checkpoint = resolve_checkpoint(config.rollout.hf_checkpoint, home())
    return Inputs(
        checkpoint=checkpoint,
        checkpoint_digest=checkpoint_digest(checkpoint),
        family=config.rollout.diffusion_model_family or family_of(checkpoint),
        prompt_path=prompt_path,
        prompts_digest=prompts_digest(prompts),
        prompts=tuple(prompts),
        components=tuple(components),
        ocr_folders=ocr,
        ocr_digest=ocr_models_digest(*ocr) if ocr else None,
        evaluation=eval_set,
    )


def resolve_eval_set(config: RunConfig) -> EvalSet | None:
    """The set of --eval-prompt-data, found and checked; None where it is unset. Raises InputError."""
    if config.evaluation.eval_prompt_data is None:
        return None
    option = "--eval-prompt-data"
    name, path = named_set(config.evaluation.eval_prompt_data)
    prompts = load_prompts(
        resolve_prompt_path(path, option),
        input_key=config.data.input_key,
        metadata_key=config.data.metadata_key,
        rm_type=config.reward.rm_type,
        option=option,
    )
    components = components_of(config.reward.rm_type, (p.metadata.get("rm_type") for p in prompts))
    ocr = _ocr(config, components)
    digest = ocr_models_digest(*ocr) if ocr else None
    return EvalSet(name, tuple(prompts), tuple(components), ocr, digest)


def _ocr(config: RunConfig, components: list[str]) -> tuple[str, str] | None:
    if "ocr" not in components:
        return None
    return ocr_model_dirs(home() / "models", config.reward.ocr_det_model_dir, config.reward.ocr_rec_model_dir)
