"""What the checks look at: a configuration, and what it leads to, each thing made once and when it is first needed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from miles_core.config import RunConfig
from miles_core.config.folders import artifact_root, home, own_args
from miles_core.data.prompts import Prompt, load_prompts, resolve_prompt_path
from miles_core.data.sample import Sample
from miles_core.doctor.check import NotLooked
from miles_core.errors import InputError
from miles_core.families.resolve import family_of, resolve_checkpoint
from miles_core.families.sizes import SHAPES
from miles_core.pipeline.inputs import Inputs, resolve_inputs
from miles_core.pipeline.source import opened, reads_prompt_file
from miles_core.runtime.ports import free_ports
from miles_core.store.files import Files
from miles_core.store.run_store import RunStore

if TYPE_CHECKING:
    from miles_core.doctor.trial import Trial
    from miles_core.rewards.custom import CustomReward
    from miles_core.rewards.rm_hub import Scorers

T = TypeVar("T")


class Subject:
    """A context: the trial's temporary files and process group end with it. `say` is told what takes a while.

    A property raises what is wrong when it is first asked for, and NotLooked afterwards: one fault, one stop.
    """

    def __init__(self, config: RunConfig, recipe: str, say: Callable[[str], None] = lambda text: None) -> None:
        self.config, self.recipe, self.say = config, recipe, say
        self._made: dict[str, Any] = {}
        self._failed: set[str] = set()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Subject:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def files(self) -> Files:
        return self._once("the artifact root", lambda: Files(artifact_root(self.config)))

    @property
    def store(self) -> RunStore:
        return self._once("the run's name", lambda: RunStore(self.files, self.config.run.run_id or self.recipe))

    @property
    def prompts(self) -> list[Prompt]:
        return self._once("the prompts", self._prompts)

    @property
    def checkpoint(self) -> Path:
        """The pipeline's folder."""
        return self._once("the model", self._checkpoint)

    @property
    def family(self) -> str:
        return self._once(
            "the model's family", lambda: self.config.rollout.diffusion_model_family or family_of(self.checkpoint)
        )

    @property
    def lora_targets(self) -> tuple[str, ...]:
        return self.config.lora.lora_target_modules or SHAPES[self.family].lora_target_modules

    @property
    def inputs(self) -> Inputs:
        """All input files, digested."""
        self._need_prompts_and_model()
        return self._once("the input files", lambda: resolve_inputs(self.config))

    @property
    def gpus(self) -> list[int]:
        """Bytes of each GPU that this run could use: this machine's, or 0 each for those of the cluster at RAY_ADDRESS."""
        return self._once("the GPUs", self._gpus)

    @property
    def device(self) -> str:
        """cpu or cuda: what trainer and engines will run on."""
        chosen = self.config.cluster.device
        return ("cuda" if self.gpus else "cpu") if chosen == "auto" else chosen

    @property
    def cluster_resources(self) -> dict[str, float]:
        """What the Ray cluster at RAY_ADDRESS offers."""
        return self._once("the Ray cluster", self._cluster_resources)

    @property
    def scorers(self) -> Scorers:
        """The recipe's scorers, in this process."""
        return self._once("the scorers", self._scorers)

    @property
    def trial(self) -> Trial:
        """Engine and trainer of the recipe in this process, both with policy/init."""
        return self._once("the trial of engine and trainer", self._trial)

    def engine(self) -> Any:
        """A rollout engine as the run's engine processes make it, not started."""
        from miles_core.rollout.engines import make_engine

        logs = home() / "logs" / "doctor"
        return make_engine("engine-0", self.config, str(self.checkpoint), self.family, self.device, logs)

    def trainer(self, config: RunConfig) -> Any:
        """A trainer of one rank as the run's trainer process makes it, not started."""
        from miles_core.training.trainer import TrainerRank

        return TrainerRank(config, str(self.checkpoint), self.family, master_port=free_ports()[0], device=self.device)

    def _once(self, what: str, make: Callable[[], T]) -> T:
        if what in self._failed:
            raise NotLooked(f"not looked at: it needs {what}, see above")
        if what not in self._made:
            try:
                self._made[what] = make()
            except NotLooked:
                raise
            except Exception:
                self._failed.add(what)
                raise
        return cast(T, self._made[what])

    def _need_prompts_and_model(self) -> None:
        """A fault of either is theirs, not that of what is made from them."""
        for needed in ("prompts", "checkpoint"):
            getattr(self, needed)

    def draw(self, count: int) -> list[list[Sample]]:
        """Groups that the run's iteration 0 draws, by the data source that it draws them by."""
        with opened(self.config, 0, self.files, None) as source:
            return source.draw(count)

    def _prompts(self) -> list[Prompt]:
        data = self.config.data
        if not reads_prompt_file(self.config):
            firsts = [group[0] for group in self.draw(data.rollout_batch_size)]
            return [Prompt(place, sample.prompt, sample.metadata) for place, sample in enumerate(firsts)]
        if not data.prompt_data:
            raise InputError("--prompt-data is missing: give a .jsonl or text file with prompts")
        return load_prompts(
            resolve_prompt_path(data.prompt_data),
            input_key=data.input_key,
            metadata_key=data.metadata_key,
            rm_type=self.config.reward.rm_type,
            rm_types=self.config.reward.rm_types,
            custom=self.config.reward.custom_rm_path is not None,
        )

    def _checkpoint(self) -> Path:
        return resolve_checkpoint(self.config.rollout.hf_checkpoint, home())

    def _gpus(self) -> list[int]:
        if self.config.cluster.device == "cpu":
            return []
        if os.environ.get("RAY_ADDRESS"):
            return [0] * int(self.cluster_resources.get("GPU", 0))
        import torch

        return [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]

    def _cluster_resources(self) -> dict[str, float]:
        from miles_core.runtime.cluster import ray_cluster

        with ray_cluster(home() / "state"):
            import ray

            return dict(ray.cluster_resources())

    def _scorers(self) -> Scorers:
        from miles_core.rewards.ocr_models import OcrDirs
        from miles_core.rewards.rm_hub import Scorers

        folders = self.inputs.ocr_folders
        ocr = OcrDirs(*folders) if folders else None
        return Scorers(ocr, self.config.reward.ocr_min_confidence, self.inputs.pickscore, self.device)

    @property
    def own_reward(self) -> CustomReward:
        """The recipe's own reward, in this process."""
        return self._once("the own reward", self._own_reward)

    def _own_reward(self) -> CustomReward:
        from miles_core.rewards.custom import CustomReward

        return CustomReward(own_args(self.config))

    def _trial(self) -> Trial:
        self._need_prompts_and_model()
        import torch

        from miles_core.doctor.trial import Trial, trial_config

        if self.device == "cuda" and not torch.cuda.is_available():
            raise NotLooked("not looked at: this machine has no GPU, give the command where there is one")

        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="miles-doctor-"))
        trial = Trial(self, self.engine(), self.trainer(trial_config(self.config)), Files(folder))
        self._stack.callback(trial.end)
        self.say("loading engine and trainer")
        trial.start()
        return trial
