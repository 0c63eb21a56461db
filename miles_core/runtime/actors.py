"""The classes that run as Ray actors: thin shells around engines, parsers, scorers and trainer ranks.

Tensors stay between actors: an engine's result goes to a parser by reference, a policy is read from the store.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ray

from miles_core.config import RunConfig
from miles_core.errors import StageError
from miles_core.rollout.microgroup import Microgroup
from miles_core.rollout.protocol import Answer, GenerateRequest, SyncReply
from miles_core.runtime.faults import fault_point
from miles_core.runtime.fenced import FencedActor, Terms, loading
from miles_core.runtime.ports import free_ports
from miles_core.store.files import Files
from miles_core.store.parts import Part, read_bytes


@dataclass(frozen=True)
class Receipt:
    """What a generate call tells the driver: nothing but its time."""

    engine: str
    seconds: float


class WrongPolicy(StageError):
    """An engine was asked to generate under a policy that it does not hold."""


class EngineActor(FencedActor):
    """One rollout engine. `generate` returns two objects, so that the driver fetches the small one alone."""

    changes: ClassVar = frozenset({"load_policy"})

    @loading()
    def __init__(
        self, terms: Terms, config: RunConfig, checkpoint: str, family: str, device: str, logs: str = ""
    ) -> None:
        from miles_core.rollout.engines import make_engine
        from miles_core.training.determinism import make_deterministic

        super().__init__(terms)
        make_deterministic(config.training.deterministic_mode, device)
        self.engine = make_engine(terms.name, config, checkpoint, family, device, Path(logs))
        self.lora = {"lora_alpha": config.lora.lora_alpha, "lora_rank": config.lora.lora_rank}
        self.engine.start()
        self.held = self.engine.checksum()
        # Where its server dies the engine is dead.
        self.engine.when_gone(lambda: os._exit(1))

    def generate(self, request: GenerateRequest, policy_digest: str, describe: bool = True) -> tuple[Answer, Receipt]:
        """`describe`: with the conditioning. Raises WrongPolicy where the engine does not hold the policy that the rows will
        name."""
        if self.held != policy_digest:
            raise WrongPolicy(f"{self.engine.name} holds policy {self.held[:12] or 'none'}, not {policy_digest[:12]}")
        fault_point("rollout:generate")
        result = self.engine.answer(request, describe=describe)
        return result, Receipt(result.engine, result.seconds)

    def load_policy(self, files: Files, adapter: Part) -> SyncReply:
        """Read the adapter from the store and take it into the model."""
        from miles_core.weights.adapter_file import to_push

        fault_point("sync:push")
        self.held = ""
        reply = self.engine.update_weights(to_push(read_bytes(files, adapter)), **self.lora)
        self.held = reply.policy_digest
        fault_point("sync:pushed")
        return reply

    def checksum(self) -> str:
        return self.engine.checksum()

    def probe(self, request: GenerateRequest) -> tuple[Any, Receipt]:
        """The model's output on the probe request, and what the trainer needs to replay it."""
        from miles_core.weights.probe import probe_of

        result = self.engine.generate(request)
        return probe_of(request, result), Receipt(result.engine, result.seconds)


class ParserActor(FencedActor):
    """Encodes and writes what the engines return."""

    @loading()
    def __init__(self, terms: Terms) -> None:
        from miles_core.rollout.parsing import ParserWorker

        super().__init__(terms)
        self.worker = ParserWorker()

    def write(self, files: Files, result: Answer, **arguments: Any) -> tuple[Microgroup, Part | None]:
        fault_point("rollout:write")
        return self.worker.write(files, result.opened(), **arguments)

    def encode(self, result: Answer, **arguments: Any) -> tuple[Any, int]:
        """The rows of an evaluation's request, to be scored, and how many there are."""
        from miles_core.rollout.parsing import evaluated_table

        made = evaluated_table(result.opened(), **arguments)
        return made, made.num_rows

    def write_probe(self, files: Files, path: str, probe: Any) -> Part:
        from miles_core.weights.probe import write_probe

        return write_probe(files, path, probe)

    def compare_probe(self, files: Files, probe: Any, before: Part, trainer: Part, tolerance: float) -> Any:
        """Whether an engine's output after a push is the trainer's; see weights.probe.compare."""
        from miles_core.weights.probe import compare

        return compare(files, probe, before, trainer, tolerance)


class RewardActor(FencedActor):
    """One scorer process."""

    @loading()
    def __init__(
        self,
        terms: Terms,
        args: dict[str, Any],
        ocr_folders: tuple[str, str] | None,
        pickscore: tuple[str, str, str] | None,
        device: str,
    ) -> None:
        from miles_core.rewards.pickscore_models import PickFolders
        from miles_core.rewards.worker import RewardWorker

        super().__init__(terms)
        folders = PickFolders(*pickscore) if pickscore else None
        self.worker = RewardWorker(args, ocr_folders, terms.name, folders, device)
        self.worker.warm_up()

    def score(
        self, files: Files, part: Part, path: str, components: list[str], metadata: dict[int, dict[str, Any]]
    ) -> Part:
        fault_point("rewards:score")
        return self.worker.score(files, part, path, components, metadata)

    def probe(
        self,
        files: Files,
        part: Part,
        start: int,
        stop: int,
        components: list[str],
        metadata: dict[int, dict[str, Any]],
    ) -> None:
        self.worker.probe(files, part, start, stop, components, metadata)

    def score_evaluation(
        self, files: Files, made: Any, path: str, components: list[str], metadata: dict[int, dict[str, Any]]
    ) -> Part:
        fault_point("evaluation:score")
        return self.worker.score_evaluation(files, made, path, components, metadata)


class TrainerActor(FencedActor):
    """One trainer rank."""

    changes: ClassVar = frozenset({"start", "load", "update"})

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms)
        self.rank: Any = None
        self.done = (0, 0)
        # Of no use until it has met the other ranks.
        self._dirty = True

    def address(self, one_node: bool) -> tuple[str, int]:
        """Where rank 0 can be met: on loopback where the cluster has one node."""
        host = "127.0.0.1" if one_node else ray.util.get_node_ip_address()
        return host, free_ports(host=host)[0]

    @loading()
    def start(self, config: RunConfig, checkpoint: str, family: str, **place: Any) -> None:
        """Join the ranks' process group and load the model."""
        from miles_core.training.trainer import TrainerRank

        self.rank = TrainerRank(config, checkpoint, family, **place)
        self.rank.start()

    def at(self) -> str:
        return "idle" if self.rank is None else str(self.rank.at)

    def init_policy(self, *arguments: Any) -> Any:
        """TrainerRank.init_policy."""
        return self._started.init_policy(*arguments)

    def update(self, *arguments: Any) -> Any:
        """TrainerRank.update, its progress to be read by `progress`."""
        return self._started.update(*arguments, self._advance)

    @ray.method(concurrency_group="watch")
    def progress(self) -> tuple[int, int]:
        """(done, all) forwards of the update at work."""
        return self.done

    @property
    def _started(self) -> Any:
        if self.rank is None:
            raise StageError("the trainer was not started")
        return self.rank

    def _advance(self, at: dict[str, int]) -> None:
        total = at["steps"] * at["micro_batches"]
        self.done = (at["step"] * at["micro_batches"] + at["micro_batch"] + 1, total)
