"""One trainer rank: holds the policy and its optimizer, and turns a scored rollout into the next policy.

A plain class; the runtime makes one actor of it per rank. Every method but `policy` is a collective: all ranks call
it with the same arguments.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from miles_core.config import RunConfig
from miles_core.errors import StageError
from miles_core.families.base import DiffusersModelBackend, torch_dtype
from miles_core.families.resolve import train_pipeline_config
from miles_core.runtime.faults import fault_point
from miles_core.store.digest import content_digest
from miles_core.store.files import Files
from miles_core.store.parts import Part, read_bytes, write_file, write_table
from miles_core.training import checkpoint as ckpt
from miles_core.training.agreement import gate
from miles_core.training.alignment import Gap, compared, merged
from miles_core.training.alignment import rows as alignment_rows
from miles_core.training.batch import not_finite
from miles_core.training.determinism import make_deterministic
from miles_core.training.distributed import gather, open_store, rank_mesh, start_process_group, together
from miles_core.training.inputs import Rollout, rank_share, read_rollout, row_args
from miles_core.training.lr_schedule import learning_rate
from miles_core.training.messages import UpdateInputs, UpdateResult
from miles_core.training.metrics import update_table
from miles_core.training.model import assign, attach_lora, lora_parameters, shard, whole
from miles_core.training.objective import objective_of
from miles_core.training.optimize import clip_and_step, make_adamw, refuse
from miles_core.training.output import ADAPTER_FILE, ALIGNMENT_FILE, PROBE_FILE, ROWS_FILE, content_of, short_name
from miles_core.training.probe import Probe, check_parity, encode_probe, read_probe, run_probe
from miles_core.training.roll_call import RollCall, is_lost
from miles_core.training.step import Accumulation, RankShare, accumulate
from miles_core.weights.adapter_file import adapter_info, to_diffusers
from miles_core.weights.digest import policy_digest
from miles_core.weights.packing import adapter_tensors, to_safetensors

Progress = Callable[[dict[str, int]], None]


class TrainerRank:
    """Rank `rank` of `world_size`. checkpoint: pipeline folder. device: cpu or cuda.

    at: what this rank is doing, for people and for a thread that watches ("update: step 2 of 4, forward 3 of 8",
    "idle"); a plain attribute, replaced as a whole.
    """

    def __init__(
        self,
        config: RunConfig,
        checkpoint: str,
        family: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        master_address: str = "127.0.0.1",
        master_port: int,
        device: str,
    ) -> None:
        self.config = config
        self.rank, self.world_size = rank, world_size
        self._folder = Path(checkpoint)
        self._family = train_pipeline_config(family)
        self._address, self._port, self._device_kind = master_address, master_port, device
        self._dtype = torch_dtype(config.training.diffusion_forward_dtype)
        self._targets = tuple(config.lora.lora_target_modules or self._family.lora_target_modules)
        self._global_step = 0
        self._held: str | None = None
        self._policy = ""
        self.at = "idle"

    def start(self) -> None:
        """Join the process group, load the model, attach the seeded LoRA, shard. Raises StageError."""
        c, seconds = self.config, 60 * self.config.cluster.distributed_timeout_minutes
        make_deterministic(c.training.deterministic_mode, self._device_kind)
        store = open_store(
            rank=self.rank,
            world_size=self.world_size,
            master_address=self._address,
            master_port=self._port,
            seconds=seconds,
        )
        self._roll = RollCall(store, self.rank, self.world_size, seconds)
        with self._verb("start"):
            self._roll.assemble()
            self._device = start_process_group(
                store, rank=self.rank, world_size=self.world_size, device=self._device_kind, seconds=seconds
            )
            self._at("start", "loading the transformer")
            self._transformer = together("loading the transformer", self._load_transformer)
            self._at("start", "sharding")
            mesh = rank_mesh(self._device, c.training.dp_replicate_size, seconds)
            shard(self._transformer, self._family.fsdp_blocks(self._transformer), mesh, c)
            self._parameters = lora_parameters(self._transformer)
            self._optimizer = make_adamw(self._parameters, c.optimizer)
            self._start_fresh()
            adapter = self._adapter()
            self._policy = policy_digest(to_safetensors(adapter))
            self._held = _state_key([(ADAPTER_FILE, content_of(ADAPTER_FILE, self._adapter_file(adapter)))])

    def stop(self) -> None:
        """Leave the process group; a second call changes nothing."""
        self._held, self._policy = None, ""
        if dist.is_initialized():
            dist.destroy_process_group()

    def policy(self) -> str:
        """Digest of the policy held; empty after a failed load or update left none."""
        return self._policy if self._held is not None else ""

    def init_policy(self, files: Files, out_dir: str) -> list[Part]:
        """Write the seeded adapter of policy/init. Raises StageError where the trainer holds another policy."""
        with self._verb("init_policy"):
            if self._held is None or self._global_step:
                raise StageError("policy/init is written by a trainer that has not trained yet")
            adapter = self._adapter()
            mine = {ADAPTER_FILE: self._adapter_file(adapter)} if self.rank == 0 else {}
            return self._store("init_policy", files, out_dir, mine)

    def load(self, files: Files, parts: Sequence[Part], digest: str) -> None:
        """Take up a policy: the adapter alone (policy/init), or an update's checkpoint with moments, schedule, RNG.

        Does nothing where exactly that state is held already: an equal adapter with other moments is another state.
        Raises StageError for anything less than a whole load, and then holds no policy.
        """
        with self._verb("load"):
            self._load(files, parts, digest)

    def _load(self, files: Files, parts: Sequence[Part], digest: str) -> None:
        named = {short_name(part.path): part for part in parts}
        chosen = {n: p for n, p in named.items() if n.startswith(f"{ckpt.FOLDER}/")}
        resumable = bool(chosen)
        if not resumable:
            chosen = {n: p for n, p in named.items() if n == ADAPTER_FILE}
        key = _state_key((name, part.content) for name, part in chosen.items())
        if key == self._held and digest == self._policy:
            return
        self._held = None
        content = together("reading the policy", lambda: {n: read_bytes(files, p) for n, p in chosen.items()})
        if resumable:
            self._load_checkpoint({name.removeprefix(f"{ckpt.FOLDER}/"): data for name, data in content.items()})
        else:
            self._load_adapter(content)
        found = policy_digest(to_safetensors(self._adapter()))
        if found != digest:
            raise StageError(f"the policy loaded has digest {found[:12]} and {digest[:12]} was asked for")
        self._held, self._policy = key, found

    def update(
        self, files: Files, inputs: UpdateInputs, out_dir: str, progress: Progress | None = None
    ) -> UpdateResult:
        """Train on one iteration's rollout and write rows, checkpoint, adapter and probe under `out_dir`.

        `progress` is called with step, steps, micro_batch and micro_batches (counted from 0) after each forward of
        this rank. Raises StageError before the optimizer step for anything that is not finite, with the sample
        indices, and before the first one where trainer and engine differ on the probe.
        """
        with self._verb("update"):
            return self._update(files, inputs, out_dir, progress)

    def _update(self, files: Files, inputs: UpdateInputs, out_dir: str, progress: Progress | None) -> UpdateResult:
        self._at("update", "loading the policy")
        self._load(files, inputs.policy_parts, inputs.policy_digest)
        if self._global_step != inputs.first_global_step:
            raise StageError(
                f"the policy was made by {self._global_step} optimizer steps and iteration {inputs.iteration} "
                f"follows {inputs.first_global_step}: it belongs to another iteration"
            )
        self._at("update", "reading the rollout")
        rollout = read_rollout(files, inputs, self.config.samples_per_rollout, self.rank, self.world_size)
        probe = self._read_probe(files, inputs.probe)
        self._at("update", "the probe before the first step")
        before = None if probe is None else run_probe(probe, self._predict, self._device)
        if probe is not None and before is not None:
            check_parity(probe, before, self.config.training.diffusion_forward_dtype)
        self._held = None
        numbers, shares, gaps = range(self.config.steps_per_rollout), dict[int, RankShare](), list[dict[int, Gap]]()
        if self._recomputes or self.config.compares_outputs:
            for n in numbers:
                shares[n], gap = self._compared(files, rollout, n)
                gaps.append(gap)
        of_all = merged([one for found in gather(gaps) for one in found])
        rows = [self._step(rollout, n, shares.get(n) or self._share(files, rollout, n), progress) for n in numbers]
        mismatch = sum(of_all.values(), Gap()).mean if gaps else float(rows[0]["log_prob_mean_abs_diff"] or 0.0)
        self._at("update", "the probe after the last step")
        after = None if probe is None else run_probe(probe, self._predict, self._device)
        probed = None if before is None or after is None else encode_probe(before, after)
        aligned = alignment_rows(of_all, self.config.training.diffusion_forward_dtype)
        return self._write(files, out_dir, rows, probed, mismatch, aligned if self.config.compares_outputs else [])

    @contextmanager
    def _verb(self, verb: str) -> Iterator[None]:
        """A verb from start to end: what stops it names rank and place, and the other rank where that is the cause."""
        self._roll.begin()
        try:
            self._at(verb)
            yield
        except Exception as fault:
            self._roll.report(self.at, fault)
            if isinstance(fault, StageError) and not is_lost(fault):
                raise
            raise StageError(self._roll.verdict(self.at, fault)) from fault
        finally:
            self.at = "idle"

    def _at(self, verb: str, doing: str = "", **counts: tuple[int, int]) -> None:
        """This rank now does `doing` in `verb`; counts are (number from 1, all) by name: step, forward, file."""
        places = [*([doing] if doing else []), *(f"{name} {n} of {of}" for name, (n, of) in counts.items())]
        self.at = f"{verb}: {', '.join(places)}" if places else verb
        self._roll.tell(self.at)

    @property
    def _recomputes(self) -> bool:
        return self.config.algorithm.diffusion_recompute_old_log_prob

    def _share(self, files: Files, rollout: Rollout, number: int) -> RankShare:
        """This rank's part of an optimizer step."""
        size = self.config.global_batch_size
        batch = rollout.advantages[number * size : (number + 1) * size]
        args = row_args(self.config, rollout.dynamics)
        self._at("update", "reading the samples", step=(number + 1, self.config.steps_per_rollout))
        share = together(
            "reading the rollout",
            lambda: rank_share(files, rollout, batch, args, self.config, self.rank, self.world_size),
        )
        refuse(set().union(*gather(not_finite(share.samples, share.pairs))), "a stored log-prob or advantage")
        return share

    def _compared(self, files: Files, rollout: Rollout, number: int) -> tuple[RankShare, dict[int, Gap]]:
        """The same with this trainer's log-probs where they are asked for, under the policy that no step has changed yet."""
        share, args = self._share(files, rollout, number), row_args(self.config, rollout.dynamics)
        passes, step = max(1, *gather(len(share.micro_batches))), (number + 1, self.config.steps_per_rollout)

        def on_pass(coming: int) -> None:
            self._at("update", "old log-probs", step=step, forward=(coming + 1, passes))

        made, gaps = compared(
            self._transformer,
            self._predict,
            objective_of(args),
            share,
            rollout.conditioning,
            passes,
            guidance_scale=rollout.dynamics.guidance_scale,
            device=self._device,
            on_pass=on_pass,
        )
        return made if self._recomputes else share, gaps

    def _step(self, rollout: Rollout, number: int, share: RankShare, progress: Progress | None) -> dict[str, Any]:
        """One optimizer step; its row."""
        clock = time.perf_counter()
        size, steps = self.config.global_batch_size, self.config.steps_per_rollout
        batch = rollout.advantages[number * size : (number + 1) * size]
        args = row_args(self.config, rollout.dynamics)
        step = (number + 1, steps)
        counts = gather((len(share.pairs["step"]), len(share.micro_batches)))
        pairs, passes = sum(p for p, _ in counts), max(1, *(m for _, m in counts))

        def before_pass(coming: int) -> None:
            self._at("update", step=step, forward=(coming + 1, passes))
            fault_point("update:forward")

        def on_pass(done: int) -> None:
            if progress is not None:
                progress({"step": number, "steps": steps, "micro_batch": done, "micro_batches": passes})

        metrics, culprits = accumulate(
            self._transformer,
            self._predict,
            objective_of(args),
            share,
            rollout.conditioning,
            Accumulation(passes=passes, scale=self.world_size / max(pairs, 1)),
            guidance_scale=rollout.dynamics.guidance_scale,
            with_reference=self.config.ref_mode != "none",
            device=self._device,
            before_pass=before_pass,
            on_pass=on_pass,
        )
        self._at("update", "the optimizer step", step=step)
        culprits = set().union(*gather(culprits))
        if culprits:
            self._optimizer.zero_grad()
        refuse(culprits, "a log-prob or the loss")
        means = metrics.total(pairs)
        if number == 0 and not self._recomputes:
            algorithm = self.config.algorithm
            mean = means["log_prob_mean_abs_diff"]
            if mean is not None and (stop := gate(mean, algorithm.diffusion_clip_range, algorithm.alignment_gate)):
                self._optimizer.zero_grad()
                raise StageError(stop)
        lr = learning_rate(self._global_step, args)
        samples = {row.sample_index for row in batch}
        step_with = None if self.config.skips_optimizer_step else lr
        grad_norm = clip_and_step(self._optimizer, step_with, self.config.optimizer.clip_grad, samples)
        self._at("update", "after the optimizer step", step=step)
        fault_point("update:after_step")
        row = {
            "step": number,
            "global_step": self._global_step,
            "samples": sum(not row.remove_sample for row in batch),
            "pairs": pairs,
            "lr": lr,
            "grad_norm": grad_norm,
            **means,
            "seconds": max(gather(time.perf_counter() - clock)),
        }
        self._global_step += 1
        return row

    def _predict(
        self, latents: torch.Tensor, timesteps: torch.Tensor, conditioning: dict[str, torch.Tensor], guidance: float
    ) -> torch.Tensor:
        return self._family.forward(self._transformer, latents, timesteps, conditioning, guidance, self._dtype)

    def _write(
        self,
        files: Files,
        out_dir: str,
        rows: list[dict[str, Any]],
        probe: bytes | None,
        mismatch: float,
        aligned: list[dict[str, Any]],
    ) -> UpdateResult:
        self._at("update", "gathering the policy")
        adapter = self._adapter()
        digest = policy_digest(to_safetensors(adapter))
        shards = ckpt.save_shard(ckpt.state_tensors(self._parameters, self._optimizer))
        names = [name for found in gather(list(shards)) for name in found]
        rng = gather(ckpt.rng_state(self._device))
        mine = {f"{ckpt.FOLDER}/{name}": data for name, data in shards.items()}
        if self.rank == 0:
            mine[ADAPTER_FILE] = self._adapter_file(adapter)
            mine[f"{ckpt.FOLDER}/{ckpt.RNG_FILE}"] = ckpt.encode_rng(rng)
            mine[f"{ckpt.FOLDER}/{ckpt.STATE_FILE}"] = ckpt.encode_state(
                global_step=self._global_step,
                policy_digest=digest,
                lora_rank=self.config.lora.lora_rank,
                lora_alpha=self.config.lora.lora_alpha,
                shards=names,
            )
            if probe is not None:
                mine[PROBE_FILE] = probe
            if aligned:
                mine[ALIGNMENT_FILE] = json.dumps(aligned, indent=1).encode()
        parts = self._store("update", files, out_dir, mine)
        self._at("update", "writing the rows")
        table = update_table(rows, own=self.config.algorithm.custom_loss_function_path is not None)
        own = together(
            "writing the rows", lambda: write_table(files, f"{out_dir}/{ROWS_FILE}", table) if self.rank == 0 else None
        )
        steps = next(part for part in gather(own) if part is not None)
        self._policy = digest
        state = [(short_name(part.path), part.content) for part in parts]
        self._held = _state_key((name, content) for name, content in state if name.startswith(f"{ckpt.FOLDER}/"))
        return UpdateResult(parts, steps, rows, digest, mismatch, aligned)

    def _store(self, verb: str, files: Files, out_dir: str, mine: dict[str, bytes]) -> list[Part]:
        """Write this rank's files; the parts of all ranks in path order."""

        def write() -> list[Part]:
            parts = []
            for number, (name, data) in enumerate(sorted(mine.items()), start=1):
                self._at(verb, "writing the policy", file=(number, len(mine)))
                fault_point("update:write")
                parts.append(write_file(files, f"{out_dir}/{name}", data))
            self._at(verb, "the policy is written")
            return parts

        own = together("writing the policy", write)
        return sorted((part for found in gather(own) for part in found), key=lambda part: part.path)

    def _load_checkpoint(self, content: dict[str, bytes]) -> None:
        state = ckpt.read_state(content)
        self._check_lora(state["lora_rank"], state["lora_alpha"])
        shards = ckpt.shard_files(content)
        ckpt.init_adam_state(self._optimizer)
        ckpt.load_shards(ckpt.state_tensors(self._parameters, self._optimizer), shards)
        self._global_step = state["global_step"]
        ckpt.restore_rng(content, self._device, seed=self.config.optimizer.seed, global_step=self._global_step)

    def _load_adapter(self, content: dict[str, bytes]) -> None:
        if ADAPTER_FILE not in content:
            raise StageError("the policy holds neither a checkpoint nor an adapter")
        info = adapter_info(content[ADAPTER_FILE])
        if info.global_step:
            raise StageError(
                f"the adapter was made by {info.global_step} optimizer steps and its checkpoint is absent: "
                "training on would start from fresh moments"
            )
        self._check_lora(info.rank, info.alpha)
        assign(self._parameters, adapter_tensors(content[ADAPTER_FILE]))
        self._start_fresh()

    def _check_lora(self, rank: int, alpha: int) -> None:
        own = self.config.lora
        if (rank, alpha) != (own.lora_rank, own.lora_alpha):
            raise StageError(
                f"the policy has LoRA rank {rank} and alpha {alpha}, this run {own.lora_rank} and {own.lora_alpha}"
            )

    def _load_transformer(self) -> nn.Module:
        c = self.config
        transformer: Any = DiffusersModelBackend().load_transformer(self._folder, c.training.fsdp_master_dtype)
        attach_lora(
            transformer,
            rank=c.lora.lora_rank,
            alpha=c.lora.lora_alpha,
            target_modules=self._targets,
            init=c.lora.lora_init_weights,
            seed=c.optimizer.seed,
        )
        if c.training.gradient_checkpointing:
            transformer.enable_gradient_checkpointing()
        module: nn.Module = transformer.to(self._device)
        return module

    def _read_probe(self, files: Files, part: Part | None) -> Probe | None:
        if part is None:
            return None
        return together("reading the probe", lambda: read_probe(read_bytes(files, part)))

    def _start_fresh(self) -> None:
        ckpt.init_adam_state(self._optimizer)
        ckpt.seed_rng(self.config.optimizer.seed, 0)
        self._global_step = 0

    def _adapter(self) -> dict[str, torch.Tensor]:
        return {name: whole(parameter) for name, parameter in self._parameters.items()}

    def _adapter_file(self, adapter: dict[str, torch.Tensor]) -> bytes:
        return to_diffusers(
            to_safetensors(adapter),
            rank=self.config.lora.lora_rank,
            alpha=self.config.lora.lora_alpha,
            target_modules=self._targets,
            global_step=self._global_step,
        )


def _state_key(contents: Any) -> str:
    """Identity of a trainer's whole state, from (file, content digest) of the files that hold it."""
    return content_digest([], contents)
