"""The input files of a run, resolved, checked and digested before anything starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from miles_core.config import RunConfig, affects, depending
from miles_core.config.folders import code_path, home
from miles_core.data.prompts import Prompt, load_prompts, named_sets, prompts_digest, resolve_prompt_path
from miles_core.errors import InputError
from miles_core.families.resolve import checkpoint_digest, family_of, resolve_checkpoint
from miles_core.pipeline.source import reads_prompt_file
from miles_core.rewards.ocr_models import ocr_model_dirs, ocr_models_digest
from miles_core.rewards.pickscore_models import PickFolders, pick_folders
from miles_core.rewards.remote import REMOTE, check_rm_url
from miles_core.rewards.rm_types import CUSTOM, components_of
from miles_core.rollout.sglang.texts import text_tokens
from miles_core.store.digest import canonical_json, sha256_hex
from miles_core.store.stages import StageName
from miles_core.user_code import hook_digest, load_hook


@dataclass(frozen=True)
class EvalSet:
    """The prompts of an evaluation, and what scores the samples made of them.

    sets: (name, number of prompts) of each named set; their prompts follow each other, numbered through from 0.
    """

    sets: tuple[tuple[str, int], ...]
    prompts: tuple[Prompt, ...]
    components: tuple[str, ...]
    ocr_folders: tuple[str, str] | None
    ocr_digest: str | None
    pickscore: PickFolders | None = None

    @property
    def digest(self) -> str:
        """SHA-256 over the sets' names and sizes and what their files mean; of a single set its name alone."""
        named: object = self.sets[0][0] if len(self.sets) == 1 else [list(each) for each in self.sets]
        return sha256_hex(canonical_json([named, prompts_digest(self.prompts)]))

    def set_of(self, prompt_index: int) -> str:
        """Name of the set that a prompt belongs to."""
        ends = accumulate(count for _, count in self.sets)
        return next(name for (name, _), end in zip(self.sets, ends, strict=True) if prompt_index < end)


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
    pickscore: PickFolders | None = None
    hooks: Mapping[str, str] = field(default_factory=dict)
    in_waves: bool = False

    def affecting(self, stage: StageName) -> dict[str, str]:
        """Digests of the input files that a stage reads, and of the user's functions that it calls, by role."""
        found: dict[str, str] = {}
        for one in depending(stage, in_waves=self.in_waves):
            found |= self._files(one) | {n: digest for n, digest in self.hooks.items() if one in affects(n)}
        return found

    def _files(self, stage: StageName) -> dict[str, str]:
        if stage in ("policy", "rollout", "update"):
            return {"checkpoint": self.checkpoint_digest}
        if stage == "prompts":
            return {"prompt_data": self.prompts_digest}
        if stage == "rewards":
            return _of_scorers(self)
        if stage == "evaluation":
            return {"checkpoint": self.checkpoint_digest} | self._of_evaluation()
        return {}

    def _of_evaluation(self) -> dict[str, str]:
        if self.evaluation is None:
            return {}
        return {"eval_prompt_data": self.evaluation.digest} | _of_scorers(self.evaluation)

    def all(self) -> dict[str, str]:
        """Every digest that training depends on, by role."""
        stages: tuple[StageName, ...] = ("policy", "prompts", "rollout", "rewards", "advantages", "update")
        return {role: digest for stage in stages for role, digest in self.affecting(stage).items()}


def _of_scorers(scored: Inputs | EvalSet) -> dict[str, str]:
    ocr = {"ocr_models": scored.ocr_digest} if scored.ocr_digest else {}
    return ocr | ({"pickscore": scored.pickscore.digest} if scored.pickscore else {})


def resolve_inputs(config: RunConfig, *, evaluation: bool = True) -> Inputs:
    """Find and check every input, those of evaluation too unless told otherwise.

    Raises InputError in one sentence for what is missing or broken.
    """
    if not config.rollout.hf_checkpoint:
        raise InputError("--hf-checkpoint is missing: give a diffusers pipeline folder, tiny:words or tiny:sd3")
    prompt_path, prompts, digest = _prompts(config)
    components = _components(config, prompts)
    ocr = _ocr(config, components)
    eval_set = resolve_eval_set(config) if evaluation else None
    checkpoint = resolve_checkpoint(config.rollout.hf_checkpoint, home())
    family = config.rollout.diffusion_model_family or family_of(checkpoint)
    if config.cluster.rollout_engine == "sglang":
        text_tokens(checkpoint, family, guided=config.negative_prompt is not None)
    return Inputs(
        checkpoint=checkpoint,
        checkpoint_digest=checkpoint_digest(checkpoint),
        family=family,
        prompt_path=prompt_path,
        prompts_digest=digest,
        prompts=tuple(prompts),
        components=tuple(components),
        ocr_folders=ocr,
        ocr_digest=ocr_models_digest(*ocr) if ocr else None,
        evaluation=eval_set,
        pickscore=_pickscore(config, components),
        hooks=_hooks(config),
        in_waves=config.in_waves,
    )


def _prompts(config: RunConfig) -> tuple[Path, list[Prompt], str]:
    """--prompt-data, its prompts, and the digest of what it means. An own data source reads it its own way, where it is given:
    then it counts by its bytes."""
    if not config.data.prompt_data and not reads_prompt_file(config):
        return Path(), [], prompts_digest([])
    if not config.data.prompt_data:
        raise InputError("--prompt-data is missing: give a .jsonl or text file with prompts")
    path = resolve_prompt_path(config.data.prompt_data)
    if not reads_prompt_file(config):
        return path, [], _bytes_digest(path)
    prompts = load_prompts(
        str(path),
        input_key=config.data.input_key,
        metadata_key=config.data.metadata_key,
        rm_type=config.reward.rm_type,
        rm_types=config.reward.rm_types,
        custom=config.reward.custom_rm_path is not None,
    )
    return path, prompts, prompts_digest(prompts)


def _bytes_digest(path: Path) -> str:
    """SHA-256 over a file, or over the names and contents of a folder's files."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    try:
        found = {file.relative_to(path).as_posix(): sha256_hex(file.read_bytes()) for file in files}
    except OSError as fault:
        raise InputError(
            f"--prompt-data {path} cannot be read ({fault.strerror}): give what can, or leave it out"
        ) from None
    return sha256_hex(canonical_json(found))


def resolve_eval_set(config: RunConfig) -> EvalSet | None:
    """The sets of --eval-prompt-data, found and checked; None where it is unset. Raises InputError."""
    if config.evaluation.eval_prompt_data is None:
        return None
    option = "--eval-prompt-data"
    sets: list[tuple[str, int]] = []
    prompts: list[Prompt] = []
    for name, path in named_sets(config.evaluation.eval_prompt_data):
        held = load_prompts(
            resolve_prompt_path(path, option),
            input_key=config.data.input_key,
            metadata_key=config.data.metadata_key,
            rm_type=config.reward.rm_type,
            rm_types=config.reward.rm_types,
            custom=config.reward.custom_rm_path is not None,
            option=option,
        )
        prompts += [replace(prompt, index=len(prompts) + prompt.index) for prompt in held]
        sets.append((name, len(held)))
    components = _components(config, prompts)
    ocr = _ocr(config, components)
    digest = ocr_models_digest(*ocr) if ocr else None
    return EvalSet(tuple(sets), tuple(prompts), tuple(components), ocr, digest, _pickscore(config, components))


def _components(config: RunConfig, prompts: Sequence[Prompt]) -> list[str]:
    if config.reward.custom_rm_path is not None:
        return [CUSTOM]
    named = [p.metadata.get("rm_type") for p in prompts] or [None]
    found = sorted(config.reward.rm_types) if config.reward.rm_types else components_of(config.reward.rm_type, named)
    if REMOTE in found:
        check_rm_url(config.reward.rm_url)
    return found


def _hooks(config: RunConfig) -> dict[str, str]:
    """Digests of the user's own functions, by option, each found to be what stands in its place. Raises InputError."""
    found, where = {}, code_path(config)
    for name, path in config.own_code.items():
        load_hook(name, path, where)
        found[name] = hook_digest(name, path, where)
    return found


def _ocr(config: RunConfig, components: list[str]) -> tuple[str, str] | None:
    if "ocr" not in components:
        return None
    return ocr_model_dirs(home() / "models", config.reward.ocr_det_model_dir, config.reward.ocr_rec_model_dir)


def _pickscore(config: RunConfig, components: list[str]) -> PickFolders | None:
    if "pickscore" not in components:
        return None
    return pick_folders(config.reward.pickscore_model_path, config.reward.pickscore_processor_path)
