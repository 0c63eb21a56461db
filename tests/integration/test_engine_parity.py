"""The embedded engine against the real sglang server, on the CPU, on the same requests.

Run with -s for the measured differences.
"""

import base64
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from miles_core.algorithms.sde import CpsSdeStepBackend, DiffusersSdeStepBackend
from miles_core.families.tiny_sd3 import make_tiny_sd3
from miles_core.rollout.diffusers_engine import DiffusersEngine
from miles_core.rollout.protocol import GenerateRequest

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


class Server:
    """A sglang server of this test's own, on loopback."""

    def __init__(self, model: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.log = log
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)
        command = [
            *(str(Path(sys.executable).with_name("sglang")), "serve", "--model-type", "diffusion"),
            *("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--warmup-mode", "off"),
            *("--dit-precision", "fp32", "--text-encoder-precisions", "fp32", "fp32", "fp32"),
        ]
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **offline, "SGLANG_DIFFUSION_PLATFORM_OVERRIDE": "cpu"}
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"sglang ended with {self.process.returncode}\n{self.tail()}")
            try:
                if self.client.get("/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(1)
        raise RuntimeError(f"sglang was not ready in {START_SECONDS} s\n{self.tail()}")

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def end(self) -> None:
        """End the server's own process group, which start_new_session made."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(timeout=20)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self.client.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        answer = self.client.post(path, json=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{path} {answer.status_code}: {answer.text[:2000]}\n{self.tail()}")
        return answer

    def generate(self, request: GenerateRequest) -> list[dict[str, Any]]:
        """An absent negative prompt becomes the sampling parameters' default over HTTP, so guidance that is off
        is told by the scale."""
        guided = request.negative_prompt is not None
        answer = self.post(
            "/rollout/generate",
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            seed=request.seed,
            generator_device=request.generator_device,
            width=request.width,
            height=request.height,
            num_inference_steps=request.num_inference_steps,
            num_outputs_per_prompt=request.num_outputs,
            guidance_scale=request.guidance_scale if guided else 1.0,
            rollout=True,
            rollout_sde_type=request.sde_type,
            rollout_noise_level=request.noise_level,
            rollout_log_prob_no_const=request.log_prob_no_const,
            rollout_debug_mode=False,
            rollout_return_denoising_env=True,
            rollout_return_dit_trajectory=True,
            rollout_sde_step_indices=None if request.sde_step_indices is None else list(request.sde_step_indices),
        )
        return decoded(msgspec.msgpack.decode(answer.content))

    def push(self, adapter: bytes) -> str:
        parts, meta, offset = [], [], 0
        for name, tensor in load_safetensors(adapter).items():
            flat = tensor.flatten().view(torch.uint8)
            entry = {"name": name, "shape": tuple(tensor.shape), "dtype": str(tensor.dtype), "numel": flat.numel()}
            meta.append(types.SimpleNamespace(**entry, start_idx=offset, end_idx=offset + flat.numel()))
            parts.append(flat)
            offset += flat.numel()
        payload = pickle.dumps({"transformer": {"flattened_tensor": torch.cat(parts), "metadata": meta}}, protocol=4)
        return self.post(
            "/update_weights_from_tensor",
            serialized_named_tensors=[base64.b64encode(payload).decode()],
            load_format="flattened_bucket",
            target_modules=["transformer"],
            weight_update_mode="lora_merge",
            lora_alpha=ALPHA,
            lora_rank=RANK,
        ).text


def decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if value.get("__tensor__"):
            return load_safetensors(value["data"])["t"]
        return {k: decoded(v) for k, v in value.items()}
    return [decoded(v) for v in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_sd3(tmp_path_factory.mktemp("models") / "tiny-stable-diffusion-3.5-medium")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(model, tmp_path_factory.mktemp("server") / "log.txt")
    try:
        running.wait()
        yield running
    finally:
        running.end()


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


def compare(server: Server, embedded: DiffusersEngine, request: GenerateRequest) -> dict[str, float]:
    """Largest differences of the two engines' answers; first latents, sigmas and timesteps must be bit-equal."""
    theirs, mine = server.generate(request), embedded.generate(request)
    assert len(theirs) == len(mine.outputs) == request.num_outputs
    trained = [] if request.sde_type == "ode" else request.sde_step_indices or range(request.num_inference_steps)
    worst = dict.fromkeys(("conditioning", "latents", "log_prob", "image"), 0.0)
    for other, output in zip(theirs, mine.outputs, strict=True):
        trajectory, environment = other["dit_trajectory"], other["denoising_env"]
        assert torch.equal(trajectory["latents"][0], output.latents[0])
        assert torch.equal(trajectory["sigmas"], output.sigmas)
        assert torch.equal(trajectory["timesteps"], output.timesteps)
        assert other["generated_output"].shape == output.image.shape
        for side in ("pos", "neg"):
            sent = environment[f"{side}_cond_kwargs"] or {}
            assert {f"{side}.{k}" for k in sent} == {k for k in mine.conditioning if k.startswith(side)}
            for name, tensor in sent.items():
                own = mine.conditioning[f"{side}.{name}"]
                gap = (tensor.reshape(own.shape).float() - own).abs().max().item()
                worst["conditioning"] = max(worst["conditioning"], gap)
        for key, pair in {
            "latents": (trajectory["latents"], output.latents),
            "log_prob": (other["rollout_log_probs"], output.log_probs),
            "image": (other["generated_output"].float(), output.image),
        }.items():
            worst[key] = max(worst[key], (pair[0] - pair[1]).abs().max().item())
        for step in range(request.num_inference_steps):
            last_cps = request.sde_type == "cps" and step == request.num_inference_steps - 1
            assert bool(output.log_probs[step] == 0) == (step not in trained or last_cps)
    worst["replayed"] = replay(embedded, request, theirs, list(trained))
    return worst


@torch.no_grad()
def replay(
    embedded: DiffusersEngine, request: GenerateRequest, theirs: list[dict[str, Any]], trained: list[int]
) -> float:
    """Largest difference of sglang's log-probs from those of its own trajectory under the embedded transformer.

    An engine's log-prob is a function of its noise alone; here the model's output enters, as in a trainer.
    """
    first = theirs[0]["dit_trajectory"]
    sigmas, timesteps, worst = first["sigmas"], first["timesteps"], 0.0
    latents = torch.stack([other["dit_trajectory"]["latents"] for other in theirs])
    conditioning = {
        f"{side}.{name}": torch.stack([o["denoising_env"][f"{side}_cond_kwargs"][name].squeeze(0) for o in theirs])
        for side in ("pos", "neg")
        for name in theirs[0]["denoising_env"][f"{side}_cond_kwargs"] or {}
    }
    kind = CpsSdeStepBackend if request.sde_type == "cps" else DiffusersSdeStepBackend
    backend = kind(noise_level=request.noise_level, log_prob_no_const=request.log_prob_no_const)
    for i in trained:
        output = embedded._family.forward(
            embedded._components.transformer,
            latents[:, i],
            timesteps[i].expand(len(theirs)),
            conditioning,
            request.guidance_scale,
            torch.float32,
        )
        statistics = backend.statistics(output, latents[:, i], sigmas[i], sigmas[i + 1], sigmas[1])
        log_prob = backend.log_prob(latents[:, i + 1], statistics)
        stored = torch.stack([other["rollout_log_probs"][i] for other in theirs])
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
    theirs = server.generate(BASE)
    assert (theirs[0]["generated_output"] - theirs[1]["generated_output"]).abs().max() > 10 * IMAGE_LIMIT
    other = server.generate(replace(BASE, seed=400))[0]
    assert (theirs[0]["rollout_log_probs"] - other["rollout_log_probs"]).abs().max() > 10 * LOG_PROB_LIMIT


def test_same_answer_after_lora_pushes(server, embedded, differences):
    """sglang merges W + sBA, the embedded engine keeps the LoRA apart (pitfall 4): still within the limits."""
    before = embedded.generate(BASE).outputs[0].image
    seen = [before]
    for seed in (1, 2):
        pushed = adapter(embedded, seed)
        reply = embedded.update_weights(pushed, lora_alpha=ALPHA, lora_rank=RANK)
        assert reply.modules_bound == 15
        answer = server.push(pushed)
        assert '"success":true' in answer.replace(" ", "")
        assert "skipped 0 unknown" in answer
        for name in ("sde three outputs", "sde one output", "cps without constants"):
            key = f"{name}, push {seed}"
            differences[key] = compare(server, embedded, REQUESTS[name])
            check(differences[key])
        theirs = server.generate(BASE)
        embedded.update_weights(adapter(embedded, seed + 1), lora_alpha=ALPHA, lora_rank=RANK)
        assert replay(embedded, BASE, theirs, [1, 2]) > 10 * LOG_PROB_LIMIT
        embedded.update_weights(pushed, lora_alpha=ALPHA, lora_rank=RANK)
        image = embedded.generate(BASE).outputs[0].image
        assert min((image - other).abs().max() for other in seen) > 10 * IMAGE_LIMIT
        seen.append(image)


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
