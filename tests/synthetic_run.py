"""A run whose rows are made up and whose manifests, schemas, digests and line are real: no model, no engine.

    python tests/synthetic_run.py FOLDER RUN ITERATIONS      4 groups of 8 samples of 64² images an iteration

300 iterations take under a minute. Rows are a function of their indices alone, so that a test knows what must come out:
`reward_of`, and one group in seven has one reward for all its samples.
"""

import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
from PIL import Image
from safetensors.numpy import save

from deployments.recipes import recipe
from miles_core.config import RunConfig
from miles_core.store.digest import sha256_hex, with_row_digests
from miles_core.store.files import Files
from miles_core.store.manifest import Manifest, fingerprint
from miles_core.store.parts import Part, read_table, write_file, write_table
from miles_core.store.run_store import Attempt, RunStore
from miles_core.store.schemas import (
    ADVANTAGES,
    CONDITIONING,
    POLICY,
    PROMPTS,
    SYNC,
    UPDATE,
    latents_schema,
    rewards_schema,
    rollout_schema,
)
from miles_core.store.stages import ITERATION_STAGES, StageName

STEPS, SDE_STEPS = 6, [1, 2]
LATENT = (16, 4, 4)
STARTED = 1_800_000_000.0
WORDS = ("red cat", "blue dog", "green pig", "grey cow", "white owl", "black hen", "old tree")

Reward = Callable[[int, int], float]


def reward_of(sample_index: int, group_index: int) -> float:
    """The reward of a sample, in [0, 1); one for the whole group where group_index % 7 == 3."""
    return 0.5 if group_index % 7 == 3 else (sample_index * 37 + group_index * 11) % 100 / 100


def synthetic_run(
    files: Files, run: str, iterations: int, groups: int, samples_per_group: int, image_pixels: int
) -> RunStore:
    """Commit a run of whole iterations, all of it on the line; a microgroup is a group. `image_pixels` is the side of
    its square images."""
    # What is made up need not outlive a power cut, and waiting for the disk would be nearly all of the time.
    with mock.patch.object(os, "fsync"):
        made = SyntheticRun(files, run, groups, samples_per_group, image_pixels)
        for iteration in range(iterations):
            made.iterate(iteration)
        return made.draw_line()


class SyntheticRun:
    """A run under construction: stages by hand, where a test wants less or other than whole iterations."""

    def __init__(
        self, files: Files, run: str, groups: int = 2, samples_per_group: int = 4, image_pixels: int = 16
    ) -> None:
        self.groups, self.samples, self.pixels = groups, samples_per_group, image_pixels
        self.config = _config(groups, samples_per_group)
        self.store = RunStore(files, run)
        self.line: dict[StageName, Manifest] = {}
        self._slots: dict[str, str] = {}
        self.store.create_record(
            {"recipe": "tiny", "config": self.config.model_dump(mode="json"), "meaning": {"fields": {}, "inputs": {}}}
        )
        self.put("policy", -1, {}, self._policy)

    def iterate(self, iteration: int) -> None:
        """All stages of an iteration."""
        for stage in ITERATION_STAGES:
            self.make(stage, iteration)

    def make(self, stage: StageName, iteration: int, *, on_line: bool = True, **changes: Any) -> Manifest:
        """One stage from what was made last. changes: `rm_type` and `reward` of rewards, anything else a mark that
        makes the fingerprint another."""
        rows = {
            "prompts": self._prompts,
            "rollout": self._rollout,
            "rewards": lambda a, u: self._rewards(a, u, **changes),
            "advantages": self._advantages,
            "update": self._update,
            "sync": self._sync,
        }[stage]
        return self.put(stage, iteration, self._upstream(stage, iteration), rows, on_line=on_line, changes=changes)

    def put(
        self,
        stage: StageName,
        iteration: int,
        upstream: dict[str, Manifest],
        rows: Callable[[Attempt, Mapping[str, Manifest]], tuple[list[Part], dict[str, Any]]],
        *,
        on_line: bool = True,
        changes: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """Commit an attempt whose files and summary `rows` makes."""
        marks = {name: str(value) for name, value in (changes or {}).items()}
        config = self.config.affecting(stage) | marks
        prints = {name: m.fingerprint for name, m in upstream.items()}
        wanted = fingerprint(stage, iteration, config=config, inputs={}, hooks={}, upstream=prints)
        attempt = self.store.open_attempt(stage, iteration, wanted, upstream, resumable=False)
        parts, summary = rows(attempt, upstream)
        manifest = self.store.commit(
            attempt,
            parts=parts,
            upstream=upstream,
            affecting_config=config,
            inputs={},
            versions={"pyarrow": pa.__version__},
            started_at=time.time() - 3.0,
            summary=summary,
            flow_run_id=None,
        )
        if on_line:
            self.line[stage] = manifest
            self._slots["policy" if stage == "policy" else f"{iteration:06d}/{stage}"] = manifest.attempt
        return manifest

    def draw_line(self) -> RunStore:
        """Write the run's line, once for all: moving it attempt by attempt would be most of the time."""
        self.store.update_record(lambda record: record | {"line": record["line"] | self._slots})
        return self.store

    def _upstream(self, stage: StageName, iteration: int) -> dict[str, Manifest]:
        policy = self.line["update"] if iteration else self.line["policy"]
        return {
            "prompts": {"prompts": self.line["prompts"]} if iteration else {},
            "rollout": {"prompts": self.line.get("prompts", policy), "policy": policy},
            "rewards": {"rollout": self.line.get("rollout", policy)},
            "advantages": {"rewards": self.line.get("rewards", policy)},
            "update": {
                "rollout": self.line.get("rollout", policy),
                "advantages": self.line.get("advantages", policy),
                "policy": policy,
            },
            "sync": {"update": self.line.get("update", policy)},
        }[stage]

    def _write(self, attempt: Attempt, name: str, rows: list[dict[str, Any]], schema: pa.Schema) -> Part:
        table = pa.Table.from_pylist([row | {"row_digest": ""} for row in rows], schema=schema)
        return write_table(self.store.files, attempt.path(name), table)

    def _indices(self, iteration: int) -> list[tuple[int, int]]:
        first, count = iteration * self.groups, self.samples
        return [(g * count + i, g) for g in range(first, first + self.groups) for i in range(count)]

    def _policy(self, attempt: Attempt, upstream: Mapping[str, Manifest]) -> tuple[list[Part], dict[str, Any]]:
        row = {"adapter": "default", "base_digest": "0" * 64, "policy_digest": _digest("policy", -1)}
        numbers = {"modules": 1, "parameters": 8}
        adapter = self._tensors(attempt, "adapter/pytorch_lora_weights.safetensors", -1)
        return [adapter, self._write(attempt, "data/policy.parquet", [row | numbers], POLICY)], {
            "policy_digest": row["policy_digest"],
            **numbers,
        }

    def _prompts(self, attempt: Attempt, upstream: Mapping[str, Manifest]) -> tuple[list[Part], dict[str, Any]]:
        rows = [
            {
                "sample_index": index,
                "group_index": group,
                "prompt": _prompt(group),
                "seed": 1000 + index,
                "prompt_index": group % len(WORDS),
                "epoch": group // len(WORDS),
                "metadata": "{}",
                "rm_type": None,
            }
            for index, group in self._indices(attempt.iteration)
        ]
        state = json.dumps({"position": attempt.iteration}).encode()
        parts = [
            self._write(attempt, "data/prompts.parquet", rows, PROMPTS),
            write_file(self.store.files, attempt.path("state.json"), state),
        ]
        return parts, {"prompts": self.groups, "samples": len(rows), "epoch": rows[0]["epoch"]}

    def _rollout(self, attempt: Attempt, upstream: Mapping[str, Manifest]) -> tuple[list[Part], dict[str, Any]]:
        told = {
            "policy_digest": upstream["policy"].summary["policy_digest"],
            "policy_version": attempt.iteration - 1,
        }
        by_group: dict[int, list[int]] = {}
        for index, group in self._indices(attempt.iteration):
            by_group.setdefault(group, []).append(index)
        with ThreadPoolExecutor(8) as threads:
            made = list(threads.map(lambda entry: self._microgroup(attempt, *entry, told), by_group.items()))
        parts = {part.path: part for group in made for part in group}
        probe = self._tensors(attempt, "probe.safetensors", attempt.iteration)
        samples = self.groups * self.samples
        return [*parts.values(), probe], {"samples": samples, "kept_microgroups": 0, **told}

    def _microgroup(self, attempt: Attempt, group: int, indices: list[int], told: dict[str, Any]) -> list[Part]:
        identity = _digest("conditioning", group)[:16]
        noise = np.random.default_rng(group)
        latents_type = latents_schema(latent_shape=LATENT, positions=3, latent_dtype=pa.float32())
        numbers = noise.standard_normal((len(indices), 3 * int(np.prod(LATENT))), dtype=np.float32)
        latents = with_row_digests(
            pa.Table.from_pylist(
                [
                    {"sample_index": i, "latent_steps": [1, 2, 3], "latents": values, "row_digest": ""}
                    for i, values in zip(indices, numbers, strict=True)
                ],
                schema=latents_type,
            )
        )
        rows = [
            {
                "sample_index": index,
                "group_index": group,
                "prompt": _prompt(group),
                "negative_prompt": None,
                "conditioning_id": identity,
                "seed": 1000 + index,
                "request_seed": 1000 + indices[0],
                "num_outputs": len(indices),
                "image": {"bytes": picture(index, group, self.pixels), "path": None},
                "height": self.pixels,
                "width": self.pixels,
                "guidance_scale": 1.0,
                "noise_level": 0.7,
                "sde_type": "sde",
                "sigmas": [1 - i / STEPS for i in range(STEPS + 1)],
                "timesteps": [1000 * (1 - i / STEPS) for i in range(STEPS)],
                "sde_step_indices": SDE_STEPS,
                "log_probs": [-0.5 if i in SDE_STEPS else 0.0 for i in range(STEPS)],
                "latents_digest": digest,
                **told,
                "engine": f"e{group % 2}",
                "started_at": datetime.fromtimestamp(STARTED + group, UTC),
                "seconds": 1.0 + group % 5,
            }
            for index, digest in zip(indices, latents.column("row_digest").to_pylist(), strict=True)
        ]
        tensor = {"name": "pos.encoder_hidden_states", "dtype": "float32", "shape": [2], "data": bytes(8)}
        text = {"conditioning_id": identity, "prompt": _prompt(group), "negative_prompt": None, **tensor}
        stem = f"{group % self.groups:08d}-1.parquet"
        return [
            self._write(attempt, f"conditioning/{identity}.parquet", [text], CONDITIONING),
            write_table(self.store.files, attempt.path(f"latents/{stem}"), latents),
            self._write(attempt, f"data/{stem}", rows, rollout_schema(sde_steps=len(SDE_STEPS), steps=STEPS)),
        ]

    def _rewards(
        self,
        attempt: Attempt,
        upstream: Mapping[str, Manifest],
        rm_type: str = "jpeg_compressibility",
        reward: Reward = reward_of,
        **marks: Any,
    ) -> tuple[list[Part], dict[str, Any]]:
        def score(part: Part) -> tuple[Part, list[float]]:
            keys = ["sample_index", "group_index", "row_digest"]
            found = read_table(self.store.files, part, keys).to_pylist()
            rewards = [reward(row["sample_index"], row["group_index"]) for row in found]
            rows = [
                {
                    "sample_index": row["sample_index"],
                    "group_index": row["group_index"],
                    "rollout_digest": row["row_digest"],
                    "reward": value,
                    "rm_type": rm_type,
                    "rm_version": f"{rm_type}-1",
                    f"score_{rm_type}": value,
                    "recognized": None,
                    "target": None,
                    "tries": 1 + (row["sample_index"] % 50 == 7),
                    "worker": "reward-0",
                    "seconds": 0.01,
                }
                for row, value in zip(found, rewards, strict=True)
            ]
            name = part.path.rsplit("/", 1)[1]
            return self._write(attempt, f"data/{name}", rows, rewards_schema([rm_type])), rewards

        with ThreadPoolExecutor(8) as threads:
            made = list(threads.map(score, upstream["rollout"].data))
        values = [value for _, found in made for value in found]
        spread = {"reward_mean": sum(values) / len(values), "reward_min": min(values), "reward_max": max(values)}
        return [part for part, _ in made], {"samples": len(values), **spread}

    def _advantages(self, attempt: Attempt, upstream: Mapping[str, Manifest]) -> tuple[list[Part], dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for part in upstream["rewards"].data:
            found += read_table(self.store.files, part, ["sample_index", "group_index", "reward"]).to_pylist()
        by_group: dict[int, list[float]] = {}
        for row in found:
            by_group.setdefault(row["group_index"], []).append(row["reward"])
        rows = []
        for row in sorted(found, key=lambda r: r["sample_index"]):
            values = by_group[row["group_index"]]
            mean, std = float(np.mean(values)), float(np.std(values))
            rows.append(
                {
                    "sample_index": row["sample_index"],
                    "group_index": row["group_index"],
                    "raw_reward": row["reward"],
                    "advantage": (row["reward"] - mean) / (std + 1e-4),
                    "group_mean": mean,
                    "group_std": std,
                    "zero_std": std == 0,
                    "kept": True,
                    "reason": None,
                    "remove_sample": False,
                }
            )
        zero = sum(np.std(values) == 0 for values in by_group.values())
        summary = {"groups": len(by_group), "zero_std_groups": int(zero)}
        summary["reward_mean"] = float(np.mean([row["raw_reward"] for row in rows]))
        return [self._write(attempt, "data/advantages.parquet", rows, ADVANTAGES)], summary

    def _update(self, attempt: Attempt, upstream: Mapping[str, Manifest]) -> tuple[list[Part], dict[str, Any]]:
        steps, pairs = self.config.steps_per_rollout, self.config.global_batch_size * len(SDE_STEPS)
        rows = [
            {
                "step": step,
                "global_step": attempt.iteration * steps + step,
                "samples": self.config.global_batch_size,
                "pairs": pairs,
                "lr": 1e-3,
                "loss": 0.1 / (1 + attempt.iteration) + step / 1000,
                "policy_loss": 0.05,
                "kl_loss": 0.01,
                "grad_norm": 0.5,
                "clip_frac": attempt.iteration % 3 / 10,
                "ratio_mean": 1.0,
                "ratio_max_abs_dev": 1e-4,
                "log_prob_mean_abs_diff": 1e-5,
                "adv_mean": 0.0,
                "seconds": 2.0,
            }
            for step in range(steps)
        ]
        state = json.dumps({"global_step": (attempt.iteration + 1) * steps}).encode()
        parts = [
            self._tensors(attempt, "adapter/pytorch_lora_weights.safetensors", attempt.iteration),
            self._tensors(attempt, "checkpoint/shard-0.safetensors", attempt.iteration),
            write_file(self.store.files, attempt.path("checkpoint/trainer_state.json"), state),
            self._tensors(attempt, "probe.safetensors", attempt.iteration),
            self._write(attempt, "data/steps.parquet", rows, UPDATE),
        ]
        names = ("loss", "policy_loss", "kl_loss", "grad_norm", "clip_frac", "log_prob_mean_abs_diff", "lr")
        means = {name: sum(float(row[name]) for row in rows) / steps for name in names}
        return parts, {"policy_digest": _digest("policy", attempt.iteration), **means, "steps": steps}

    def _sync(self, attempt: Attempt, upstream: Mapping[str, Manifest]) -> tuple[list[Part], dict[str, Any]]:
        digest = upstream["update"].summary["policy_digest"]
        row = {"policy_digest": digest, "policy_version": attempt.iteration, "modules_bound": 1, "bytes": 8}
        proof = {"probe_diff": 1e-7, "probe_moved": 0.1}
        rows = [{"engine": f"e{i}", **row, **proof, "push_seconds": 0.1, "verify_seconds": 0.2} for i in range(2)]
        part = self._write(attempt, "data/engines.parquet", rows, SYNC)
        return [part], {"engines": 2, "modules_bound": 1, **proof}

    def _tensors(self, attempt: Attempt, name: str, number: int) -> Part:
        return write_file(
            self.store.files, attempt.path(name), save({"w.lora_A.weight": np.full((2, 2), number, np.float32)})
        )


def picture(sample_index: int, group_index: int, pixels: int) -> bytes:
    """PNG of a gradient: the group says its hue, the sample its slant."""
    ramp = np.linspace(0, 1, pixels)
    slant = (ramp[:, None] * (sample_index % 8) + ramp[None, :] * 4) / 12
    hue = np.array([group_index * 53 % 256, group_index * 97 % 256, group_index * 31 % 256])
    levels = (slant[:, :, None] * hue + (1 - slant[:, :, None]) * 235).astype(np.uint8)
    sink = io.BytesIO()
    Image.fromarray(levels).save(sink, format="PNG", compress_level=1)
    return sink.getvalue()


def _config(groups: int, samples_per_group: int) -> RunConfig:
    steps = 2 if groups * samples_per_group % 2 == 0 else 1
    return recipe("tiny").replace(
        rollout_batch_size=groups,
        n_samples_per_prompt=samples_per_group,
        rollout_microgroup_size=samples_per_group,
        num_steps_per_rollout=steps,
        micro_batch_size=1,
    )


def _prompt(group: int) -> str:
    return f"a {WORDS[group % len(WORDS)]}"


def _digest(what: str, number: int) -> str:
    return sha256_hex(f"{what} {number}".encode())


if __name__ == "__main__":
    folder, name, count = sys.argv[1:]
    synthetic_run(Files(folder), name, int(count), 4, 8, 64)
