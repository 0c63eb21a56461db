"""An engine that sleeps and wakes: as often as it is told, with the same bits, and no work in between."""

from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import save as save_safetensors

from miles_core.errors import InputError, StageError
from miles_core.families.tiny_sd3 import make_tiny_sd3
from miles_core.rollout.diffusers_engine import DiffusersEngine
from miles_core.rollout.protocol import GenerateRequest, GenerateResult

REQUEST = GenerateRequest(
    prompt="a red fox",
    negative_prompt="blurry",
    seed=11,
    num_outputs=2,
    height=32,
    width=48,
    num_inference_steps=3,
    guidance_scale=4.5,
    sde_type="sde",
    noise_level=0.7,
    log_prob_no_const=False,
    sde_step_indices=(0, 1),
    generator_device="cpu",
)
OTHER = {
    "prompt": "a blue boat",
    "negative_prompt": None,
    "seed": 12,
    "num_outputs": 1,
    "height": 48,
    "width": 32,
    "num_inference_steps": 4,
    "guidance_scale": 2.0,
    "sde_type": "cps",
    "noise_level": 0.3,
    "log_prob_no_const": True,
    "sde_step_indices": (0,),
    "generator_device": "cuda",
    "debug": True,
}
MODULE = "transformer_blocks.0.attn.to_q"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiffusersEngine]:
    model = make_tiny_sd3(tmp_path_factory.mktemp("models") / "tiny-stable-diffusion-3.5-medium")
    made = DiffusersEngine(
        name="engine-0", checkpoint=str(model), family="sd3", dtype="fp32", device="cpu", lora_target_modules=(MODULE,)
    )
    made.start()
    push(made, 1)
    yield made
    made.stop()


def push(engine: DiffusersEngine, seed: int) -> str:
    """Give it an adapter that moves its output; the digest it then reports."""
    draw = torch.Generator().manual_seed(seed)
    pair = {f"{MODULE}.lora_{name}.weight": torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    return engine.update_weights(save_safetensors(pair), lora_alpha=8, lora_rank=4).policy_digest


SHAPES = {"A": (4, 64), "B": (64, 4)}


def bits(result: GenerateResult) -> list[bytes]:
    names = ("image", "log_probs", "latents", "timesteps", "sigmas", "model_outputs")
    found = [getattr(output, name) for output in result.outputs for name in names]
    tensors = [tensor for tensor in found if tensor is not None]
    return [t.numpy().tobytes() for t in [*tensors, *result.conditioning.values()]]


@pytest.mark.parametrize(
    "verbs",
    [
        "sleep wake",
        "sleep sleep wake",
        "sleep wake wake",
        "wake",
        "sleep sleep wake wake sleep wake",
        "sleep start wake",
    ],
)
def test_sleep_and_wake_as_often_as_they_come_leave_the_same_bits(engine: DiffusersEngine, verbs: str) -> None:
    """A sleep that toggles, counts or moves twice (pitfall 17)."""
    before, digest = bits(engine.generate(REQUEST)), engine.checksum()
    for verb in verbs.split():
        getattr(engine, verb)()
        assert engine.health()
        assert engine.checksum() == digest
    assert bits(engine.generate(REQUEST)) == before
    other = push(engine, 2)
    assert other != digest and bits(engine.generate(REQUEST)) != before
    assert push(engine, 1) == digest and bits(engine.generate(REQUEST)) == before


@pytest.mark.parametrize("sleeps", [1, 2])
def test_work_for_an_engine_that_is_asleep_is_one_clear_error(engine: DiffusersEngine, sleeps: int) -> None:
    """And changes nothing: the policy in force stays (pitfall 17)."""
    before, digest = bits(engine.generate(REQUEST)), engine.checksum()
    for _ in range(sleeps):
        engine.sleep()
    for work in (lambda: engine.generate(REQUEST), lambda: push(engine, 2)):
        with pytest.raises(StageError) as caught:
            work()
        assert str(caught.value) == "engine engine-0 is asleep: wake it before it generates or takes a policy"
    assert engine.checksum() == digest
    engine.wake()
    assert bits(engine.generate(REQUEST)) == before


@pytest.mark.parametrize("name", [field.name for field in fields(GenerateRequest)])
def test_every_field_of_a_request_has_an_effect(engine: DiffusersEngine, name: str) -> None:
    """Not one option of the rollout is dropped on its way (pitfall 32)."""
    assert set(OTHER) == {field.name for field in fields(GenerateRequest)}
    changed = replace(REQUEST, **{name: OTHER[name]})
    if name == "generator_device" and not torch.cuda.is_available():
        with pytest.raises(InputError, match="needs a GPU"):
            engine.generate(changed)
        return
    assert bits(engine.generate(changed)) != bits(engine.generate(REQUEST))
