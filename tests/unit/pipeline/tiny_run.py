"""A run of a tiny model whose stages are really made, in this process: no Ray, no Prefect."""

import contextlib
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import torch

from deployments.recipes import recipe
from miles_core.config import RunConfig
from miles_core.data.data_source import table_to_samples
from miles_core.families.tiny_sd3 import make_tiny_sd3
from miles_core.pipeline import advantages, policy, prompts, update
from miles_core.pipeline.inputs import resolve_inputs
from miles_core.pipeline.policy import adapter_of, policy_version
from miles_core.pipeline.rollout import PROBE, probe_spec
from miles_core.pipeline.run import meaning_of
from miles_core.pipeline.stage import Outcome, Product, Step, Upstreams, run_stage
from miles_core.pipeline.upstream import policy_in_force, previous_prompts
from miles_core.rewards.worker import RewardWorker
from miles_core.rollout.diffusers_engine import DiffusersEngine
from miles_core.rollout.microgroup import conditioning_id
from miles_core.rollout.parsing import ParserWorker
from miles_core.rollout.protocol import GenerateRequest
from miles_core.rollout.rollout_function import sampling_params
from miles_core.rollout.step_strategies import step_seed
from miles_core.runtime.workers import Workers
from miles_core.store.files import Files
from miles_core.store.parts import Part, read_bytes, read_table, write_table
from miles_core.store.run_store import Attempt, RunStore
from miles_core.store.schemas import SYNC
from miles_core.store.stages import ITERATION_STAGES
from miles_core.training.trainer import TrainerRank
from miles_core.weights.adapter_file import to_push
from miles_core.weights.probe import probe_of, write_probe

RUN = "r"
SMALL = {
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 2,
    "rollout_microgroup_size": 2,
    "num_steps_per_rollout": 1,
    "diffusion_num_steps": 4,
    "diffusion_sde_window_range": "0,3",
    "lora_rank": 4,
}


class InProcess:
    """The trainer's side of runtime.workers, one rank in this process; `updates` counts what it was asked for."""

    def __init__(self, config: RunConfig, checkpoint: Path) -> None:
        self.config, self.checkpoint = config, checkpoint
        self.rank: TrainerRank | None = None
        self.updates = 0

    def train(self, verb: str, *arguments: Any, watch: Any = None) -> list[Any]:
        if self.rank is None:
            with socket.socket() as sock:
                sock.bind(("127.0.0.1", 0))
                port = sock.getsockname()[1]
            self.rank = TrainerRank(self.config, str(self.checkpoint), "sd3", master_port=port, device="cpu")
            self.rank.start()
        self.updates += verb == "update"
        return [getattr(self.rank, verb)(*arguments)]

    @contextlib.contextmanager
    def trainer_of(self, config: RunConfig) -> Iterator[None]:
        before = self.config
        self.use(config)
        yield
        self.use(before)

    def use(self, config: RunConfig) -> None:
        """The configuration of the command: a trainer of another one is ended."""
        if config != self.config:
            self.end_trainer()
            self.config = config

    def end_trainer(self) -> None:
        if self.rank:
            self.rank.stop()
        self.rank = None


class TinyRun:
    """A run under root/runs; its model and prompts lie in `home`."""

    def __init__(self, root: Path, home: Path | None = None) -> None:
        self.root, self.home = root, home or root
        if home is None:
            make_tiny_sd3(root / "tiny-stable-diffusion-3.5-medium")
            (root / "p.txt").write_text("a red cat\na blue dog\na green pig\na grey cow\n")
        files = {
            "prompt_data": str(self.home / "p.txt"),
            "hf_checkpoint": str(self.home / "tiny-stable-diffusion-3.5-medium"),
        }
        self.config = recipe("tiny").replace(**SMALL, **files)
        self.inputs = resolve_inputs(self.config)
        self.store = RunStore(Files(str(root / "runs")), RUN)
        self.workers = InProcess(self.config, self.inputs.checkpoint)
        record = {"config": self.config.model_dump(mode="json"), "meaning": meaning_of(self.config, self.inputs)}
        self.store.create_record({"recipe": "tiny", **record})

    def copy(self, root: Path) -> "TinyRun":
        shutil.copytree(self.root / "runs", root / "runs")
        return TinyRun(root, self.home)

    def step(self, iteration: int, *, moves_line: bool = True, **changes: Any) -> Step:
        config = self.config.replace(**changes)
        return Step(config, self.inputs, self.store, cast(Workers, self.workers), iteration, moves_line=moves_line)

    def iterate(self, iteration: int) -> dict[str, Outcome]:
        """All stages of an iteration on the line."""
        step = self.step(iteration)
        if iteration == 0:
            run_stage(step.at(-1), "policy", {}, policy.initialize)
        return {stage: self.stage(step, stage) for stage in ITERATION_STAGES}

    def stage(self, step: Step, stage: str) -> Outcome:
        """One stage from what is on the line."""

        def line(name: Any) -> Any:
            return self.store.on_line(name, step.iteration)

        self.workers.use(step.config)
        if stage == "prompts":
            return run_stage(step, "prompts", previous_prompts(step), prompts.draw)
        if stage == "rollout":
            return run_stage(step, "rollout", {"prompts": line("prompts"), "policy": policy_in_force(step)}, generate)
        if stage == "rewards":
            return run_stage(step, "rewards", {"rollout": line("rollout")}, score)
        if stage == "advantages":
            return run_stage(step, "advantages", {"rewards": line("rewards")}, advantages.normalize)
        if stage == "update":
            products = {"rollout": line("rollout"), "advantages": line("advantages"), "policy": policy_in_force(step)}
            return run_stage(step, "update", products, update.train)
        return run_stage(step, "sync", {"update": line("update")}, synced)


def generate(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """The rollout's rows, latents, conditioning and probe from an engine in this process.

    The random state is the trainer's alone, as where each has a process of its own: it enters the checkpoint.
    """
    with torch.random.fork_rng():
        return _generate(step, attempt, upstream)


def _generate(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    files, config, held = step.store.files, step.config, upstream["policy"]
    engine = DiffusersEngine(
        name="e0", checkpoint=str(step.inputs.checkpoint), family="sd3", dtype="fp32", device="cpu"
    )
    engine.start()
    lora = {"lora_alpha": config.lora.lora_alpha, "lora_rank": config.lora.lora_rank}
    engine.update_weights(to_push(read_bytes(files, adapter_of(held))), **lora)
    args, parts = config.args(), []
    for group in table_to_samples(pa.concat_tables([read_table(files, p) for p in upstream["prompts"].data])):
        request = GenerateRequest(**sampling_params(args, group, step_seed(args.rollout_seed, step.iteration)))
        identity = conditioning_id(request.prompt, request.negative_prompt, step.inputs.checkpoint_digest, "fp32")
        name = f"{group[0].index // len(group):08d}-1.parquet"
        made, beside = ParserWorker().write(
            files,
            engine.generate(request),
            request,
            attempt.path(f"data/{name}"),
            attempt.path(f"latents/{name}"),
            attempt.path(f"conditioning/{identity}.parquet"),
            samples=[{"sample_index": s.index, "group_index": s.group_index} for s in group],
            sde_steps=request.sde_step_indices or (),
            policy_digest=held.summary["policy_digest"],
            policy_version=policy_version(held),
            conditioning_id=identity,
        )
        parts += [made.data, made.latents, cast(Part, beside)]
    request = probe_spec(step).request()
    probe = write_probe(files, attempt.path(PROBE), probe_of(request, engine.generate(request)))
    engine.stop()
    told = {"policy_digest": held.summary["policy_digest"], "policy_version": policy_version(held)}
    return Product([*parts, probe], told | {"kept_microgroups": 0})


def score(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """JPEG rewards of every part."""
    worker, files = RewardWorker(step.config.flat()), step.store.files
    parts = []
    for part in upstream["rollout"].data:
        indices = read_table(files, part, ["sample_index"]).column("sample_index").to_pylist()
        name = part.path.rsplit("/", 1)[1]
        scorers = list(step.inputs.components)
        parts.append(worker.score(files, part, attempt.path(f"data/{name}"), scorers, dict.fromkeys(indices)))
    return Product(parts, dict.fromkeys(("reward_mean", "reward_min", "reward_max"), 0.0))


def synced(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """A row that says an engine holds the policy; no test of this room asks whether one does."""
    row = {"engine": "e0", "policy_digest": upstream["update"].summary["policy_digest"], "policy_version": 0}
    numbers = ("modules_bound", "bytes", "probe_diff", "probe_moved", "push_seconds", "verify_seconds")
    table = pa.Table.from_pylist([row | dict.fromkeys(numbers, 1) | {"row_digest": ""}], schema=SYNC)
    rows = write_table(step.store.files, attempt.path("data/engines.parquet"), table)
    return Product([rows], {"engines": 1, "modules_bound": 1, "probe_diff": 0.0, "probe_moved": 1.0})
