"""The embedded engine: seeds, steps, log-probs against float64 formulas, LoRA pushes, sleep."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save as save_safetensors

from miles_core.errors import InputError, StageError
from miles_core.families.base import DiffusersModelBackend
from miles_core.families.sd3 import Sd3PipelineConfig
from miles_core.families.tiny_sd3 import make_tiny_sd3
from miles_core.rollout.diffusers_engine import DiffusersEngine
from miles_core.rollout.protocol import GeneratedOutput, GenerateRequest, GenerateResult
from miles_core.weights.digest import policy_digest

SD3 = Sd3PipelineConfig()
STEPS = 5
REQUEST = GenerateRequest(
    prompt="a red fox",
    negative_prompt="blurry",
    seed=11,
    num_outputs=3,
    height=32,
    width=48,
    num_inference_steps=STEPS,
    guidance_scale=4.5,
    sde_type="sde",
    noise_level=0.7,
    log_prob_no_const=False,
    sde_step_indices=(0, 2),
    generator_device="cpu",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_sd3(tmp_path_factory.mktemp("models") / "tiny-stable-diffusion-3.5-medium")


def new_engine(folder: Path, dtype: str = "fp32", targets: tuple[str, ...] | None = None) -> DiffusersEngine:
    engine = DiffusersEngine(
        name="engine-0", checkpoint=str(folder), family="sd3", dtype=dtype, device="cpu", lora_target_modules=targets
    )
    engine.start()
    return engine


@pytest.fixture(scope="module")
def base_engine(folder: Path) -> Iterator[DiffusersEngine]:
    """An engine that no test pushes to."""
    engine = new_engine(folder)
    yield engine
    engine.stop()


@pytest.fixture
def engine(folder: Path) -> Iterator[DiffusersEngine]:
    engine = new_engine(folder)
    yield engine
    engine.stop()


def adapter(folder: Path, seed: int, *, rank: int = 4, std: float = 0.3) -> dict[str, torch.Tensor]:
    """A random adapter with the names of a trainer's PEFT model."""
    transformer = DiffusersModelBackend().load_transformer(folder, "fp32")
    transformer.add_adapter(LoraConfig(r=rank, target_modules=list(SD3.lora_target_modules)))
    generator = torch.Generator().manual_seed(seed)
    return {
        name.replace(".default", ""): torch.randn(parameter.shape, generator=generator) * std
        for name, parameter in transformer.named_parameters()
        if ".lora_" in name
    }


def push(engine: DiffusersEngine, tensors: dict[str, torch.Tensor], *, rank: int = 4, alpha: int = 8):
    return engine.update_weights(save_safetensors(tensors), lora_alpha=alpha, lora_rank=rank)


def equal(one: GeneratedOutput, other: GeneratedOutput) -> bool:
    return all(
        torch.equal(getattr(one, name), getattr(other, name))
        for name in ("image", "log_probs", "latents", "timesteps", "sigmas")
    )


def images(result: GenerateResult) -> torch.Tensor:
    return torch.stack([o.image for o in result.outputs])


class TestSeeds:
    def test_shapes_and_dtypes(self, base_engine: DiffusersEngine):
        result = base_engine.generate(REQUEST)
        assert [o.seed for o in result.outputs] == [11, 12, 13]
        for o in result.outputs:
            assert o.image.shape == (3, 32, 48)
            assert 0 <= o.image.min() < o.image.max() <= 1
            assert o.latents.shape == (STEPS + 1, 16, 4, 6)
            assert o.log_probs.shape == (STEPS,)
            assert o.sigmas.shape == o.timesteps.shape == (STEPS + 1,)
            assert o.timesteps[-1] == o.sigmas[-1] == 0
        assert {k: tuple(v.shape) for k, v in result.conditioning.items()} == {
            "pos.encoder_hidden_states": (333, 64),
            "pos.pooled_projections": (64,),
            "neg.encoder_hidden_states": (333, 64),
            "neg.pooled_projections": (64,),
        }
        assert result.engine == "engine-0"
        assert result.seconds > 0

    def test_latents_have_the_dtype_of_the_log_probs(self, folder: Path):
        """Pitfall 3, in bf16 too."""
        for dtype in ("fp32", "bf16"):
            engine = new_engine(folder, dtype)
            for o in engine.generate(REQUEST).outputs:
                assert o.latents.dtype == o.log_probs.dtype == o.image.dtype == torch.float32
            engine.stop()

    def test_outputs_of_a_request_have_their_own_trajectories(self, base_engine: DiffusersEngine):
        """Pitfalls 1, 19 and 39: no two members share a trajectory, a log-prob or an image."""
        outputs = base_engine.generate(REQUEST).outputs
        for i, one in enumerate(outputs):
            for other in outputs[i + 1 :]:
                for position in range(STEPS + 1):
                    assert (one.latents[position] - other.latents[position]).abs().max() > 0.1
                assert all(one.log_probs[s] != other.log_probs[s] for s in (0, 2))
                assert (one.image - other.image).abs().max() > 1e-3

    @torch.no_grad()
    def test_each_final_latent_decodes_to_its_own_image(self, base_engine: DiffusersEngine, folder: Path):
        """Pitfall 1."""
        vae = DiffusersModelBackend().load_engine_components(folder, "fp32").vae
        outputs = base_engine.generate(REQUEST).outputs
        decoded = [(vae.decode(o.latents[-1:] / 1.5305 + 0.0609).sample[0] / 2 + 0.5).clamp(0, 1) for o in outputs]
        for i, image in enumerate(decoded):
            distances = [(image - o.image).abs().max().item() for o in outputs]
            assert distances[i] < 1e-5
            assert min(d for j, d in enumerate(distances) if j != i) > 1e-3

    def test_first_latents_come_from_neighbouring_seeds(self, base_engine: DiffusersEngine):
        for i, output in enumerate(base_engine.generate(REQUEST).outputs):
            expected = torch.randn((1, 16, 4, 6), generator=torch.Generator().manual_seed(11 + i))[0]
            assert torch.equal(output.latents[0], expected)

    def test_the_same_request_gives_the_same_bits(self, base_engine: DiffusersEngine, folder: Path):
        first, again = base_engine.generate(REQUEST), base_engine.generate(REQUEST)
        another = new_engine(folder)
        elsewhere = another.generate(REQUEST)
        another.stop()
        for i in range(3):
            assert equal(first.outputs[i], again.outputs[i])
            assert equal(first.outputs[i], elsewhere.outputs[i])

    def test_other_seed_and_other_prompt_give_other_images(self, base_engine: DiffusersEngine):
        mine = images(base_engine.generate(REQUEST))
        assert (mine - images(base_engine.generate(replace(REQUEST, seed=400)))).abs().max() > 1e-3
        assert (mine - images(base_engine.generate(replace(REQUEST, prompt="a blue boat")))).abs().max() > 1e-6

    def test_the_number_of_outputs_is_part_of_the_identity(self, base_engine: DiffusersEngine):
        """The first draw is the same, later ones are made for the whole batch: see sglang."""
        three, one = (
            base_engine.generate(REQUEST).outputs[0],
            base_engine.generate(replace(REQUEST, num_outputs=1)).outputs[0],
        )
        assert torch.equal(three.latents[0], one.latents[0])
        assert not torch.allclose(three.latents[-1], one.latents[-1], atol=1e-2)

    def test_many_prompts_do_not_mix(self, base_engine: DiffusersEngine):
        """The cache of encoded prompts forgets old ones and never hands out another's."""
        request = replace(REQUEST, num_outputs=1, num_inference_steps=2, sde_step_indices=(0,))
        first = {n: base_engine.generate(replace(request, prompt=f"number {n}")).conditioning for n in range(40)}
        for n in (0, 39):
            again = base_engine.generate(replace(request, prompt=f"number {n}")).conditioning
            assert torch.equal(again["pos.encoder_hidden_states"], first[n]["pos.encoder_hidden_states"])
        assert not torch.equal(first[0]["pos.encoder_hidden_states"], first[39]["pos.encoder_hidden_states"])


def log_prob_float64(x, x_next, v, sigma, sigma_next, sigma_max, noise_level: float, kind: str) -> float:
    """Flow-GRPO's transition in float64 from its formula; x, x_next, v (C, h, w)."""
    x, x_next, v = x.double(), x_next.double(), v.double()
    s, s1 = float(sigma), float(sigma_next)
    dt = s1 - s
    if kind == "sde":
        a = noise_level * math.sqrt(s / (1 - (float(sigma_max) if s == 1.0 else s)))
        std = a * math.sqrt(-dt)
        mean = x * (1 + a**2 * dt / (2 * s)) + v * (1 + a**2 * (1 - s) / (2 * s)) * dt
        return (-((x_next - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)).mean().item()
    std = s1 * math.sin(noise_level * math.pi / 2)
    mean = (x - s * v) * (1 - s1) + (x + (1 - s) * v) * math.sqrt(s1**2 - std**2)
    return (-((x_next - mean) ** 2)).mean().item()


@pytest.mark.parametrize(
    ("kind", "no_const", "indices", "scale"),
    [("sde", False, (0, 2), 4.5), ("sde", False, None, 1.0), ("cps", True, (1, 4), 4.5), ("cps", True, None, 4.5)],
)
@torch.no_grad()
def test_log_probs_against_float64(base_engine: DiffusersEngine, folder: Path, kind, no_const, indices, scale):
    """Replayed from the stored latents and the family's own forward, as a trainer does it."""
    request = replace(
        REQUEST,
        sde_type=kind,
        log_prob_no_const=no_const,
        sde_step_indices=indices,
        guidance_scale=scale,
        noise_level=0.8,
    )
    result = base_engine.generate(request)
    assert any(name.startswith("neg.") for name in result.conditioning) == (scale > 1)
    transformer = DiffusersModelBackend().load_transformer(folder, "fp32")
    conditioning = {k: v[None].expand(3, *v.shape) for k, v in result.conditioning.items()}
    sigmas, timesteps = result.outputs[0].sigmas, result.outputs[0].timesteps
    latents = torch.stack([o.latents for o in result.outputs])
    for i in range(STEPS):
        v = SD3.forward(transformer, latents[:, i], timesteps[i].expand(3), conditioning, scale, torch.float32)
        for k, output in enumerate(result.outputs):
            if indices is not None and i not in indices:
                assert output.log_probs[i] == 0
                euler = latents[k, i].double() + (float(sigmas[i + 1]) - float(sigmas[i])) * v[k].double()
                assert (euler - latents[k, i + 1]).abs().max() < 1e-6
            else:
                expected = log_prob_float64(
                    latents[k, i], latents[k, i + 1], v[k], sigmas[i], sigmas[i + 1], sigmas[1], 0.8, kind
                )
                assert expected != 0 or sigmas[i + 1] == 0
                assert output.log_probs[i].item() == pytest.approx(expected, abs=2e-6)


def test_ode_has_no_noise_and_no_log_prob(base_engine: DiffusersEngine):
    ode = base_engine.generate(replace(REQUEST, sde_type="ode", noise_level=0.0, sde_step_indices=None))
    assert all(torch.equal(o.log_probs, torch.zeros(STEPS)) for o in ode.outputs)
    alone = base_engine.generate(
        replace(REQUEST, sde_type="ode", noise_level=0.0, sde_step_indices=None, num_outputs=1)
    )
    assert (ode.outputs[0].latents - alone.outputs[0].latents).abs().max() < 1e-4
    assert (images(ode) - images(base_engine.generate(REQUEST))).abs().max() > 1e-3


class TestRefusals:
    @pytest.mark.parametrize("indices", [(), (5,), (0, 7), (-1,)])
    def test_steps_outside_the_schedule(self, base_engine: DiffusersEngine, indices: tuple[int, ...]):
        with pytest.raises(InputError, match="not steps of the schedule"):
            base_engine.generate(replace(REQUEST, sde_step_indices=indices))

    def test_size_type_and_generator(self, base_engine: DiffusersEngine):
        with pytest.raises(InputError, match="multiples of 16"):
            base_engine.generate(replace(REQUEST, height=40))
        with pytest.raises(InputError, match="sde, cps or ode"):
            base_engine.generate(replace(REQUEST, sde_type="ddpm"))
        if not torch.cuda.is_available():
            with pytest.raises(InputError, match="generator-device cpu"):
                base_engine.generate(replace(REQUEST, generator_device="cuda"))


class TestLora:
    def test_a_push_moves_the_output_and_the_next_replaces_it(self, engine: DiffusersEngine, folder: Path):
        base = images(engine.generate(REQUEST))
        assert engine.checksum() == ""
        one, two = adapter(folder, 1), adapter(folder, 2)
        reply = push(engine, one)
        assert reply.modules_bound == 15
        assert reply.policy_digest == engine.checksum() == policy_digest(save_safetensors(one))
        assert reply.bytes == len(save_safetensors(one))
        first = images(engine.generate(REQUEST))
        assert (first - base).abs().max() > 1e-4
        assert push(engine, two).policy_digest == policy_digest(save_safetensors(two)) != reply.policy_digest
        second = images(engine.generate(REQUEST))
        assert (second - first).abs().max() > 1e-4
        push(engine, one)
        assert torch.equal(images(engine.generate(REQUEST)), first)

    def test_the_engine_computes_as_a_trainer_with_peft(self, engine: DiffusersEngine, folder: Path):
        """Same arithmetic, bit for bit: unmerged LoRA, same forward (pitfall 4)."""
        tensors = adapter(folder, 1)
        push(engine, tensors)
        result = engine.generate(REQUEST)
        transformer = DiffusersModelBackend().load_transformer(folder, "fp32")
        transformer.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=list(SD3.lora_target_modules)))
        parameters = dict(transformer.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors.items():
                parameters[name.replace(".weight", ".default.weight")].copy_(tensor)
            x = torch.stack([o.latents[1] for o in result.outputs])
            conditioning = {k: v.expand(3, *v.shape) for k, v in result.conditioning.items()}
            t, s = result.outputs[0].timesteps, result.outputs[0].sigmas
            v = SD3.forward(transformer, x, t[1].expand(3), conditioning, 4.5, torch.float32)
        assert torch.equal(x + (s[2] - s[1]) * v, torch.stack([o.latents[2] for o in result.outputs]))

    def test_a_zero_adapter_is_the_base_model(self, engine: DiffusersEngine, folder: Path):
        base = engine.generate(REQUEST)
        push(engine, {k: torch.zeros_like(v) if "lora_B" in k else v for k, v in adapter(folder, 1).items()})
        assert engine.checksum() != ""
        for one, other in zip(base.outputs, engine.generate(REQUEST).outputs, strict=True):
            assert equal(one, other)

    def test_alpha_and_rank_take_effect(self, engine: DiffusersEngine, folder: Path):
        tensors = adapter(folder, 1)
        base = images(engine.generate(REQUEST))
        push(engine, tensors, alpha=8)
        strong = images(engine.generate(REQUEST))
        push(engine, tensors, alpha=1)
        weak = images(engine.generate(REQUEST))
        assert 0 < (weak - base).norm() < (strong - base).norm()
        push(engine, adapter(folder, 1, rank=2), rank=2, alpha=4)
        assert (images(engine.generate(REQUEST)) - weak).abs().max() > 1e-5
        push(engine, tensors, alpha=8)
        assert torch.equal(images(engine.generate(REQUEST)), strong)

    @pytest.mark.parametrize("pushed_before", [False, True])
    def test_what_does_not_fit_is_refused_and_changes_nothing(
        self, engine: DiffusersEngine, folder: Path, pushed_before
    ):
        """Pitfalls 10, 11 and 38: unknown, missing, misshapen, non-finite, none at all."""
        if pushed_before:
            push(engine, adapter(folder, 1))
        before, digest = images(engine.generate(REQUEST)), engine.checksum()
        good = adapter(folder, 2)
        name = "transformer_blocks.0.attn.to_q.lora_A.weight"
        for tensors, message in (
            ({}, "lacks 30 tensors"),
            ({"nope.lora_A.weight": torch.zeros(4, 64)}, "bind to no module, such as nope"),
            (good | {"transformer_blocks.9.attn.to_q.lora_A.weight": good[name].clone()}, "bind to no module"),
            ({f"base_model.model.{k}": v for k, v in good.items()}, "bind to no module, such as base_model"),
            ({k: v for k, v in good.items() if k != name}, f"lacks 1 tensors, such as {name}"),
            (good | {name: torch.zeros(8, 64)}, "has shape"),
            (good | {name: torch.full((4, 64), math.nan)}, "NaN or inf"),
        ):
            with pytest.raises(StageError, match=message):
                push(engine, tensors)
        with pytest.raises(StageError, match="has shape"):
            push(engine, good, rank=8)
        with pytest.raises(StageError, match="no safetensors"):
            engine.update_weights(b"nonsense", lora_alpha=8, lora_rank=4)
        assert engine.checksum() == digest
        assert torch.equal(images(engine.generate(REQUEST)), before)
        push(engine, good)
        assert not torch.equal(images(engine.generate(REQUEST)), before)

    def test_targets_that_name_no_module(self, folder: Path):
        engine = new_engine(folder, targets=("attn.nothing",))
        with pytest.raises(StageError, match="no module is called attn.nothing"):
            push(engine, {})
        engine.stop()

    def test_fewer_targets(self, folder: Path):
        engine = new_engine(folder, targets=("attn.to_q",))
        tensors = {k: v for k, v in adapter(folder, 1).items() if ".attn.to_q." in k}
        base = images(engine.generate(REQUEST))
        assert push(engine, tensors).modules_bound == 2
        assert (images(engine.generate(REQUEST)) - base).abs().max() > 1e-5
        engine.stop()

    def test_a_changed_parameter_shows_in_the_checksum(self, engine: DiffusersEngine, folder: Path):
        """The digest is of the parameters that compute, not of the message that came."""
        digest = push(engine, adapter(folder, 1)).policy_digest
        name = "transformer_blocks.0.attn.to_q.lora_A.default.weight"
        parameter = engine._components.transformer.get_parameter(name)
        with torch.no_grad():
            parameter[0, 0] += 1
        assert engine.checksum() != digest

    def test_bf16_computes_in_bf16_and_reports_the_masters_digest(self, folder: Path):
        engine = new_engine(folder, "bf16")
        base = images(engine.generate(REQUEST))
        tensors = adapter(folder, 1)
        assert push(engine, tensors).policy_digest == policy_digest(save_safetensors(tensors))
        transformer = engine._components.transformer
        assert {p.dtype for p in transformer.parameters()} == {torch.bfloat16}
        assert (images(engine.generate(REQUEST)) - base).abs().max() > 1e-4
        with torch.no_grad():
            transformer.get_parameter("transformer_blocks.0.attn.to_q.lora_A.default.weight")[0, 0] += 1
        with pytest.raises(StageError, match="is not the one that was pushed"):
            engine.checksum()
        engine.stop()


class TestLifecycle:
    def test_start_and_stop_can_be_repeated(self, folder: Path):
        engine = DiffusersEngine(name="e", checkpoint=str(folder), family="sd3", dtype="fp32", device="cpu")
        assert not engine.health()
        with pytest.raises(StageError, match="not started"):
            engine.generate(REQUEST)
        engine.start()
        push(engine, adapter(folder, 1))
        digest = engine.checksum()
        engine.start()
        assert engine.checksum() == digest
        engine.stop()
        engine.stop()
        assert not engine.health()
        with pytest.raises(StageError, match="not started"):
            push(engine, adapter(folder, 1))
        engine.start()
        assert engine.checksum() == ""
        assert engine.generate(REQUEST).outputs
        engine.stop()
