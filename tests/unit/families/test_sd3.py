"""SD3 as a family: conditioning, timesteps and guidance against diffusers' own pipeline."""

from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from peft import LoraConfig

from miles_core.errors import InputError
from miles_core.families.base import DiffusersModelBackend, EngineComponents, torch_dtype
from miles_core.families.sd3 import Sd3PipelineConfig
from miles_core.families.tiny_sd3 import make_tiny_sd3

SD3 = Sd3PipelineConfig()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_sd3(tmp_path_factory.mktemp("models") / "tiny-stable-diffusion-3.5-medium")


@pytest.fixture(scope="module")
def components(folder: Path) -> EngineComponents:
    return DiffusersModelBackend().load_engine_components(folder, "fp32")


@pytest.fixture(scope="module")
def pipeline(folder: Path) -> StableDiffusion3Pipeline:
    return StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True)


def batch(components: EngineComponents, count: int = 2) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    conditioning = {
        f"{side}.{name}": value.expand(count, *value.shape)
        for side, text in (("pos", "a red fox"), ("neg", "blurry"))
        for name, value in SD3.encode_prompt(components, text).items()
    }
    return torch.randn(count, 16, 8, 8, generator=generator), torch.tensor([900.0, 300.5][:count]), conditioning


@torch.no_grad()
def test_conditioning_is_that_of_diffusers(components: EngineComponents, pipeline: StableDiffusion3Pipeline):
    for text in ("a red fox", "", "word " * 400):
        expected, _, pooled, _ = pipeline.encode_prompt(text, text, text, do_classifier_free_guidance=False)
        made = SD3.encode_prompt(components, text)
        assert made["encoder_hidden_states"].shape == (333, 64)
        assert made["pooled_projections"].shape == (64,)
        assert torch.equal(made["encoder_hidden_states"], expected[0])
        assert torch.equal(made["pooled_projections"], pooled[0])


@pytest.mark.parametrize("steps", [1, 2, 10, 40])
def test_timesteps_are_those_of_diffusers(steps: int, components: EngineComponents):
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0)
    scheduler.set_timesteps(steps)
    sigmas, timesteps = SD3.sigmas_and_timesteps(components.scheduler_config, steps, height=64, width=64)
    assert torch.equal(sigmas, scheduler.sigmas)
    assert torch.equal(timesteps, scheduler.timesteps)
    assert (sigmas.shape, sigmas.dtype, timesteps.dtype) == ((steps + 1,), torch.float32, torch.float32)
    assert sigmas[0] == 1
    assert sigmas[-1] == 0
    assert bool((sigmas[:-1] > sigmas[1:]).all())


def test_dynamic_shift_is_that_of_the_pipeline(pipeline: StableDiffusion3Pipeline):
    config = dict(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).config)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(config)
    pipeline.set_progress_bar_config(disable=True)
    pipeline("a", num_inference_steps=3, height=64, width=96, output_type="latent")
    sigmas, _ = SD3.sigmas_and_timesteps(config, 3, height=64, width=96)
    assert torch.equal(sigmas, pipeline.scheduler.sigmas)
    assert not torch.equal(sigmas, SD3.sigmas_and_timesteps(config, 3, height=128, width=128)[0])


def test_latent_shape():
    assert SD3.latent_shape(512, 256) == (16, 64, 32)


def test_fsdp_blocks_are_the_transformer_blocks(components: EngineComponents):
    blocks = SD3.fsdp_blocks(components.transformer)
    assert [type(b).__name__ for b in blocks] == ["JointTransformerBlock"] * 2


def test_every_lora_target_binds(folder: Path):
    transformer = DiffusersModelBackend().load_transformer(folder, "fp32")
    transformer.add_adapter(LoraConfig(r=2, target_modules=list(SD3.lora_target_modules)))
    wrapped = {n.split(".lora_A")[0] for n, _ in transformer.named_parameters() if ".lora_A." in n}
    assert len(wrapped) == 15
    for target in SD3.lora_target_modules:
        assert any(name.endswith("." + target) for name in wrapped), target


@torch.no_grad()
def test_guidance_is_neg_plus_g_times_the_difference(components: EngineComponents):
    latents, timesteps, conditioning = batch(components)

    def call(side: str) -> torch.Tensor:
        return components.transformer(
            hidden_states=latents,
            timestep=timesteps,
            encoder_hidden_states=conditioning[side + ".encoder_hidden_states"],
            pooled_projections=conditioning[side + ".pooled_projections"],
        ).sample.double()

    pos, neg = call("pos"), call("neg")
    assert (pos - neg).abs().max() > 1e-4
    guided = SD3.forward(components.transformer, latents, timesteps, conditioning, 4.5, torch.float32)
    assert guided.dtype == torch.float32
    assert (guided.double() - (neg + 4.5 * (pos - neg))).abs().max() < 1e-5


@torch.no_grad()
def test_guidance_is_off_at_scale_one_and_without_a_negative(components: EngineComponents):
    latents, timesteps, conditioning = batch(components)
    positive = {k: v for k, v in conditioning.items() if k.startswith("pos.")}
    alone = SD3.forward(components.transformer, latents, timesteps, positive, 4.5, torch.float32)
    assert torch.equal(alone, SD3.forward(components.transformer, latents, timesteps, conditioning, 1.0, torch.float32))
    assert not torch.equal(
        alone, SD3.forward(components.transformer, latents, timesteps, conditioning, 4.5, torch.float32)
    )


@torch.no_grad()
def test_bf16_forward_is_near_fp32(folder: Path, components: EngineComponents):
    latents, timesteps, conditioning = batch(components)
    half = DiffusersModelBackend().load_transformer(folder, "bf16")
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    full_output = SD3.forward(components.transformer, latents, timesteps, conditioning, 4.5, torch.float32)
    half_output = SD3.forward(half, latents, timesteps, conditioning, 4.5, torch.bfloat16)
    distance = (full_output - half_output).norm() / full_output.norm()
    assert half_output.dtype == torch.float32
    assert 0 < distance < 0.1


def test_gradients_pass_through_both_branches(folder: Path, components: EngineComponents):
    transformer = DiffusersModelBackend().load_transformer(folder, "fp32")
    with torch.no_grad():
        latents, timesteps, conditioning = batch(components)
    weight = transformer.transformer_blocks[0].attn.to_q.weight

    def gradient(scale: float) -> torch.Tensor:
        output = SD3.forward(transformer, latents, timesteps, conditioning, scale, torch.float32)
        return torch.autograd.grad(output.square().mean(), weight)[0]

    assert gradient(4.5).norm() > 0
    assert not torch.allclose(gradient(4.5), gradient(1.0))


def test_a_pipeline_without_a_component_is_refused(tmp_path: Path):
    make_tiny_sd3(tmp_path / "m")
    (tmp_path / "m" / "text_encoder_3").rename(tmp_path / "gone")
    with pytest.raises(InputError, match="has no text_encoder_3"):
        DiffusersModelBackend().load_engine_components(tmp_path / "m", "fp32")


def test_an_unknown_dtype_is_refused():
    with pytest.raises(InputError, match="fp32 or bf16"):
        torch_dtype("fp8")
