"""Rollouts and advantages as the pipeline commits them, made by the embedded engine on a tiny SD3."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors.torch import load

from miles_core.config import RunConfig
from miles_core.config.run_config import build
from miles_core.rollout.diffusers_engine import DiffusersEngine
from miles_core.rollout.parsing import conditioning_table, rollout_tables
from miles_core.rollout.protocol import GenerateRequest, GenerateResult
from miles_core.store.files import Files
from miles_core.store.parts import Part, read_bytes, read_table, write_file, write_table
from miles_core.store.schemas import ADVANTAGES
from miles_core.training.messages import UpdateInputs
from miles_core.training.trainer import TrainerRank
from miles_core.weights.adapter_file import to_diffusers, to_push
from miles_core.weights.digest import policy_digest
from miles_core.weights.packing import to_safetensors

RANK, ALPHA, GUIDANCE, NOISE, STEPS = 4, 8, 4.5, 0.7, 4
SDE_STEPS = (0, 1, 2)
PROMPTS = ('a "cat" on a sign', 'the word "dog"')
GROUP = 2
ADVANTAGES_OF_SAMPLES = (0.9, -1.1, 0.7, -0.6)
SHIFTS = (3e-5, -4e-5, 2.5e-4, -3e-4, 6e-5, -7e-5)


def run_config(**changes: Any) -> RunConfig:
    """fp32 on the CPU, rank 4, two prompts of two samples, one optimizer step an iteration."""
    values = {
        "use_lora": True,
        "lora_rank": RANK,
        "lora_alpha": ALPHA,
        "device": "cpu",
        "diffusion_generator_device": "cpu",
        "diffusion_forward_dtype": "fp32",
        "rollout_batch_size": len(PROMPTS),
        "n_samples_per_prompt": GROUP,
        "micro_batch_size": 2,
        "lr": 1e-3,
        "diffusion_guidance_scale": GUIDANCE,
        "diffusion_noise_level": NOISE,
        "diffusion_num_steps": STEPS,
    }
    base = build({"lora": {"use_lora": True}, "rollout": {"diffusion_generator_device": "cpu"}})
    return base.replace(**{**values, **changes})


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def trainer(config: RunConfig, model: Path, **kwargs: Any) -> TrainerRank:
    return TrainerRank(config, str(model), "sd3", master_port=free_port(), device="cpu", **kwargs)


def adapter_file(model: Path, scale: float, seed: int = 5) -> bytes:
    """A diffusers adapter whose B is random instead of zero, so that the policy is not the base model."""
    one = trainer(run_config(), model)
    one.start()
    try:
        tensors = one._adapter()
    finally:
        one.stop()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensors[name] = torch.randn(tensor.shape, generator=generator) * scale
    return to_diffusers(to_safetensors(tensors), rank=RANK, alpha=ALPHA, target_modules=_targets(tensors))


def _targets(tensors: dict[str, torch.Tensor]) -> list[str]:
    return sorted({name.split(".", 2)[2].rsplit(".lora_", 1)[0] for name in tensors})


def generate(
    model: Path, push: bytes, prompt: str, first_seed: int, debug: bool = False
) -> tuple[GenerateRequest, GenerateResult, torch.Tensor]:
    """One microgroup of the policy `push`, and the engine's output on its first latent (the probe)."""
    engine = DiffusersEngine(name="e0", checkpoint=str(model), family="sd3", dtype="fp32", device="cpu")
    engine.start()
    try:
        engine.update_weights(push, lora_alpha=ALPHA, lora_rank=RANK)
        request = GenerateRequest(
            prompt=prompt,
            negative_prompt="",
            seed=first_seed,
            num_outputs=GROUP,
            height=64,
            width=64,
            num_inference_steps=STEPS,
            guidance_scale=GUIDANCE,
            sde_type="sde",
            noise_level=NOISE,
            log_prob_no_const=False,
            sde_step_indices=SDE_STEPS,
            generator_device="cpu",
            debug=debug,
        )
        result = engine.generate(request)
        first = result.outputs[0]
        with torch.no_grad():
            output = engine._family.forward(
                engine._awake().transformer,
                first.latents[:1],
                first.timesteps[:1],
                {name: tensor[None] for name, tensor in result.conditioning.items()},
                GUIDANCE,
                torch.float32,
            )
        return request, result, output
    finally:
        engine.stop()


class Iteration:
    """Committed rollout, conditioning, probe, advantages and policy/init under one artifact root."""

    def __init__(
        self, root: Path, model: Path, adapter: bytes, prompts: Sequence[str] = PROMPTS, debug: bool = False
    ) -> None:
        self.files, self.model, self.adapter = Files(str(root)), model, adapter
        self.push = to_push(adapter)
        self.digest = policy_digest(self.push)
        self.policy = [write_file(self.files, "policy/adapter/pytorch_lora_weights.safetensors", adapter)]
        self.tables: list[pa.Table] = []
        self.latents: list[Part] = []
        self.conditioning: list[Part] = []
        self.probe: Part | None = None
        for group, prompt in enumerate(prompts):
            request, result, output = generate(model, self.push, prompt, 100 + 10 * group, debug)
            keys = [{"sample_index": GROUP * group + i, "group_index": group} for i in range(GROUP)]
            rows, latents = rollout_tables(
                result,
                request,
                samples=keys,
                sde_steps=SDE_STEPS,
                policy_digest=self.digest,
                policy_version=-1,
                conditioning_id=f"c{group}",
            )
            self.tables.append(rows)
            self.latents.append(write_table(self.files, f"rollout/latents/{group}.parquet", latents))
            path = f"rollout/conditioning/{group}.parquet"
            self.conditioning.append(write_table(self.files, path, conditioning_table(result, request, f"c{group}")))
            if group == 0:
                self.probe = write_file(self.files, "rollout/probe.safetensors", probe_file(result, output))

    def inputs(
        self,
        name: str,
        *,
        advantages: Sequence[float] = ADVANTAGES_OF_SAMPLES,
        removed: Sequence[int] = (),
        shifted: bool = False,
        log_probs: dict[tuple[int, int], float] | None = None,
        probe: bool = False,
        policy: tuple[list[Part], str, int] | None = None,
    ) -> UpdateInputs:
        """Inputs under `name`; `shifted` moves the stored log-probs by some 1e-4, so that ratios are not 1 and
        some are clipped; `log_probs` sets single ones by (sample, step)."""
        parts = []
        parts_policy, digest, first = policy or (self.policy, self.digest, 0)
        for group, table in enumerate(self.tables):
            values = torch.tensor(table["log_probs"].to_pylist())
            if shifted:
                for i in range(GROUP):
                    for step in SDE_STEPS:
                        values[i, step] += SHIFTS[(3 * (GROUP * group + i) + step) % len(SHIFTS)]
            for (sample, step), value in (log_probs or {}).items():
                if sample // GROUP == group:
                    values[sample % GROUP, step] = value
            changed = with_column(table, "log_probs", values.tolist())
            changed = with_column(changed, "policy_digest", [digest] * GROUP)
            parts.append(write_table(self.files, f"{name}/rollout/{group}.parquet", changed))
        rows = [
            {
                "sample_index": i,
                "group_index": i // GROUP,
                "raw_reward": advantage,
                "advantage": advantage,
                "group_mean": 0.0,
                "group_std": 1.0,
                "zero_std": False,
                "kept": True,
                "reason": None,
                "remove_sample": i in removed,
                "row_digest": "",
            }
            for i, advantage in enumerate(advantages)
        ]
        table = pa.Table.from_pylist(rows, schema=ADVANTAGES)
        return UpdateInputs(
            iteration=0,
            rollout=parts,
            latents=self.latents,
            conditioning=self.conditioning,
            train_data=[],
            advantages=[write_table(self.files, f"{name}/advantages.parquet", table)],
            policy_parts=parts_policy,
            policy_digest=digest,
            probe=self.probe if probe else None,
            first_global_step=first,
        )


def probe_file(result: GenerateResult, output: torch.Tensor) -> bytes:
    """The probe as rollout writes it."""
    tensors = {
        "latents": result.outputs[0].latents[:1],
        "timestep": result.outputs[0].timesteps[:1],
        "model_output": output,
        "guidance_scale": torch.tensor([GUIDANCE]),
        **{f"cond.{name}": tensor for name, tensor in result.conditioning.items()},
    }
    return to_safetensors(tensors)


def checkpoint_tensors(files: Files, parts: Sequence[Part]) -> dict[str, torch.Tensor]:
    """All tensors of a one-rank checkpoint by name."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        if "/checkpoint/shard-" in part.path:
            found |= load(read_bytes(files, part))
    return found


def gradients(files: Files, parts: Sequence[Part], beta1: float = 0.9) -> dict[str, torch.Tensor]:
    """The (clipped) gradient of the first optimizer step, from Adam's first moment."""
    tensors = checkpoint_tensors(files, parts)
    return {
        n.removeprefix("exp_avg."): t.double() / (1 - beta1) for n, t in tensors.items() if n.startswith("exp_avg.")
    }


def follow(iteration: Iteration, result: Any, name: str, first: int) -> UpdateInputs:
    """Inputs of the next iteration, from the policy that `result` made in `first` optimizer steps."""
    return iteration.inputs(name, policy=(result.parts, result.policy_digest, first))


def part_named(parts: Sequence[Part], ending: str) -> Part:
    return next(part for part in parts if part.path.endswith(ending))


def rows_of(files: Files, parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [row for part in parts for row in read_table(files, part).to_pylist()]


def with_column(table: pa.Table, name: str, values: list) -> pa.Table:
    at = table.schema.get_field_index(name)
    field = table.schema.field(at)
    return table.set_column(at, field, pa.array(values, field.type))
