"""Runs whose stages are committed by the real pipeline and hold only what they were asked for: a line in seconds, on
any artifact root."""

from pathlib import Path
from typing import Any, cast

from roots import Root

from deployments.recipes import recipe
from miles_core.config import RunConfig
from miles_core.pipeline.inputs import Inputs, resolve_inputs
from miles_core.pipeline.run import begin_run, open_run, plan_run
from miles_core.pipeline.stage import Outcome, Product, Step, Upstreams, run_stage
from miles_core.pipeline.upstream import line, policy_in_force, previous_prompts
from miles_core.store.digest import canonical_json
from miles_core.store.parts import write_file
from miles_core.store.run_store import Attempt, RunStore
from miles_core.store.stages import ITERATION_STAGES, STAGES, StageName


def input_files(folder: Path) -> dict[str, str]:
    """As much of a model and prompts as a plan looks at."""
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "StableDiffusion3Pipeline"}')
    (folder / "p.txt").write_text("a cat\na dog\n")
    return {"hf_checkpoint": str(folder), "prompt_data": str(folder / "p.txt")}


class Line:
    """A run and its configuration, begun if it is not there."""

    def __init__(self, root: Root, config: RunConfig, inputs: Inputs, store: RunStore) -> None:
        self.root, self.config, self.inputs, self.store = root, config, inputs, store

    @staticmethod
    def begin(root: Root, places: dict[str, str], run: str = "parent", **changes: Any) -> "Line":
        config = recipe("tiny").replace(**places, run_id=run, artifact_root=root.files.root, **changes)
        planned = plan_run(config, "tiny")
        begin_run(planned, "tiny", "/code")
        return Line.open(root, run)

    @staticmethod
    def open(root: Root, run: str) -> "Line":
        store, config = open_run(run, root.files.root)
        return Line(root, config, resolve_inputs(config), store)

    def step(self, iteration: int, *, moves_line: bool = True, force: bool = False, **changes: Any) -> Step:
        config = self.config.replace(**changes)
        return Step(config, self.inputs, self.store, cast(Any, None), iteration, moves_line=moves_line, force=force)

    def iterate(self, iteration: int) -> dict[str, Outcome]:
        """All stages of an iteration on the line."""
        step = self.step(iteration)
        if iteration == 0:
            run_stage(step.at(-1), "policy", {}, made)
        return {stage: self.stage(step, stage) for stage in ITERATION_STAGES}

    def stage(self, step: Step, stage: StageName, **given: Any) -> Outcome:
        """One stage from what is on the line, or from what is given."""
        if stage == "prompts":
            return run_stage(step, stage, previous_prompts(step), made)
        own = [name for name in STAGES[stage].upstream if name != "policy"]
        upstream = {name: given.get(name) or line(step, name, step.iteration) for name in own}
        if "policy" in STAGES[stage].upstream:
            upstream["policy"] = policy_in_force(step)
        return run_stage(step, stage, upstream, made)

    def attempt(self, stage: StageName, iteration: int) -> str:
        manifest = self.store.on_line(stage, iteration)
        assert manifest is not None
        return manifest.attempt

    def bytes(self) -> dict[str, bytes]:
        """Every file of the run but the notes of its forks."""
        own = [name for name in self.root.names() if name.startswith(f"{self.store.run}/")]
        return {name: self.root.get(name) for name in own if "/forks/" not in name}


def made(step: Step, attempt: Attempt, upstream: Upstreams) -> Product:
    """A stage whose content is what it was asked for."""
    digests = {name: manifest.content_digest for name, manifest in upstream.items()}
    told = {"config": step.config.affecting(attempt.stage), "upstream": digests, "iteration": step.iteration}
    folders = {"rollout": ("data", "latents"), "update": ("data", "checkpoint")}.get(attempt.stage, ("data",))
    files = step.store.files
    parts = [write_file(files, attempt.path(f"{folder}/x.json"), canonical_json(told)) for folder in folders]
    figures: dict[str, Any] = {"reward_mean": 0.0, "loss": 0.0, "kept_microgroups": 0}
    return Product(parts, figures | {"policy_version": 0, "policy_digest": "0" * 64})
