"""Steps and log-probs against float64 references written from the formulas, and bit for bit against sglang."""

import math
from types import SimpleNamespace

import pytest
import torch

from miles_core.algorithms.sde import (
    CpsSdeStepBackend,
    DiffusersSdeStepBackend,
    SdeStepBackend,
    mean_over_sample,
    ode_step,
    sde_step_backend,
)
from miles_core.errors import InputError

NOISE_LEVEL = 0.7
SHAPE = (4, 6, 5)


def schedule(steps: int = 10, shift: float = 3.0) -> torch.Tensor:
    sigmas = torch.linspace(1, 0, steps + 1)
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def tensors(batch: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    model_output, sample, noise = (torch.randn(batch, *SHAPE, generator=draw) for _ in range(3))
    return model_output, sample, noise


def backend(kind: str, *, no_const: bool = False) -> SdeStepBackend:
    return sde_step_backend(
        SimpleNamespace(
            diffusion_sde_type=kind, diffusion_noise_level=NOISE_LEVEL, diffusion_log_prob_no_const=no_const
        )
    )


def reference(kind: str, v, x, sigma: float, sigma_next: float, sigma_max: float):
    """mean, std, kl_std of one row in float64, from Flow-GRPO's and CPS's formulas."""
    v, x, dt = v.double(), x.double(), sigma_next - sigma
    if kind == "sde":
        s = NOISE_LEVEL * math.sqrt(sigma / (1 - (sigma_max if sigma == 1 else sigma)))
        mean = x * (1 + s * s * dt / (2 * sigma)) + v * (1 + s * s * (1 - sigma) / (2 * sigma)) * dt
        return mean, s * math.sqrt(-dt), s
    std = sigma_next * math.sin(NOISE_LEVEL * math.pi / 2)
    x0, x1 = x - sigma * v, x + (1 - sigma) * v
    return x0 * (1 - sigma_next) + x1 * math.sqrt(sigma_next**2 - std**2), std, std


def reference_log_prob(next_sample, mean, std: float, no_const: bool) -> float:
    square = (next_sample.double() - mean) ** 2
    if no_const:
        return float(-square.mean())
    return float((-square / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)).mean())


@pytest.mark.parametrize("no_const", [False, True])
@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_rows_at_different_steps_match_the_formulas(kind: str, no_const: bool) -> None:
    sigmas = schedule()
    steps = torch.arange(9)
    v, x, noise = tensors(len(steps))
    dynamics = backend(kind, no_const=no_const)
    inputs = (v, x, sigmas[steps], sigmas[steps + 1], sigmas[1].expand(len(steps)))
    stats = dynamics.statistics(*inputs)
    next_sample, log_prob = dynamics.step(*inputs, noise)
    recomputed = dynamics.log_prob(next_sample, stats)
    assert log_prob.shape == recomputed.shape == (9,)
    assert all(t.dtype == torch.float32 for t in (next_sample, log_prob, stats.mean, stats.std, stats.kl_std))
    for i in steps.tolist():
        mean, std, kl_std = reference(kind, v[i], x[i], *(float(sigmas[j]) for j in (i, i + 1, 1)))
        torch.testing.assert_close(stats.mean[i].double(), mean, rtol=1e-5, atol=2e-6)
        assert stats.std[i].item() == pytest.approx(std, rel=1e-5)
        assert stats.kl_std[i].item() == pytest.approx(kl_std, rel=1e-5)
        expected_next = mean + std * noise[i].double()
        torch.testing.assert_close(next_sample[i].double(), expected_next, rtol=1e-5, atol=2e-6)
        expected = reference_log_prob(expected_next, mean, std, no_const)
        assert log_prob[i].item() == pytest.approx(expected, abs=1e-5)
        assert recomputed[i].item() == pytest.approx(expected, abs=1e-5)
    assert len(set(log_prob.tolist())) == 9


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_a_batch_of_rows_has_the_bits_of_single_steps(kind: str) -> None:
    sigmas = schedule()
    steps = torch.tensor([0, 3, 5])
    v, x, noise = tensors(3)
    dynamics = backend(kind)
    batched, log_prob = dynamics.step(v, x, sigmas[steps], sigmas[steps + 1], sigmas[1].expand(3), noise)
    for row, i in enumerate(steps.tolist()):
        one = slice(row, row + 1)
        alone, alone_log_prob = dynamics.step(v[one], x[one], sigmas[i], sigmas[i + 1], sigmas[1], noise[one])
        assert torch.equal(batched[one], alone)
        assert torch.equal(log_prob[one], alone_log_prob)


def test_kl_std_of_sde_leaves_out_the_root_of_dt() -> None:
    sigmas = schedule()
    v, x, _ = tensors(1)
    stats = backend("sde").statistics(v, x, sigmas[4], sigmas[5], sigmas[1])
    ratio = (stats.std / stats.kl_std).item()
    assert ratio == pytest.approx(math.sqrt(sigmas[4] - sigmas[5]), rel=1e-6)
    assert ratio < 0.5


def test_sigma_of_one_takes_sigma_max_and_is_finite() -> None:
    sigmas = schedule()
    assert sigmas[0] == 1
    v, x, noise = tensors(1)
    next_sample, log_prob = backend("sde").step(v, x, sigmas[0], sigmas[1], sigmas[1], noise)
    other, _ = backend("sde").step(v, x, sigmas[0], sigmas[1], sigmas[2], noise)
    assert torch.isfinite(next_sample).all() and torch.isfinite(log_prob).all()
    assert not torch.equal(next_sample, other)
    below = backend("sde").statistics(v, x, sigmas[1], sigmas[2], sigmas[1]).std
    assert torch.equal(below, backend("sde").statistics(v, x, sigmas[1], sigmas[2], sigmas[3]).std)


def test_low_precision_inputs_are_computed_in_fp32() -> None:
    sigmas = schedule()
    v, x, noise = tensors(1)
    low = backend("sde").step(v.bfloat16(), x.bfloat16(), sigmas[4], sigmas[5], sigmas[1], noise)
    high = backend("sde").step(v.bfloat16().float(), x.bfloat16().float(), sigmas[4], sigmas[5], sigmas[1], noise)
    assert low[0].dtype == torch.float32
    assert torch.equal(low[0], high[0]) and torch.equal(low[1], high[1])


def test_gradient_reaches_the_model_output_through_the_log_prob() -> None:
    sigmas = schedule()
    v, x, noise = tensors(2)
    dynamics = backend("sde")
    next_sample, _ = dynamics.step(v, x, sigmas[3], sigmas[4], sigmas[1], noise)
    v.requires_grad_()
    dynamics.log_prob(next_sample, dynamics.statistics(v, x, sigmas[3], sigmas[4], sigmas[1])).sum().backward()
    assert v.grad is not None
    _, std, s = reference("sde", v.detach()[0], x[0], *(float(sigmas[j]) for j in (3, 4, 1)))
    sigma, dt = float(sigmas[3]), float(sigmas[4] - sigmas[3])
    slope = (1 + s * s * (1 - sigma) / (2 * sigma)) * dt
    expected = noise.double() / std * slope / math.prod(SHAPE)
    torch.testing.assert_close(v.grad.double(), expected, rtol=1e-4, atol=1e-7)


def test_ode_is_an_euler_step_with_log_prob_zero() -> None:
    sigmas = schedule()
    steps = torch.tensor([2, 7])
    v, x, noise = tensors(2)
    expected = x.double() + (sigmas[steps + 1] - sigmas[steps]).double().view(2, 1, 1, 1) * v.double()
    torch.testing.assert_close(
        ode_step(v, x, sigmas[steps], sigmas[steps + 1]).double(), expected, rtol=1e-5, atol=1e-6
    )
    dynamics = backend("ode")
    inputs = (v, x, sigmas[steps], sigmas[steps + 1], sigmas[1])
    next_sample, log_prob = dynamics.step(*inputs, noise)
    stats = dynamics.statistics(*inputs)
    assert torch.equal(next_sample, ode_step(v, x, sigmas[steps], sigmas[steps + 1]))
    assert torch.equal(stats.mean, next_sample) and stats.std == 0 and stats.kl_std == 0
    assert torch.equal(log_prob, torch.zeros(2)) and torch.equal(dynamics.log_prob(x, stats), torch.zeros(2))


def test_cps_without_constants_is_finite_at_the_last_step_and_nan_with_them() -> None:
    sigmas = schedule()
    v, x, noise = tensors(1)
    last = (v, x, sigmas[9], sigmas[10], sigmas[1], noise)
    assert torch.isnan(backend("cps").step(*last)[1]).all()
    next_sample, log_prob = backend("cps", no_const=True).step(*last)
    assert torch.isfinite(next_sample).all() and torch.equal(log_prob, torch.zeros(1))


def test_the_seam_picks_the_class_of_the_sde_type() -> None:
    chosen = {kind: backend(kind, no_const=True) for kind in ("sde", "ode", "cps")}
    assert isinstance(chosen["cps"], CpsSdeStepBackend)
    for kind in ("sde", "ode"):
        one = chosen[kind]
        assert isinstance(one, DiffusersSdeStepBackend) and one.sde_type == kind
    assert all(b.noise_level == NOISE_LEVEL and b.log_prob_no_const for b in chosen.values())


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_a_noise_level_of_zero_is_refused(kind: str) -> None:
    args = SimpleNamespace(diffusion_sde_type=kind, diffusion_noise_level=0.0, diffusion_log_prob_no_const=False)
    with pytest.raises(InputError, match="--diffusion-noise-level 0.0"):
        sde_step_backend(args)


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "no_const"), [("sde", False), ("sde", True), ("cps", False), ("cps", True), ("ode", True)]
)
def test_bits_agree_with_sglang(kind: str, no_const: bool, dtype: torch.dtype) -> None:
    """Three outputs over a whole schedule, SDE steps among ODE steps; cps with constants has no last step."""
    controllers = pytest.importorskip("sglang.multimodal_gen.runtime.post_training.flow_rollout_controller")
    sigmas = schedule()
    batch = 3
    trained = [0, 3, 4, 9] if no_const or kind == "sde" else [0, 3, 4]
    engine = controllers.FlowRolloutController(
        sde_type=kind,
        noise_level=NOISE_LEVEL,
        log_prob_no_const=no_const,
        debug_mode=True,
        sde_step_indices=trained,
        generator=[torch.Generator().manual_seed(100 + i) for i in range(batch)],
        return_dit_trajectory=False,
        return_step_indices=None,
        shard_for_sp=lambda _, t: t,
        gather_for_sp=lambda _, t: t,
        sigmas=sigmas,
        latents_shape=(batch, *SHAPE),
    )
    dynamics = backend(kind, no_const=no_const)
    x = tensors(batch, seed=7)[1]
    ours, noise_moved = [], 0
    for i in range(10):
        v = tensors(batch, seed=20 + i)[0].to(dtype)
        theirs = engine.flow_sde_sampling(None, v, x, sigmas[i], sigmas[i + 1], i)
        if kind != "ode" and i in trained:
            noise = engine.local_variance_noises[-1]
            noise_moved += bool(noise.std() > 0.5)
            mine, log_prob = dynamics.step(v, x, sigmas[i], sigmas[i + 1], sigmas[1], noise)
            stats = dynamics.statistics(v, x, sigmas[i], sigmas[i + 1], sigmas[1])
            assert torch.equal(stats.mean, engine.local_prev_sample_means[-1])
            assert torch.equal(stats.std.expand(batch, 1), engine.local_noise_std_devs[-1])
            torch.testing.assert_close(dynamics.log_prob(mine, stats), log_prob, rtol=0, atol=1e-6)
        else:
            mine, log_prob = ode_step(v, x, sigmas[i], sigmas[i + 1]), torch.zeros(batch)
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        ours.append(log_prob)
        x = theirs
    assert noise_moved == (0 if kind == "ode" else len(trained))
    assert torch.equal(torch.stack(ours, dim=1), engine.collect_rollout_log_probs())


def test_mean_over_sample_keeps_the_batch() -> None:
    values = torch.arange(24.0).view(2, 3, 4)
    assert mean_over_sample(values).tolist() == [5.5, 17.5]
