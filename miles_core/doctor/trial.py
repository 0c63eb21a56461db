"""One microgroup of the recipe's first iteration through engine, trainer and engine again, in this process.

What runs is what a training runs: the same engine, parser and trainer classes on the same requests; only the store is
a temporary folder, the trainer has one rank, and the advantages are +1 and -1 in turn, whatever the reward is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from transformers.utils import logging as transformers_logging

from miles_core.config import RunConfig
from miles_core.config.folders import own_args
from miles_core.data.sample import Sample
from miles_core.errors import StageError
from miles_core.rollout.microgroup import conditioning_id
from miles_core.rollout.parsing import ParserWorker
from miles_core.rollout.protocol import GenerateRequest
from miles_core.rollout.rollout_function import sampling_params
from miles_core.rollout.step_strategies import step_seed
from miles_core.store.files import Files
from miles_core.store.parts import Part, read_bytes, write_table
from miles_core.store.schemas import ADVANTAGES
from miles_core.training.determinism import make_deterministic
from miles_core.training.messages import UpdateInputs, UpdateResult
from miles_core.training.output import ADAPTER_FILE, PROBE_FILE, short_name
from miles_core.weights.adapter_file import to_push
from miles_core.weights.digest import policy_digest
from miles_core.weights.probe import compare, probe_of, write_probe
from miles_core.weights.probe_spec import ProbeResult, ProbeSpec, probe_tolerance

if TYPE_CHECKING:
    from miles_core.doctor.subject import Subject
    from miles_core.rollout.protocol import RolloutEngine
    from miles_core.training.trainer import TrainerRank

GROUPS = 4


def trial_config(config: RunConfig) -> RunConfig:
    """The recipe for one microgroup, one optimizer step and one trainer rank."""
    return config.replace(
        rollout_batch_size=1,
        n_samples_per_prompt=config.rollout.rollout_microgroup_size,
        global_batch_size=None,
        num_steps_per_rollout=1,
        actor_num_nodes=1,
        actor_num_gpus_per_node=1,
        dp_replicate_size=1,
    )


@dataclass(frozen=True)
class Trained:
    """The trial's update, and why the trainer refused the engine's probe, where it did."""

    result: UpdateResult
    mismatch: str | None


class Trial:
    """`start` once; figures are made when they are first asked for; `end` leaves no process group behind."""

    def __init__(self, subject: Subject, engine: RolloutEngine, trainer: TrainerRank, files: Files) -> None:
        self.subject, self.config, self.files = subject, subject.config, files
        self.engine, self.trainer = engine, trainer

    def start(self) -> None:
        """Load both, write policy/init and push it."""
        make_deterministic(self.config.training.deterministic_mode, self.subject.device)
        transformers_logging.disable_progress_bar()
        self.engine.start()
        self.trainer.start()
        self.policy = self.trainer.init_policy(self.files, "policy")
        self._push(self.policy)
        self.trained_from = self.engine.checksum()

    def end(self) -> None:
        self.trainer.stop()
        self.engine.stop()

    @cached_property
    def groups(self) -> list[list[Sample]]:
        """The first groups that the run's iteration 0 draws, to be made."""
        return self.subject.draw(min(GROUPS, self.config.data.rollout_batch_size))

    @cached_property
    def trained(self) -> Trained:
        """The optimizer step on the first microgroup. Raises StageError."""
        self.subject.say("one microgroup through engine and trainer")
        inputs = self._first_microgroup()
        try:
            return Trained(self.trainer.update(self.files, inputs, "update"), None)
        except StageError as fault:
            if "train/rollout mismatch" not in str(fault):
                raise
            without = dataclasses.replace(inputs, probe=None)
            return Trained(self.trainer.update(self.files, without, "update"), str(fault))

    @cached_property
    def proof(self) -> ProbeResult:
        """The updated policy pushed to the engine: its probe against the trainer's. Raises StageError."""
        probe = next(part for part in self.trained.result.parts if short_name(part.path).endswith(PROBE_FILE))
        self._push(self.trained.result.parts)
        tolerance = probe_tolerance(self.config.training.diffusion_forward_dtype)
        try:
            return compare(self.files, self._probe(), self._probe_before, probe, tolerance)
        finally:
            self._push(self.policy)

    def images(self, noise_level: float) -> list[list[Sample]]:
        """The groups with their images, by policy/init and the recipe's seeds; noise_level 0: ODE steps alone."""
        count = sum(map(len, self.groups))
        self.subject.say(f"generating {count} images at noise level {noise_level:g}")
        return [self._generated(group, noise_level) for group in self.groups]

    @cached_property
    def noisy(self) -> list[list[Sample]]:
        """Images as the run makes them."""
        return self.images(self.config.rollout.diffusion_noise_level)

    def _generated(self, group: list[Sample], noise_level: float) -> list[Sample]:
        made = []
        for start in range(0, len(group), self.config.rollout.rollout_microgroup_size):
            microgroup = group[start : start + self.config.rollout.rollout_microgroup_size]
            request = self._request(microgroup)
            if noise_level == 0:
                request = dataclasses.replace(request, sde_type="ode", noise_level=0.0, sde_step_indices=None)
            outputs = self.engine.generate(request).outputs
            made += [
                dataclasses.replace(sample, generated_output=output.image)
                for sample, output in zip(microgroup, outputs, strict=True)
            ]
        return made

    def _request(self, microgroup: list[Sample]) -> GenerateRequest:
        args = own_args(self.config)
        return GenerateRequest(**sampling_params(args, microgroup, step_seed(args.rollout_seed, 0)))

    def _first_microgroup(self) -> UpdateInputs:
        microgroup = self.groups[0][: self.config.rollout.rollout_microgroup_size]
        request, dtype = self._request(microgroup), self.config.training.diffusion_forward_dtype
        identity = conditioning_id(request.prompt, request.negative_prompt, "", dtype)
        every = tuple(range(request.num_inference_steps))
        rows, conditioning = ParserWorker().write(
            self.files,
            self.engine.generate(request),
            request,
            "rollout/data/00000000-1.parquet",
            "rollout/latents/00000000-1.parquet",
            f"rollout/conditioning/{identity}.parquet",
            samples=[{"sample_index": s.index, "group_index": s.group_index} for s in microgroup],
            sde_steps=every if request.sde_step_indices is None else request.sde_step_indices,
            policy_digest=self.trained_from,
            policy_version=-1,
            conditioning_id=identity,
        )
        assert conditioning is not None
        return UpdateInputs(
            iteration=0,
            rollout=[rows.data],
            latents=[rows.latents],
            conditioning=[conditioning],
            advantages=[self._advantages(microgroup)],
            train_data=[],
            policy_parts=self.policy,
            policy_digest=self.trained_from,
            probe=self._probe_before,
            first_global_step=0,
        )

    def _advantages(self, microgroup: list[Sample]) -> Part:
        fixed = {"group_mean": 0.0, "group_std": 1.0, "zero_std": False, "kept": True, "reason": None}
        rows = [
            {"sample_index": s.index, "group_index": s.group_index, "raw_reward": a, "advantage": a}
            | fixed
            | {"remove_sample": False, "row_digest": ""}
            for s, a in zip(microgroup, [1.0, -1.0] * len(microgroup), strict=False)
        ]
        return write_table(self.files, "advantages.parquet", pa.Table.from_pylist(rows, schema=ADVANTAGES))

    @cached_property
    def _probe_before(self) -> Part:
        return write_probe(self.files, "rollout/probe.safetensors", self._probe())

    def _probe(self) -> Any:
        r = self.config.rollout
        request = ProbeSpec(
            height=r.diffusion_height,
            width=r.diffusion_width,
            guidance_scale=r.diffusion_guidance_scale,
            negative_prompt=self.config.negative_prompt,
            generator_device=r.diffusion_generator_device,
        ).request()
        return probe_of(request, self.engine.generate(request))

    def _push(self, parts: list[Part]) -> None:
        adapter = next(part for part in parts if short_name(part.path) == ADAPTER_FILE)
        push, lora = to_push(read_bytes(self.files, adapter)), self.config.lora
        reply = self.engine.update_weights(push, lora_alpha=lora.lora_alpha, lora_rank=lora.lora_rank)
        if reply.policy_digest != policy_digest(push):
            raise StageError("the engine holds another policy than the one that was pushed")
