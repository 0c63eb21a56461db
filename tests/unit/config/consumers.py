"""What the code that consumes an option makes of a configuration: one small figure each, without a model or Ray."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import torch
from torch import nn

from flows.session import train_session
from miles_core.algorithms.advantages import post_process_rewards
from miles_core.algorithms.flow_grpo import LossContext, flow_grpo_loss_formula, prepare_flow_grpo_batch
from miles_core.algorithms.sde import sde_step_backend
from miles_core.config import RunConfig
from miles_core.data.sample import Sample
from miles_core.errors import InputError, StageError
from miles_core.pipeline import prompts
from miles_core.pipeline.inputs import Inputs, resolve_inputs
from miles_core.pipeline.retention import rules_of
from miles_core.pipeline.run import begin_run, plan_run
from miles_core.pipeline.source import opened
from miles_core.pipeline.stage import Step, run_stage
from miles_core.pipeline.waves import draw_waves
from miles_core.rewards.rm_hub import Scorers, batched_async_rm, score_sample
from miles_core.rewards.scores import Score
from miles_core.rewards.worker import RewardWorker
from miles_core.rollout.engines import make_engine
from miles_core.rollout.protocol import GenerateRequest
from miles_core.rollout.rollout_function import GENERATOR, generate_rollout, sampling_params
from miles_core.rollout.sglang.server import command
from miles_core.rollout.step_strategies import step_seed
from miles_core.runtime.workers import Workers
from miles_core.store.files import Files
from miles_core.store.parts import read_table
from miles_core.store.run_store import RunStore
from miles_core.training.inputs import row_args
from miles_core.training.lr_schedule import learning_rate
from miles_core.training.optimize import clip_and_step, make_adamw
from miles_core.training.rows import Dynamics

ITERATIONS = 40
OWN = """
async def score(args, samples): return [1.0 for _ in samples]
def normalize(args, samples): return [], []
def drop(args, data): return None
def formula(ctx, batch, prepared, *, new_pred, ref_pred, metrics, **kwargs): return new_pred.sum()
def prepare(ctx, batch, *, pad_to_len=None): return batch
def pairs(args, samples, rewards, raw_rewards): return {}
def convert(args, samples): return {}
async def generate(args, microgroup, sampling_params): return microgroup
def rollout(args, rollout_id, data_source): return []
def last(args, rollout_id, buffer, num_samples): return [buffer.pop()]
class Source:
    def __init__(self, args): pass
    def get_samples(self, num_samples): return []
    def add_samples(self, samples): pass
    def save(self, rollout_id): pass
    def load(self, rollout_id=None): pass
def log_rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time): return False
def log_eval(rollout_id, args, data, extra_metrics): return False
class Backend:
    def __init__(self, *, noise_level, log_prob_no_const): pass
"""


class Place:
    """Files that options name: two models, three prompt files, two OCR models of each kind; and a home for runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("model", "other-model", "foreign-model"):
            (root / name / "transformer").mkdir(parents=True)
            kind = "Unknown" if name == "foreign-model" else "StableDiffusion3"
            index = {"_class_name": f"{kind}Pipeline", "transformer": ["diffusers", "SD3Transformer2DModel"]}
            (root / name / "model_index.json").write_text(json.dumps(index))
            (root / name / "transformer" / "w.safetensors").write_bytes(name.encode())
        for name in ("p", "q", "e"):
            rows = [
                {
                    "input": f'{name} "word {i}"',
                    "text": f'other "word {i}"',
                    "metadata": {},
                    "more": {"rm_type": "jpeg_incompressibility"},
                }
                for i in range(9)
            ]
            (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (root / "own.py").write_text(OWN)
        for name in ("clip", "other-clip"):
            (root / name).mkdir()
            for file in ("config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json"):
                (root / name / file).write_text(name)
        for kind in ("det", "rec"):
            for name in (kind, f"other-{kind}"):
                (root / name).mkdir()
                (root / name / "inference.onnx").write_bytes(name.encode())
                (root / name / "inference.yml").write_text(f"Global: {{model_name: x_{kind}}}")

    def __str__(self) -> str:
        return str(self.root)

    def inputs(self, c: RunConfig) -> Inputs:
        return resolve_inputs(c)

    def step(self, c: RunConfig) -> Step:
        store = RunStore(Files(str(self.root / "steps")), "r")
        return Step(c, resolve_inputs(c), store, cast(Workers, None), 0, moves_line=False)


# The run


def run_name(c: RunConfig, place: Place) -> str:
    return plan_run(c, "tiny").store.run


def name_of_a_second_run(c: RunConfig, place: Place) -> str:
    begin_run(plan_run(c.replace(new=False), "tiny"), "tiny", "/code")
    return run_name(c, place)


def root_of_the_artifacts(c: RunConfig, place: Place) -> str:
    return plan_run(c, "tiny").store.files.root.removeprefix(str(place))


def recorded_code_path(c: RunConfig, place: Place) -> str:
    given = {name: value for name, value in c.flat().items() if value is not None and value != ()}
    with train_session("tiny", given | {"run_id": "given" if c.run.code_path else "unset"}) as session:
        path = (session.store.record() or {})["code_path"]
    return "here" if path == os.getcwd() else str(path)


def iterations_kept(c: RunConfig, place: Place) -> dict[str, int]:
    return {rule.stage: rule.keep for rule in rules_of(c)}


def device(c: RunConfig, place: Place) -> str:
    return Workers(c, resolve_inputs(c), place.root).device


def attention_of_the_server(c: RunConfig, place: Place) -> str:
    words = command("/m", "sd3", "fp32", (1, 2, 3), "n", c.rollout.sglang_options)
    return words[words.index("--attention-backend") + 1] if "--attention-backend" in words else ""


def keeps_outputs(c: RunConfig, place: Place) -> bool:
    sample = Sample(group_index=0, index=0, prompt="p", seed=1)
    return bool(sampling_params(c.args(), [sample], 0)["debug"])


def alignment_probe(c: RunConfig, place: Place) -> tuple[bool, bool]:
    return keeps_outputs(c, place), c.skips_optimizer_step


def looks(c: RunConfig, place: Place) -> tuple[float, ...] | None:
    found = cast(Any, make_engine("engine-0", c, "/m", "sd3", "cpu", place.root))._looks
    return None if found is None else (found.interval, found.timeout, found.first_wait)


def pick_folder(kind: int) -> Callable[[RunConfig, Place], str]:
    return lambda c, place: Path((resolve_inputs(c).pickscore or ())[kind]).name


def images_a_forward(c: RunConfig, place: Place) -> list[int]:
    """Of nine samples that PickScore scores."""
    sizes: list[int] = []

    class Counting(Scorers):
        def load_pickscore(self) -> Any:
            return None

        def pick_scores(self, images: Any, prompts: Any) -> list[Score]:
            sizes.append(len(images))
            return [Score(0.0, "pickscore", "v")] * len(images)

    pixels = torch.zeros(3, 8, 8)
    samples = [Sample(group_index=0, index=i, prompt="p", seed=i, generated_output=pixels) for i in range(9)]
    asyncio.run(batched_async_rm(c.args(), samples, scorers=Counting()))
    return sizes


def scorer_processes(c: RunConfig, place: Place) -> int:
    return Workers._scorer_count(c, resolve_inputs(c))


def gpus_of_a_scorer(c: RunConfig, place: Place) -> float:
    asked: list[float] = []

    class Asking(Workers):
        def actor(self, *_: Any, gpus: float = 0.0, **__: Any) -> Any:
            asked.append(gpus)

    workers = Asking(c, resolve_inputs(c), place.root)
    workers._new_scorer("scorer-0", c.flat(), workers.inputs)
    return asked[0]


def own_functions(c: RunConfig, place: Place) -> str:
    return " ".join(resolve_inputs(c).hooks)


def loss_type(c: RunConfig, place: Place) -> str:
    return str(c.args().loss_type)


def service(c: RunConfig, place: Place) -> str | None:
    found: str | None = c.args().rm_url
    return found


def seconds_of_a_call(c: RunConfig, place: Place) -> float:
    return Workers(c, resolve_inputs(c), place.root).seconds


# Optimizer


def adamw(name: str, index: int | None = None) -> Any:
    def shown(c: RunConfig, place: Place) -> float:
        value = make_adamw({"p": nn.Parameter(torch.ones(2))}, c.optimizer).param_groups[0][name]
        return float(value if index is None else value[index])

    return shown


def norm_after_clipping(c: RunConfig, place: Place) -> float:
    """Of a gradient of norm 5, as Adam's first moment has it."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    optimizer = make_adamw({"p": parameter}, c.optimizer)
    clip_and_step(optimizer, 0.1, c.optimizer.clip_grad, set())
    return float(optimizer.state[parameter]["exp_avg"].norm()) / (1 - c.optimizer.adam_beta1)


def rate(step: int) -> Any:
    return lambda c, place: learning_rate(step, c.args())


# Rollout


def request(c: RunConfig, iteration: int = 0) -> GenerateRequest:
    sample = Sample(group_index=0, index=0, prompt="a", seed=1)
    return GenerateRequest(**sampling_params(c.args(), [sample], step_seed(c.rollout.rollout_seed, iteration)))


def requested(name: str) -> Any:
    return lambda c, place: getattr(request(c), name)


def steps_of_iterations(c: RunConfig) -> list[tuple[int, ...]]:
    return [request(c, iteration).sde_step_indices or () for iteration in range(ITERATIONS)]


def all_steps(c: RunConfig, place: Place) -> list[int]:
    return sorted(set().union(*steps_of_iterations(c)))


def always_neighbours(c: RunConfig, place: Place) -> bool:
    return all(steps == tuple(range(steps[0], steps[-1] + 1)) for steps in steps_of_iterations(c))


def steps_an_iteration(c: RunConfig, place: Place) -> int:
    return len(request(c).sde_step_indices or ())


def log_prob_constants(c: RunConfig, place: Place) -> tuple[bool, bool]:
    """Whether engine and trainer leave them out."""
    args = row_args(c, Dynamics("d", 0.7, "sde", 4.5, 6))
    return request(c).log_prob_no_const, sde_step_backend(args).log_prob_no_const


def outputs_of_the_requests(c: RunConfig, place: Place) -> list[int]:
    sizes: list[int] = []

    class Listed:
        async def generate(self, request: GenerateRequest, microgroup: list[Sample]) -> None:
            await asyncio.sleep(0)
            sizes.append(request.num_outputs)

    group = [Sample(group_index=0, index=i, prompt="a", seed=i) for i in range(c.data.n_samples_per_prompt)]
    token = GENERATOR.set(Listed())
    generate_rollout(c.args(), 0, SimpleNamespace(get_samples=lambda count: [group]))
    GENERATOR.reset(token)
    return sizes


# Prompts


def drawn(c: RunConfig, place: Place) -> list[dict[str, Any]]:
    """Rows of the first prompts stage."""
    made = run_stage(place.step(c), "prompts", {}, prompts.draw).manifest
    files = place.step(c).store.files
    return cast(list[dict[str, Any]], pa.concat_tables([read_table(files, p) for p in made.data]).to_pylist())


def served_from_the_buffer(c: RunConfig, place: Place) -> int:
    """The group that is served first of three in the buffer."""
    with opened(c, 0, place.step(c).store.files, None) as source:
        source.source.add_samples(source.source.get_samples(3))
        return source.source.get_samples(1)[0][0].group_index


def waves_of_groups(c: RunConfig, place: Place) -> list[int]:
    """Groups of each wave, where those of the first have one reward each and those of the second have spread."""
    step, waves = place.step(c), list[int]()

    def make(step: Step, attempt: Any, upstream: Any, groups: list[list[Sample]]) -> dict[int, float]:
        waves.append(len(groups))
        return {s.index: float(s.index * (len(waves) - 1)) for group in groups for s in group}

    if not c.in_waves:
        return [len({row["group_index"] for row in drawn(c, place)})]
    attempt = step.store.open_attempt("prompts", 0, "f" * 64, {}, resumable=False)
    with opened(c, 0, step.store.files, None) as source:
        draw_waves(step, attempt, {}, source, make)
    return waves


def ends_after_a_wave(c: RunConfig, place: Place) -> bool:
    try:
        return waves_of_groups(c, place) == [0]
    except StageError:
        return True


def first_words(c: RunConfig, place: Place) -> set[str]:
    return {row["prompt"].split()[0] for row in drawn(c, place)}


def own_scorers(c: RunConfig, place: Place) -> set[str | None]:
    return {row["rm_type"] for row in drawn(c, place)}


def first_seed(c: RunConfig, place: Place) -> int:
    return int(drawn(c, place)[0]["seed"])


def groups_and_samples(c: RunConfig, place: Place) -> tuple[int, int]:
    rows = drawn(c, place)
    return len({row["group_index"] for row in rows}), len(rows)


def family(c: RunConfig, place: Place) -> str:
    try:
        return resolve_inputs(c).family
    except InputError:
        return "refused"


def ocr_folder(kind: int) -> Any:
    return lambda c, place: Path((resolve_inputs(c).ocr_folders or ())[kind]).name


# Advantages and loss


def advantages(c: RunConfig, place: Place) -> list[float]:
    rewards = ((0, 0.0), (0, 1.0), (1, 2.0), (1, 6.0))
    samples = [Sample(group_index=g, index=i, prompt="", seed=0, reward=r) for i, (g, r) in enumerate(rewards)]
    return post_process_rewards(c.args(), samples)[1]


def loss(name: str) -> Any:
    """A figure of the loss of two pairs whose ratio is 1.01 and whose advantages are 7 and -1."""

    def shown(c: RunConfig, place: Place) -> float:
        args = c.args()
        ctx = LossContext(args=args, sde_backend=sde_step_backend(args))
        new_pred, ref_pred, latents = torch.ones(2, 1, 2, 2), torch.zeros(2, 1, 2, 2), torch.full((2, 1, 2, 2), 0.3)
        schedule = (torch.full((2,), 0.8), torch.full((2,), 0.6), torch.full((2,), 0.9))
        next_latents, log_prob = ctx.sde_backend.step(new_pred, latents, *schedule, torch.full((2, 1, 2, 2), 0.5))
        batch = dict(zip(("sigma", "sigma_next", "sigma_max"), schedule, strict=True)) | {
            "latents": latents,
            "next_latents": next_latents,
            "timesteps": schedule[0],
            "conditioning": {},
            "old_log_prob": log_prob - 0.01,
            "advantage": torch.tensor([7.0, -1.0]),
            "loss_mask": torch.ones(2),
        }
        metrics: dict[str, Any] = {}
        prepared = prepare_flow_grpo_batch(ctx, batch)
        total = flow_grpo_loss_formula(ctx, batch, prepared, new_pred=new_pred, ref_pred=ref_pred, metrics=metrics)
        metrics["kl_share"] = (total - metrics["policy_loss"]) / metrics["kl_loss"]
        return round(float(metrics[name]), 3)

    return shown


# Rewards


def scored() -> Sample:
    return Sample(group_index=0, index=3, prompt='a "b"', seed=0, generated_output=torch.rand(3, 16, 16))


def scorer(c: RunConfig, place: Place) -> tuple[str, bool]:
    """Its name, and whether a larger picture is better."""
    score = score_sample(c.args(), scored(), Scorers())
    return score.rm_type, score.reward > 0


def tries_of_a_failing_score(c: RunConfig, place: Place) -> int:
    tries: list[str] = []

    class Failing(Scorers):
        def score(self, rm_type: str, image: Any, prompt: str) -> Score:
            tries.append(rm_type)
            raise RuntimeError("no")

    try:
        score_sample(c.args(), scored(), Failing())
    except StageError:
        return len(tries)
    raise AssertionError("a failing score was taken")


def confidence(c: RunConfig, place: Place) -> float:
    return RewardWorker(c.flat()).scorers.ocr_min_confidence
