"""The embedded engine against the sglang engine, a real server on the CPU, on the same requests.

Run with -s for the measured differences.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from miles_core.algorithms.sde import CpsSdeStepBackend, DiffusersSdeStepBackend
from miles_core.errors import InputError, StageError
from miles_core.families.tiny_sd3 import make_tiny_sd3
from miles_core.rollout.diffusers_engine import DiffusersEngine
from miles_core.rollout.protocol import GenerateRequest, GenerateResult
from miles_core.rollout.sglang import push
from miles_core.rollout.sglang.engine import SglangEngine

pytest.importorskip("sglang.multimodal_gen", reason="the sglang extra is not installed")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

START_SECONDS = 240
IMAGE_LIMIT, LOG_PROB_LIMIT = 1e-4, 1e-5
RANK, ALPHA = 4, 8
BASE = GenerateRequest(
    prompt="a red fox",
    negative_prompt="blurry",
    seed=11,
    num_outputs=3,
    height=64,
    width=96,
    num_inference_steps=6,
    guidance_scale=4.5,
    sde_type="sde",
    noise_level=0.7,
    log_prob_no_const=False,
    sde_step_indices=(1, 2),
    generator_device="cpu",
)
REQUESTS = {
    "sde one output": replace(BASE, num_outputs=1),
    "sde three outputs": BASE,
    "sde every step": replace(BASE, sde_step_indices=None),
    "sde from sigma 1": replace(BASE, num_outputs=1, sde_step_indices=(0,)),
    "sde without constants": replace(BASE, log_prob_no_const=True),
    "sde no guidance": replace(BASE, guidance_scale=1.0),
    "sde no guidance one output": replace(BASE, guidance_scale=1.0, num_outputs=1),
    "sde no negative prompt": replace(BASE, negative_prompt=None),
    "sde empty negative prompt": replace(BASE, negative_prompt=""),
    "cps without constants": replace(
        BASE, sde_type="cps", log_prob_no_const=True, sde_step_indices=None, noise_level=0.8
    ),
    "cps one output": replace(BASE, sde_type="cps", log_prob_no_const=True, num_outputs=1),
    "cps with constants": replace(BASE, sde_type="cps", sde_step_indices=(0, 3)),
    "ode": replace(BASE, sde_type="ode", log_prob_no_const=True, sde_step_indices=None),
    "long prompt": replace(BASE, prompt='A sign that says "HELLO" ' * 12, num_outputs=1),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a folder whose name tells the server nothing (FACTS 2: it would serve by another backend)."""
    return make_tiny_sd3(tmp_path_factory.mktemp("models") / "drawn-by-code")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    engine = SglangEngine(
        name="engine-0",
        checkpoint=str(model),
        family="sd3",
        dtype="fp32",
        device="cpu",
        log=tmp_path_factory.mktemp("server") / "log.txt",
        options={},
        seconds=START_SECONDS,
    )
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def embedded(model: Path) -> Iterator[DiffusersEngine]:
    engine = DiffusersEngine(name="embedded", checkpoint=str(model), family="sd3", dtype="fp32", device="cpu")
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def differences() -> Iterator[dict[str, dict[str, float]]]:
    measured: dict[str, dict[str, float]] = {}
    yield measured
    for name, values in measured.items():
        print(f"\n{name}: " + ", ".join(f"{key} {value:.1e}" for key, value in values.items()), end="")


def compare(server: SglangEngine, embedded: DiffusersEngine, request: GenerateRequest) -> dict[str, float]:
    """Largest differences of the two engines' answers; first latents, sigmas and timesteps must be bit-equal."""
    theirs, mine = server.generate(request), embedded.generate(request)
    assert len(theirs.outputs) == len(mine.outputs) == request.num_outputs
    trained = [] if request.sde_type == "ode" else request.sde_step_indices or range(request.num_inference_steps)
    worst = dict.fromkeys(("latents", "log_prob", "image"), 0.0)
    assert set(theirs.conditioning) == set(mine.conditioning)
    assert all(theirs.conditioning[name].shape == tensor.shape for name, tensor in mine.conditioning.items())
    worst["conditioning"] = max(
        (theirs.conditioning[name].float() - tensor).abs().max().item() for name, tensor in mine.conditioning.items()
    )
    for other, output in zip(theirs.outputs, mine.outputs, strict=True):
        assert other.seed == output.seed
        assert torch.equal(other.latents[0], output.latents[0])
        assert torch.equal(other.sigmas, output.sigmas)
        assert torch.equal(other.timesteps, output.timesteps)
        for key, pair in {
            "latents": (other.latents, output.latents),
            "log_prob": (other.log_probs, output.log_probs),
            "image": (other.image, output.image),
        }.items():
            assert pair[0].shape == pair[1].shape and pair[0].dtype == pair[1].dtype
            worst[key] = max(worst[key], (pair[0] - pair[1]).abs().max().item())
        for step in range(request.num_inference_steps):
            last_cps = request.sde_type == "cps" and step == request.num_inference_steps - 1
            assert bool(output.log_probs[step] == 0) == (step not in trained or last_cps)
    worst["replayed"] = replay(embedded, request, theirs, list(trained))
    return worst


@torch.no_grad()
def replay(embedded: DiffusersEngine, request: GenerateRequest, theirs: GenerateResult, trained: list[int]) -> float:
    """Largest difference of sglang's log-probs from those of its own trajectory under the embedded transformer.

    An engine's log-prob is a function of its noise alone; here the model's output enters, as in a trainer.
    """
    first, count, worst = theirs.outputs[0], len(theirs.outputs), 0.0
    latents = torch.stack([other.latents for other in theirs.outputs])
    conditioning = {name: tensor.expand(count, *tensor.shape) for name, tensor in theirs.conditioning.items()}
    kind = CpsSdeStepBackend if request.sde_type == "cps" else DiffusersSdeStepBackend
    backend = kind(noise_level=request.noise_level, log_prob_no_const=request.log_prob_no_const)
    for i in trained:
        output = embedded._family.forward(
            embedded._components.transformer,
            latents[:, i],
            first.timesteps[i].expand(count),
            conditioning,
            request.guidance_scale,
            torch.float32,
        )
        statistics = backend.statistics(output, latents[:, i], first.sigmas[i], first.sigmas[i + 1], first.sigmas[1])
        log_prob = backend.log_prob(latents[:, i + 1], statistics)
        stored = torch.stack([other.log_probs[i] for other in theirs.outputs])
        worst = max(worst, (log_prob - stored).abs().max().item())
    return worst


def check(worst: dict[str, float]) -> None:
    assert worst["image"] <= IMAGE_LIMIT, worst
    assert worst["log_prob"] <= LOG_PROB_LIMIT, worst
    assert worst["replayed"] <= LOG_PROB_LIMIT, worst


@pytest.mark.parametrize("name", REQUESTS)
def test_same_answer_to_the_same_request(server, embedded, differences, name: str):
    differences[name] = compare(server, embedded, REQUESTS[name])
    check(differences[name])


def test_the_answers_are_not_alike_by_themselves(server):
    """What the limits above would say of other noise: they can fail."""
    theirs = server.generate(BASE).outputs
    assert (theirs[0].image - theirs[1].image).abs().max() > 10 * IMAGE_LIMIT
    other = server.generate(replace(BASE, seed=400)).outputs[0]
    assert (theirs[0].log_probs - other.log_probs).abs().max() > 10 * LOG_PROB_LIMIT


def test_the_answer_holds_the_conditioning_once_and_only_where_it_is_asked_for(server):
    """With the outputs it would come with each of them; debug tensors, on by default, never come."""
    plain, described = (server.answer(BASE, describe=describe) for describe in (False, True))
    assert plain.conditioning is None and plain.opened().conditioning == {}
    assert set(described.opened().conditioning) > {"pos.encoder_hidden_states", "neg.pooled_projections"}
    for answer in (plain, described):
        for output in msgspec.msgpack.decode(answer.body):
            assert output["denoising_env"] is None and output["rollout_debug_tensors"] is None
    one, other = (torch.stack([output.image for output in answer.opened().outputs]) for answer in (plain, described))
    assert torch.equal(one, other)


def test_model_outputs_agree_where_they_are_asked_for(server, embedded):
    """What the alignment probe compares a trainer's with: at every step, guidance applied."""
    theirs, mine = (engine.generate(replace(BASE, debug=True)).outputs for engine in (server, embedded))
    for other, output in zip(theirs, mine, strict=True):
        assert (
            other.model_outputs.shape
            == output.model_outputs.shape
            == (BASE.num_inference_steps, *output.latents.shape[1:])
        )
        assert (other.model_outputs - output.model_outputs).abs().max() < 1e-4
    assert all(output.model_outputs is None for output in server.generate(BASE).outputs)


@pytest.mark.parametrize(
    "wrong",
    [{"sde_step_indices": ()}, {"sde_step_indices": (6,)}, {"height": 60}, {"generator_device": "cuda"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_the_server_would_pass_over_is_refused(server, wrong: dict[str, Any]):
    with pytest.raises(InputError):
        server.generate(replace(BASE, **wrong))


def test_same_answer_after_lora_pushes(server, embedded, differences):
    """sglang merges W + sBA, the embedded engine keeps the LoRA apart (pitfall 4): still within the limits."""
    before = embedded.generate(BASE).outputs[0].image
    seen = [before]
    for seed in (1, 2):
        pushed = adapter(embedded, seed)
        reply, theirs = (
            engine.update_weights(pushed, lora_alpha=ALPHA, lora_rank=RANK) for engine in (embedded, server)
        )
        assert reply.modules_bound == theirs.modules_bound == 15
        assert reply.policy_digest == theirs.policy_digest == server.checksum() == embedded.checksum()
        for name in ("sde three outputs", "sde one output", "cps without constants"):
            key = f"{name}, push {seed}"
            differences[key] = compare(server, embedded, REQUESTS[name])
            check(differences[key])
        answer = server.generate(BASE)
        embedded.update_weights(adapter(embedded, seed + 1), lora_alpha=ALPHA, lora_rank=RANK)
        assert replay(embedded, BASE, answer, [1, 2]) > 10 * LOG_PROB_LIMIT
        embedded.update_weights(pushed, lora_alpha=ALPHA, lora_rank=RANK)
        image = embedded.generate(BASE).outputs[0].image
        assert min((image - other).abs().max() for other in seen) > 10 * IMAGE_LIMIT
        seen.append(image)


def test_a_push_that_the_server_took_in_part_is_an_error_and_leaves_no_policy(server, embedded):
    """It answers success and counts what it skipped (FACTS 2)."""
    whole = load_safetensors(adapter(embedded, 3))
    name = next(iter(sorted(whole))).rsplit(".lora", 1)[0]
    foreign = {key.replace(name, "transformer_blocks.99.attn.to_q"): tensor for key, tensor in whole.items()}
    with pytest.raises(StageError, match=r"of 15 pushed LoRA layers the engine took 14 and skipped 1"):
        server.update_weights(save_safetensors(foreign), lora_alpha=ALPHA, lora_rank=RANK)
    assert server.checksum() == ""
    with pytest.raises(StageError, match="answered 400"):
        server.update_weights(
            save_safetensors({"nowhere.lora_A.weight": torch.ones(4, 8), "nowhere.lora_B.weight": torch.ones(8, 4)}),
            lora_alpha=ALPHA,
            lora_rank=RANK,
        )
    server.update_weights(save_safetensors(whole), lora_alpha=ALPHA, lora_rank=RANK)
    assert server.checksum()


def test_parameters_that_another_hand_changed_are_told(server, embedded):
    """The checksum is of the server's live parameters, not of what was sent."""
    mine, other = adapter(embedded, 4), load_safetensors(adapter(embedded, 5))
    server.update_weights(mine, lora_alpha=ALPHA, lora_rank=RANK)
    body = push.Bucket.of(other, "cpu").body(module="transformer", lora_alpha=ALPHA, lora_rank=RANK)
    server._post("/update_weights_from_tensor", body)
    with pytest.raises(StageError, match="checksum mismatch"):
        server.checksum()
    server.update_weights(mine, lora_alpha=ALPHA, lora_rank=RANK)
    assert server.checksum()


def test_asleep_it_takes_neither_requests_nor_policies(server, embedded):
    """A push to a sleeping server is accepted by it, and lost (FACTS 2). Sleep and wake may be repeated."""
    held = server.checksum()
    for _ in range(2):
        server.sleep()
    assert server.health() and server.checksum() == held
    for ask in (
        lambda: server.generate(BASE),
        lambda: server.update_weights(adapter(embedded, 1), lora_alpha=ALPHA, lora_rank=RANK),
    ):
        with pytest.raises(StageError, match="asleep"):
            ask()
    for _ in range(2):
        server.wake()
    assert server.generate(BASE).outputs and server.checksum() == held


def adapter(engine: DiffusersEngine, seed: int) -> bytes:
    """A random adapter that moves the image well above the limits."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    targets = tuple("." + name for name in engine._targets)
    for name, module in engine._components.transformer.named_modules():
        name = name.removesuffix(".base_layer")
        if name.endswith(targets) and isinstance(module, torch.nn.Linear):
            tensors[f"{name}.lora_A.weight"] = torch.randn((RANK, module.in_features), generator=generator) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn((module.out_features, RANK), generator=generator) * 0.3
    return save_safetensors(tensors)
