"""The classes that run as Ray actors: thin shells around engines, parsers, scorers and trainer ranks.

Tensors stay between actors: an engine's result goes to a parser by reference, a policy is read from the store.
"""

import os
import socket
from dataclasses import dataclass
from typing import Any

import ray

from miles_core.config import RunConfig
from miles_core.errors import StageError
from miles_core.rollout.microgroup import Microgroup
from miles_core.rollout.protocol import GenerateRequest, GenerateResult, SyncReply
from miles_core.store.files import Files
from miles_core.store.parts import Part, read_bytes


@dataclass(frozen=True)
class Receipt:
    """What a generate call tells the driver: nothing but its time."""

    engine: str
    seconds: float


class EngineActor:
    """One rollout engine. `generate` returns two objects, so that the driver fetches the small one alone."""

    def __init__(self, name: str, config: RunConfig, checkpoint: str, family: str, device: str) -> None:
        from miles_core.rollout.diffusers_engine import DiffusersEngine

        one_thread()
        self.engine = DiffusersEngine(
            name=name,
            checkpoint=checkpoint,
            family=family,
            dtype=config.training.diffusion_forward_dtype,
            device=device,
            lora_target_modules=config.lora.lora_target_modules,
        )
        self.lora = {"lora_alpha": config.lora.lora_alpha, "lora_rank": config.lora.lora_rank}
        self.engine.start()

    def generate(self, request: GenerateRequest) -> tuple[GenerateResult, Receipt]:
        result = self.engine.generate(request)
        return result, Receipt(result.engine, result.seconds)

    def load_policy(self, files: Files, adapter: Part) -> SyncReply:
        """Read the adapter from the store and take it into the model."""
        from miles_core.weights.packing import to_push

        return self.engine.update_weights(to_push(read_bytes(files, adapter)), **self.lora)

    def checksum(self) -> str:
        return self.engine.checksum()

    def probe(self, request: GenerateRequest) -> Any:
        """The model's output on the probe request, and what the trainer needs to replay it."""
        from miles_core.weights.probe import probe_of

        return probe_of(request, self.engine.generate(request))

    def health(self) -> bool:
        return self.engine.health()

    def pid(self) -> int:
        return os.getpid()


class ParserActor:
    """Encodes and writes what the engines return."""

    def __init__(self) -> None:
        from miles_core.rollout.parsing import ParserWorker

        one_thread()
        self.worker = ParserWorker()

    def write(self, files: Files, result: GenerateResult, **arguments: Any) -> tuple[Microgroup, Part | None]:
        return self.worker.write(files, result, **arguments)

    def write_probe(self, files: Files, path: str, probe: Any) -> Part:
        from miles_core.weights.probe import write_probe

        return write_probe(files, path, probe)

    def compare_probe(self, files: Files, probe: Any, before: Part, trainer: Part, tolerance: float) -> Any:
        """Whether an engine's output after a push is the trainer's; see weights.probe.compare."""
        from miles_core.weights.probe import compare

        return compare(files, probe, before, trainer, tolerance)


class RewardActor:
    """One scorer process."""

    def __init__(self, name: str, args: dict[str, Any], ocr_folders: tuple[str, str] | None) -> None:
        from miles_core.rewards.worker import RewardWorker

        one_thread()
        self.worker = RewardWorker(args, ocr_folders, name)
        self.worker.warm_up()

    def score(
        self, files: Files, part: Part, path: str, components: list[str], rm_types: dict[int, str | None]
    ) -> Part:
        return self.worker.score(files, part, path, components, rm_types)


class TrainerActor:
    """One trainer rank."""

    def __init__(self) -> None:
        one_thread()
        self.rank: Any = None
        self.done = (0, 0)

    def address(self) -> tuple[str, int]:
        """Where rank 0 can be met."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return "127.0.0.1", int(probe.getsockname()[1])

    def start(self, config: RunConfig, checkpoint: str, family: str, **place: Any) -> None:
        from miles_core.training.trainer import TrainerRank

        self.rank = TrainerRank(config, checkpoint, family, **place)
        self.rank.start()

    def call(self, verb: str, *arguments: Any) -> Any:
        if self.rank is None:
            raise StageError("the trainer was not started")
        if verb == "update":
            arguments = (*arguments, self._advance)
        return getattr(self.rank, verb)(*arguments)

    @ray.method(concurrency_group="watch")
    def progress(self) -> tuple[int, int]:
        """(done, all) forwards of the update at work."""
        return self.done

    def _advance(self, at: dict[str, int]) -> None:
        total = at["steps"] * at["micro_batches"]
        self.done = (at["step"] * at["micro_batches"] + at["micro_batch"] + 1, total)


def one_thread() -> None:
    """One compute thread a process on the CPU: the same bits on any machine, and more processes beat more threads."""
    import torch

    torch.set_num_threads(1)
