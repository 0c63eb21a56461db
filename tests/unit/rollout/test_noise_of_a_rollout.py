"""From the data source through the rollout function to the engine: no two samples of a run share their noise."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deployments.recipes import recipe
from miles_core.config import RunConfig
from miles_core.data.data_source import RolloutDataSourceWithBuffer
from miles_core.data.sample import Sample
from miles_core.families.tiny_sd3 import make_tiny_sd3
from miles_core.rollout.diffusers_engine import DiffusersEngine
from miles_core.rollout.protocol import GeneratedOutput, GenerateRequest
from miles_core.rollout.rollout_function import GENERATOR, generate_rollout
from miles_core.training.determinism import make_deterministic

GROUPS, N, ITERATIONS = 4, 4, 2


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiffusersEngine]:
    model = make_tiny_sd3(tmp_path_factory.mktemp("models") / "tiny-stable-diffusion-3.5-medium")
    made = DiffusersEngine(name="engine-0", checkpoint=str(model), family="sd3", dtype="fp32", device="cpu")
    made.start()
    yield made
    made.stop()


@pytest.fixture(params=[False, True], ids=["usual", "deterministic"])
def mode(request: pytest.FixtureRequest) -> Iterator[bool]:
    make_deterministic(request.param, "cpu")
    yield request.param
    make_deterministic(False, "cpu")


def config(tmp_path: Path, size: int) -> RunConfig:
    """Three prompts, two of which are the same text, so that an iteration draws one of them twice."""
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"input": text}) for text in ("a cat", "a cat", "a dog")))
    return recipe("tiny").replace(
        prompt_data=str(path),
        rollout_batch_size=GROUPS,
        n_samples_per_prompt=N,
        rollout_microgroup_size=size,
        diffusion_height=32,
        diffusion_width=32,
        diffusion_num_steps=3,
        diffusion_num_sde_steps=2,
        diffusion_sde_window_range=(0, 2),
    )


class Made:
    """Generates with the engine and keeps what came of each sample."""

    def __init__(self, engine: DiffusersEngine) -> None:
        self.engine = engine
        self.outputs: dict[int, GeneratedOutput] = {}
        self.samples: dict[int, Sample] = {}

    async def generate(self, request: GenerateRequest, microgroup: list[Sample]) -> None:
        outputs = self.engine.generate(request).outputs
        assert len(outputs) == len(microgroup)
        for sample, output in zip(microgroup, outputs, strict=True):
            assert output.seed == sample.seed
            self.outputs[sample.index], self.samples[sample.index] = output, sample


def rollouts(engine: DiffusersEngine, config: RunConfig) -> Made:
    made, source = Made(engine), RolloutDataSourceWithBuffer(config.args())
    token = GENERATOR.set(made)
    for iteration in range(ITERATIONS):
        generate_rollout(config.args(), iteration, source)
    GENERATOR.reset(token)
    return made


@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_two_samples_share_noise_log_probs_or_image(
    engine: DiffusersEngine, tmp_path: Path, size: int, mode: bool
) -> None:
    """Whether a group is one request or many: its members (pitfalls 19, 39), the prompts of an iteration, and the same
    place in another iteration (pitfall 35). In deterministic mode too (pitfall 39)."""
    made = rollouts(engine, config(tmp_path, size))
    assert sorted(made.outputs) == list(range(GROUPS * N * ITERATIONS))
    assert len({sample.prompt for sample in made.samples.values()}) == 2
    for name in ("latents", "log_probs", "image"):
        values = [getattr(output, name).numpy().tobytes() for output in made.outputs.values()]
        assert len(set(values)) == len(values), name
    first = [output.latents[0].numpy().tobytes() for output in made.outputs.values()]
    drawn = torch.stack([output.latents[1] for output in made.outputs.values()])
    assert len(set(first)) == len(first)
    apart = torch.cdist(drawn.flatten(1), drawn.flatten(1)) + 1e3 * torch.eye(len(drawn))
    assert apart.min() > 1


def test_the_noise_of_a_sample_is_its_seeds_alone(engine: DiffusersEngine, tmp_path: Path) -> None:
    """Its first latent is the same however its group is cut into requests (pitfall 35: indices within a chunk)."""
    whole, single = (rollouts(engine, config(tmp_path, size)).outputs for size in (4, 1))
    for index, output in whole.items():
        assert torch.equal(output.latents[0], single[index].latents[0])
    assert not torch.equal(whole[1].latents[1], single[1].latents[1])
