"""The input files of a run, resolved, checked and digested before anything starts."""

from dataclasses import dataclass
from pathlib import Path

from miles_core.config import RunConfig
from miles_core.config.folders import home
from miles_core.data.prompts import Prompt, load_prompts, prompts_digest, resolve_prompt_path
from miles_core.errors import InputError
from miles_core.families.resolve import checkpoint_digest, family_of, resolve_checkpoint
from miles_core.rewards.ocr_models import ocr_model_dirs, ocr_models_digest
from miles_core.rewards.rm_types import components_of
from miles_core.store.stages import StageName


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

    def affecting(self, stage: StageName) -> dict[str, str]:
        """Digests of the input files that a stage reads, by role."""
        if stage in ("policy", "rollout", "update"):
            return {"checkpoint": self.checkpoint_digest}
        if stage == "prompts":
            return {"prompt_data": self.prompts_digest}
        if stage == "rewards" and self.ocr_digest:
            return {"ocr_models": self.ocr_digest}
        return {}

    def all(self) -> dict[str, str]:
        """Every digest, by role."""
        return self.affecting("policy") | self.affecting("prompts") | self.affecting("rewards")


def resolve_inputs(config: RunConfig) -> Inputs:
    """Find and check every input. Raises InputError in one sentence for what is missing or broken."""
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
    ocr = None
    if "ocr" in components:
        ocr = ocr_model_dirs(home() / "models", config.reward.ocr_det_model_dir, config.reward.ocr_rec_model_dir)
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
    )
