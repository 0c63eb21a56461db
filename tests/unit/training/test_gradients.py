"""The gradient of an optimizer step against an independent float64 implementation of the same formulas."""

import math

import pytest
import torch
from diffusers import SD3Transformer2DModel
from torch.func import functional_call
from trained_rollouts import (
    ADVANTAGES_OF_SAMPLES,
    ALPHA,
    GUIDANCE,
    NOISE,
    RANK,
    SDE_STEPS,
    gradients,
    rows_of,
    run_config,
    trainer,
)

from miles_core.rollout.parsing import read_conditioning
from miles_core.store.parts import read_table
from miles_core.weights.packing import adapter_tensors


def update(iteration, inputs, out, **changes):
    one = trainer(run_config(clip_grad=0, **changes), iteration.model)
    one.start()
    try:
        return one.update(iteration.files, inputs, out)
    finally:
        one.stop()


def reference(iteration, inputs, *, beta, removed=()):
    """Loss and gradients in float64: LoRA merged into the weights, Flow-GRPO's SDE, loss and KL as FACTS has them."""
    model = SD3Transformer2DModel.from_pretrained(iteration.model / "transformer").double().eval().requires_grad_(False)
    base = dict(model.named_parameters())
    lora = {n: t.double().requires_grad_(True) for n, t in adapter_tensors(iteration.adapter).items()}
    merged = dict(base)
    for name in lora:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            delta = lora[f"{module}.lora_B.weight"] @ lora[name]
            merged[f"{module}.weight"] = base[f"{module}.weight"] + ALPHA / RANK * delta
    texts = {}
    for part in inputs.conditioning:
        texts |= read_conditioning(read_table(iteration.files, part))

    def velocity(weights, x, t, text):
        def branch(name):
            arguments = {
                "hidden_states": x,
                "timestep": t,
                "encoder_hidden_states": text[f"{name}.encoder_hidden_states"].double()[None],
                "pooled_projections": text[f"{name}.pooled_projections"].double()[None],
                "return_dict": False,
            }
            return functional_call(model, weights, args=(), kwargs=arguments)[0]

        return branch("neg") + GUIDANCE * (branch("pos") - branch("neg"))

    total, pairs, ratios = torch.zeros((), dtype=torch.float64), 0, []
    latents_of = {row["sample_index"]: row for row in rows_of(iteration.files, inputs.latents)}
    for row in rows_of(iteration.files, inputs.rollout):
        row = row | latents_of[row["sample_index"]]
        if row["sample_index"] in removed:
            continue
        latents = torch.tensor(row["latents"], dtype=torch.float64).reshape(len(row["latent_steps"]), 1, 16, 8, 8)
        advantage = max(-5.0, min(5.0, ADVANTAGES_OF_SAMPLES[row["sample_index"]]))
        for step in SDE_STEPS:
            x, x_next = (latents[row["latent_steps"].index(step + k)] for k in (0, 1))
            sigma, sigma_next, sigma_max = row["sigmas"][step], row["sigmas"][step + 1], row["sigmas"][1]
            dt = sigma_next - sigma
            s = NOISE * math.sqrt(sigma / (1 - (sigma_max if sigma == 1 else sigma)))
            std = s * math.sqrt(-dt)
            t = torch.tensor([row["timesteps"][step]])

            def mean(v, x=x, s=s, sigma=sigma, dt=dt):
                return x * (1 + s**2 * dt / (2 * sigma)) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt

            new = mean(velocity(merged, x, t, texts[row["conditioning_id"]]))
            log_prob = (-((x_next - new) ** 2) / (2 * std**2) - math.log(std) - math.log(math.sqrt(2 * math.pi))).mean()
            ratio = torch.exp(log_prob - row["log_probs"][step])
            ratios.append(ratio.item())
            total = total + torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - 1e-4, 1 + 1e-4))
            if beta:
                with torch.no_grad():
                    old = mean(velocity(base, x, t, texts[row["conditioning_id"]]))
                total = total + beta * ((new - old) ** 2 / (2 * s**2)).mean()
            pairs += 1
    loss = total / pairs
    loss.backward()
    return loss.item(), {n: t.grad for n, t in lora.items()}, ratios


def worst(found, expected):
    """Largest relative distance of a tensor, over those whose gradient is not nothing."""
    largest = max(t.norm().item() for t in expected.values())
    scale = {n: max(t.norm().item(), 1e-4 * largest) for n, t in expected.items()}
    return max(((found[n] - t).norm() / scale[n]).item() for n, t in expected.items())


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_gradient_of_a_step_is_that_of_a_float64_reference(iteration, beta):
    inputs = iteration.inputs(f"reference-{beta}", shifted=True)
    result = update(iteration, inputs, f"reference-{beta}/out", diffusion_kl_beta=beta)
    loss, expected, ratios = reference(iteration, inputs, beta=beta)
    clipped = [abs(ratio - 1) > 1e-4 for ratio in ratios]
    assert any(clipped) and not all(clipped)
    found = gradients(iteration.files, result.parts)
    assert found.keys() == expected.keys()
    assert all(t.norm() > 0 for n, t in expected.items() if "add_q_proj" not in n and "blocks.0" in n)
    assert worst(found, expected) < 2e-5
    row = result.metrics[0]
    norm = math.sqrt(sum(t.norm().item() ** 2 for t in expected.values()))
    assert norm > 1e-4
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert row["loss"] == pytest.approx(loss, abs=1e-6)
    assert row["clip_frac"] == pytest.approx(sum(clipped) / len(clipped))
    assert (row["pairs"], row["samples"]) == (12, 4)


def test_kl_has_a_gradient(iteration):
    """Not computed under no_grad (pitfall 7)."""
    inputs = iteration.inputs("kl", shifted=True)
    without = update(iteration, inputs, "kl/without")
    with_kl = update(iteration, inputs, "kl/with", diffusion_kl_beta=1.0)
    assert with_kl.metrics[0]["kl_loss"] > 1e-4
    a, b = gradients(iteration.files, without.parts), gradients(iteration.files, with_kl.parts)
    assert worst(a, b) > 1e-2
    assert with_kl.metrics[0]["loss"] == pytest.approx(
        with_kl.metrics[0]["policy_loss"] + with_kl.metrics[0]["kl_loss"], rel=1e-6
    )


def test_ratio_starts_at_one_on_the_engines_own_rollout(iteration):
    inputs = iteration.inputs("ratio", probe=True)
    row = update(iteration, inputs, "ratio/out").metrics[0]
    assert row["ratio_max_abs_dev"] < 1e-6
    assert row["log_prob_mean_abs_diff"] < 1e-6
    assert row["ratio_mean"] == pytest.approx(1, abs=1e-6)
    assert row["grad_norm"] > 1e-4
    assert row["clip_frac"] == 0


@pytest.fixture(scope="module")
def flat(iteration):
    """Inputs, and their gradient with two pairs a micro-batch."""
    inputs = iteration.inputs("batching", shifted=True)
    found = gradients(iteration.files, update(iteration, inputs, "batching/flat", diffusion_kl_beta=0.5).parts)
    assert max(t.norm().item() for t in found.values()) > 1e-4
    return inputs, found


@pytest.mark.parametrize(
    "batching",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 5},
        {"micro_batch_size": 12},
        {"micro_batch_size_sample": 2, "micro_batch_size_tstep": 2},
        {"micro_batch_size_sample": 4, "micro_batch_size_tstep": 1, "diffusion_train_iter_order": "timestep_major"},
        {"gradient_checkpointing": True},
    ],
    ids=lambda b: "-".join(f"{k}={v}" for k, v in b.items()),
)
def test_micro_batches_and_checkpointing_do_not_change_the_gradient(iteration, flat, batching):
    inputs, expected = flat
    out = "batching/" + "-".join(map(str, batching.values()))
    found = gradients(iteration.files, update(iteration, inputs, out, diffusion_kl_beta=0.5, **batching).parts)
    assert worst(found, expected) < 1e-5


def test_removed_sample_is_excluded_from_the_loss(iteration):
    inputs = iteration.inputs("removed", shifted=True, removed=[1], log_probs={(1, 0): math.nan})
    result = update(iteration, inputs, "removed/out", diffusion_kl_beta=0.5)
    _, expected, _ = reference(iteration, inputs, beta=0.5, removed=[1])
    assert worst(gradients(iteration.files, result.parts), expected) < 2e-5
    assert (result.metrics[0]["pairs"], result.metrics[0]["samples"]) == (9, 3)
    everyone = iteration.inputs("all-in", shifted=True)
    other = update(iteration, everyone, "all-in/out", diffusion_kl_beta=0.5)
    assert worst(gradients(iteration.files, other.parts), expected) > 1e-2


@pytest.mark.parametrize("kind", ["zero", "removed"])
def test_a_step_without_signal_is_valid_and_reported(iteration, kind):
    inputs = (
        iteration.inputs("zero", advantages=(0.0,) * 4)
        if kind == "zero"
        else iteration.inputs("nobody", removed=range(4))
    )
    result = update(iteration, inputs, f"{kind}-signal/out")
    row = result.metrics[0]
    assert row["grad_norm"] == 0 and row["loss"] == 0
    assert row["pairs"] == (12 if kind == "zero" else 0)
    assert result.policy_digest == iteration.digest
