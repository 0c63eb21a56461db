"""The packaged checkpoint through diffusers, the embedded engine and the sglang engine: the same prompts and seeds.

Run with -s for the measured differences.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from miles_core.rewards.ocr import OcrReader
from miles_core.rewards.ocr_models import ocr_model_dirs
from miles_core.rollout.diffusers_engine import DiffusersEngine
from miles_core.rollout.protocol import GenerateRequest
from miles_core.rollout.sglang.engine import SglangEngine
from miles_core.words import CHECKPOINT
from miles_core.words.architecture import TOKENS

pytest.importorskip("sglang.multimodal_gen", reason="the sglang extra is not installed")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

IMAGE_LIMIT, LOG_PROB_LIMIT = 1e-4, 1e-5
BASE = GenerateRequest(
    prompt='a red sign that says "MILES"',
    negative_prompt="",
    seed=5,
    num_outputs=3,
    height=64,
    width=128,
    num_inference_steps=10,
    guidance_scale=1.0,
    sde_type="sde",
    noise_level=0.7,
    log_prob_no_const=False,
    sde_step_indices=None,
    generator_device="cpu",
)
PROMPTS = (
    'a red sign that says "MILES"',
    'chalk on a blackboard saying "ZEBRA", cluttered',
    "a prompt of other words " * 9,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    engine = SglangEngine(
        name="engine-0",
        checkpoint=str(CHECKPOINT),
        family="sd3",
        dtype="fp32",
        device="cpu",
        log=log,
        options={},
        seconds=240,
    )
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def embedded() -> Iterator[DiffusersEngine]:
    engine = DiffusersEngine(name="embedded", checkpoint=str(CHECKPOINT), family="sd3", dtype="fp32", device="cpu")
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> OcrReader:
    return OcrReader(*ocr_model_dirs(tmp_path_factory.mktemp("ocr")))


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusion3Pipeline:
    made = StableDiffusion3Pipeline.from_pretrained(CHECKPOINT, torch_dtype=torch.float32, local_files_only=True)
    made.set_progress_bar_config(disable=True)
    return made


@pytest.mark.parametrize("prompt", PROMPTS, ids=["plain", "styled", "too long"])
def test_both_engines_draw_the_same(server, embedded, prompt: str):
    request = replace(BASE, prompt=prompt)
    theirs, mine = server.generate(request), embedded.generate(request)
    hidden = "pos.encoder_hidden_states"
    assert theirs.conditioning[hidden].shape == mine.conditioning[hidden].shape == (2 * TOKENS, 128)
    image = max((a.image - b.image).abs().max().item() for a, b in zip(theirs.outputs, mine.outputs, strict=True))
    probability = max(
        (a.log_probs - b.log_probs).abs().max().item() for a, b in zip(theirs.outputs, mine.outputs, strict=True)
    )
    print(f"\n{prompt[:40]}: image {image:.1e}, log-prob {probability:.1e}", end="")
    assert image <= IMAGE_LIMIT and probability <= LOG_PROB_LIMIT
    assert (mine.outputs[0].image - mine.outputs[1].image).abs().max() > 100 * IMAGE_LIMIT


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_diffusers_own_pipeline_draws_the_same(request, embedded, pipeline, guidance: float):
    """Without noise: diffusers has no SDE sampler. Its caller says the length of the texts. The server cannot guide with
    short texts, which resolve_inputs says at the start."""
    asked = replace(BASE, num_outputs=1, guidance_scale=guidance, sde_type="ode")
    latents = embedded.generate(asked).outputs[0].latents[0][None]
    drawn = pipeline(
        BASE.prompt,
        negative_prompt="",
        height=64,
        width=128,
        num_inference_steps=10,
        guidance_scale=guidance,
        latents=latents,
        max_sequence_length=TOKENS,
        output_type="pt",
    ).images[0]
    for engine in [embedded] + ([request.getfixturevalue("server")] if guidance == 1.0 else []):
        difference = (engine.generate(asked).outputs[0].image - drawn).abs().max().item()
        print(f"\n{engine.name}, guidance {guidance}: {difference:.1e}", end="")
        assert difference <= IMAGE_LIMIT


def test_words_that_were_never_trained_can_be_read(embedded, reader):
    for word in ("MILES", "ZEBRA", "HONEY"):
        outputs = embedded.generate(replace(BASE, prompt=f'a blue sign that says "{word}", clear')).outputs
        for output in outputs:
            pixels = (output.image * 255).round().byte().permute(1, 2, 0).numpy()
            assert reader.read(pixels).replace(" ", "") == word
