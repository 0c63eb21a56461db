"""The objective against float64 references; a NaN-free, additive sum; gradients where they belong."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles_core.algorithms.flow_grpo import (
    LossContext,
    flow_grpo_loss_formula,
    kl_term,
    policy_loss,
    prepare_flow_grpo_batch,
)
from miles_core.algorithms.sde import DiffusersSdeStepBackend
from miles_core.errors import StageError

CLIP, ADV_MAX, BETA, NOISE_LEVEL = 0.05, 2.0, 0.04, 0.7
SIGMAS = torch.tensor([1.0, 0.9, 0.75, 0.5, 0.25, 0.0])
STEPS = torch.tensor([0, 1, 2, 3, 4, 2])
SUMS = ("policy_loss", "kl_loss", "clip_frac", "ratio_mean", "log_prob_mean_abs_diff", "adv_mean", "pairs")


def context(beta: float = BETA) -> LossContext:
    args = SimpleNamespace(diffusion_clip_range=CLIP, diffusion_adv_clip_max=ADV_MAX, diffusion_kl_beta=beta)
    return LossContext(args=args, sde_backend=DiffusersSdeStepBackend(noise_level=NOISE_LEVEL, log_prob_no_const=False))


def batch_of_pairs(spread: float = 0.2) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Six pairs at mixed steps; old log-probs lie `spread` around the policy's own, so that some pairs clip."""
    draw = torch.Generator().manual_seed(3)
    b, shape = len(STEPS), (4, 6, 6)
    new_pred, ref_pred, latents, noise = (torch.randn(b, *shape, generator=draw) for _ in range(4))
    ctx = context()
    schedule = (SIGMAS[STEPS], SIGMAS[STEPS + 1], SIGMAS[1].expand(b))
    next_latents, log_prob = ctx.sde_backend.step(new_pred, latents, *schedule, noise)
    batch = {
        "latents": latents,
        "next_latents": next_latents,
        "sigma": schedule[0],
        "sigma_next": schedule[1],
        "sigma_max": schedule[2],
        "old_log_prob": log_prob + spread * torch.tensor([-1.0, 1.0, -0.1, 0.1, 1.0, -1.0]),
        "advantage": torch.tensor([0.5, 1.5, -1.0, 9.0, -9.0, 0.25]),
        "loss_mask": torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0]),
    }
    return batch, new_pred, ref_pred


def rows(batch: dict[str, Any], chosen: slice) -> dict[str, Any]:
    return {key: value[chosen] for key, value in batch.items()}


def run(batch: dict[str, Any], new_pred: torch.Tensor, ref_pred: torch.Tensor | None, beta: float = BETA):
    metrics: dict[str, torch.Tensor] = {}
    ctx = context(beta)
    prepared = prepare_flow_grpo_batch(ctx, batch | {"timesteps": batch["sigma"] * 1000, "conditioning": {}})
    loss = flow_grpo_loss_formula(ctx, batch, prepared, new_pred=new_pred, ref_pred=ref_pred, metrics=metrics)
    return loss, {name: float(value) for name, value in metrics.items()}


def reference(batch: dict[str, Any], new_pred: torch.Tensor, ref_pred: torch.Tensor) -> list[dict[str, float]]:
    """Terms of each pair in float64, from the formulas of Flow-GRPO."""
    terms = []
    for i, step in enumerate(STEPS.tolist()):
        sigma, sigma_next = float(SIGMAS[step]), float(SIGMAS[step + 1])
        s = NOISE_LEVEL * math.sqrt(sigma / (1 - (float(SIGMAS[1]) if sigma == 1 else sigma)))
        dt = sigma_next - sigma
        std = s * math.sqrt(-dt)
        x = batch["latents"][i].double()

        def mean(v: torch.Tensor, x=x, s=s, dt=dt, sigma=sigma) -> torch.Tensor:
            return x * (1 + s * s * dt / (2 * sigma)) + v.double() * (1 + s * s * (1 - sigma) / (2 * sigma)) * dt

        square = (batch["next_latents"][i].double() - mean(new_pred[i])) ** 2
        log_prob = float((-square / (2 * std**2)).mean()) - math.log(std) - 0.5 * math.log(2 * math.pi)
        ratio = math.exp(log_prob - float(batch["old_log_prob"][i]))
        adv = max(-ADV_MAX, min(ADV_MAX, float(batch["advantage"][i])))
        policy = max(-adv * ratio, -adv * max(1 - CLIP, min(1 + CLIP, ratio)))
        kl = float(((mean(new_pred[i]) - mean(ref_pred[i])) ** 2).mean()) / (2 * s * s)
        terms.append({
            "loss": policy + BETA * kl, "policy_loss": policy, "kl_loss": kl, "ratio_mean": ratio, "adv_mean": adv,
            "clip_frac": float(abs(ratio - 1) > CLIP), "pairs": 1.0,
            "log_prob_mean_abs_diff": abs(log_prob - float(batch["old_log_prob"][i])),
        })  # fmt: skip
    return terms


def test_loss_and_metrics_match_the_formulas() -> None:
    batch, new_pred, ref_pred = batch_of_pairs()
    loss, metrics = run(batch, new_pred, ref_pred)
    terms = reference(batch, new_pred, ref_pred)[:5]
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(sum(t["loss"] for t in terms), rel=1e-5)
    for name in SUMS:
        assert metrics[name] == pytest.approx(sum(t[name] for t in terms), rel=1e-5), name
    assert metrics["ratio_max_abs_dev"] == pytest.approx(max(abs(t["ratio_mean"] - 1) for t in terms), rel=1e-5)
    assert 0 < metrics["clip_frac"] < metrics["pairs"] == 5
    assert metrics["kl_loss"] > 0.01
    assert set(metrics) == {*SUMS, "ratio_max_abs_dev"}


def test_sums_over_micro_batches_add_up_to_the_whole_batch() -> None:
    batch, new_pred, ref_pred = batch_of_pairs()
    whole_pred, split_pred = (new_pred.clone().requires_grad_() for _ in range(2))
    loss, metrics = run(batch, whole_pred, ref_pred)
    loss.backward()
    parts = []
    for chosen in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part, part_metrics = run(rows(batch, chosen), split_pred[chosen], ref_pred[chosen])
        part.backward()
        parts.append((part.item(), part_metrics))
    assert sum(p for p, _ in parts) == pytest.approx(loss.item(), rel=1e-6)
    for name in SUMS:
        assert sum(m[name] for _, m in parts) == pytest.approx(metrics[name], rel=1e-6)
    assert max(m["ratio_max_abs_dev"] for _, m in parts) == metrics["ratio_max_abs_dev"]
    assert torch.equal(whole_pred.grad, split_pred.grad) and whole_pred.grad.abs().max() > 0


def test_masked_pairs_touch_neither_loss_nor_metrics_nor_gradient() -> None:
    batch, new_pred, ref_pred = batch_of_pairs()
    leaf = new_pred.clone().requires_grad_()
    loss, metrics = run(batch, leaf, ref_pred)
    loss.backward()
    assert torch.equal(leaf.grad[5], torch.zeros_like(leaf.grad[5]))
    assert all(leaf.grad[i].abs().max() > 0 for i in (0, 2, 3))
    changed = batch | {"advantage": batch["advantage"].clone(), "old_log_prob": batch["old_log_prob"].clone()}
    changed["advantage"][5], changed["old_log_prob"][5] = 1.9, batch["old_log_prob"][5] - 3
    again, again_metrics = run(changed, new_pred, ref_pred)
    assert again.item() == loss.item() and again_metrics == metrics
    unmasked, unmasked_metrics = run(changed | {"loss_mask": torch.ones(6)}, new_pred, ref_pred)
    assert unmasked.item() != loss.item() and unmasked_metrics["pairs"] == 6


def test_the_ratio_is_one_where_the_policy_has_not_moved() -> None:
    batch, new_pred, _ = batch_of_pairs(spread=0.0)
    leaf = new_pred.clone().requires_grad_()
    loss, metrics = run(batch, leaf, None, beta=0.0)
    loss.backward()
    assert metrics["ratio_max_abs_dev"] < 1e-5 and metrics["clip_frac"] == 0 and metrics["kl_loss"] == 0
    assert loss.item() == pytest.approx(-(0.5 + 1.5 - 1.0 + ADV_MAX - ADV_MAX), abs=1e-4)
    assert all(leaf.grad[i].abs().max() > 0 for i in range(5))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "has_gradient"),
    [
        (1.2, 1.0, -1.05, True, False),
        (1.2, -1.0, 1.2, True, True),
        (0.8, 1.0, -0.8, True, True),
        (0.8, -1.0, 0.95, True, False),
        (1.02, 1.0, -1.02, False, True),
        (1.0, 7.0, -2.0, False, True),
        (1.0, -7.0, 2.0, False, True),
    ],
)
def test_clipping_is_pessimistic_on_both_sides(
    ratio: float, advantage: float, loss: float, clipped: bool, has_gradient: bool
) -> None:
    log_prob = torch.tensor([math.log(ratio) - 3.0], requires_grad=True)
    terms = policy_loss(log_prob, torch.tensor([-3.0]), torch.tensor([advantage]), CLIP, ADV_MAX)
    terms.loss_per_pair.sum().backward()
    assert terms.loss_per_pair.item() == pytest.approx(loss, rel=1e-5)
    assert terms.ratio.item() == pytest.approx(ratio, rel=1e-5)
    assert terms.clipped.item() is clipped
    assert (log_prob.grad.abs().item() > 0) is has_gradient


def test_low_precision_predictions_give_a_ratio_in_fp32() -> None:
    batch, new_pred, ref_pred = batch_of_pairs()
    loss, _ = run(batch, new_pred.bfloat16(), ref_pred.bfloat16())
    exact, _ = run(batch, new_pred.bfloat16().float(), ref_pred.bfloat16().float())
    assert loss.dtype == torch.float32 and loss.item() == exact.item()


def test_pitfall_7_kl_gradient_reaches_the_policy_and_not_the_reference() -> None:
    batch, new_pred, ref_pred = batch_of_pairs()
    batch["advantage"] = torch.zeros(6)
    leaf, ref_leaf = new_pred.clone().requires_grad_(), ref_pred.clone().requires_grad_()
    loss, metrics = run(batch, leaf, ref_leaf)
    loss.backward()
    assert metrics["policy_loss"] == 0 and loss.item() == pytest.approx(BETA * metrics["kl_loss"], rel=1e-6)
    assert all(leaf.grad[i].abs().max() > 0 for i in range(5)) and ref_leaf.grad is None
    before = loss.item()
    after, _ = run(batch, (leaf - 10 * leaf.grad).detach(), ref_pred)
    assert after.item() < before


def test_pitfall_8_kl_is_flow_grpos_form_without_dt() -> None:
    batch, new_pred, ref_pred = batch_of_pairs()
    stats = context().sde_backend.statistics(
        new_pred, batch["latents"], batch["sigma"], batch["sigma_next"], batch["sigma_max"]
    )
    ref = context().sde_backend.statistics(
        ref_pred, batch["latents"], batch["sigma"], batch["sigma_next"], batch["sigma_max"]
    )
    without_dt = kl_term(stats.mean, ref.mean, stats.kl_std)
    with_dt = kl_term(stats.mean, ref.mean, stats.std)
    dt = batch["sigma_next"] - batch["sigma"]
    torch.testing.assert_close(with_dt / without_dt, 1 / -dt, rtol=1e-5, atol=0)
    expected = [t["kl_loss"] for t in reference(batch, new_pred, ref_pred)]
    torch.testing.assert_close(without_dt, torch.tensor(expected), rtol=1e-5, atol=0)
    assert (with_dt > without_dt * 1.5).all()


def test_kl_is_zero_on_the_reference_itself_and_takes_one_std_a_row() -> None:
    mean, ref = torch.ones(3, 2, 5, 3), torch.zeros(3, 2, 5, 3)
    kl_std = torch.tensor([1.0, 2.0, 0.5])
    assert kl_term(mean, mean, kl_std).tolist() == [0, 0, 0]
    assert kl_term(mean, ref, kl_std).tolist() == [0.5, 0.125, 2.0]
    assert kl_term(mean, ref, torch.tensor(2.0)).tolist() == [0.125] * 3


def test_pitfall_7_the_kl_term_itself_gives_the_reference_no_gradient() -> None:
    mean, ref = torch.ones(2, 3, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    kl_term(mean, ref, torch.tensor(1.0)).sum().backward()
    torch.testing.assert_close(mean.grad, torch.full((2, 3), 1 / 3))
    assert ref.grad is None


def test_a_reference_without_a_factor_is_reported_and_not_optimized() -> None:
    batch, new_pred, ref_pred = batch_of_pairs()
    with_reference, metrics = run(batch, new_pred, ref_pred, beta=0.0)
    without, bare = run(batch, new_pred, None, beta=0.0)
    assert with_reference.item() == without.item() and metrics["kl_loss"] > 0 and bare["kl_loss"] == 0


def test_a_kl_factor_without_a_reference_is_an_error() -> None:
    batch, new_pred, _ = batch_of_pairs()
    with pytest.raises(StageError, match="--ref-mode"):
        run(batch, new_pred, None)


def test_pitfall_6_a_nan_log_prob_shows_in_the_loss() -> None:
    batch, new_pred, ref_pred = batch_of_pairs()
    new_pred[2, 0, 0, 0] = float("nan")
    assert math.isnan(run(batch, new_pred, ref_pred)[0].item())


@pytest.mark.parametrize("key", ["next_latents", "sigma_max", "old_log_prob", "loss_mask"])
def test_a_missing_key_is_named_with_those_at_hand(key: str) -> None:
    batch, new_pred, ref_pred = batch_of_pairs()
    del batch[key]
    with pytest.raises(StageError, match=rf"needs \['{key}'\].*'latents'"):
        flow_grpo_loss_formula(context(), batch, None, new_pred=new_pred, ref_pred=ref_pred, metrics={})


def test_prepare_takes_the_inputs_of_the_transformer() -> None:
    conditioning = {"pos.encoder_hidden_states": torch.ones(2, 7, 3), "pos.pooled_projections": torch.ones(2, 4)}
    batch = {"latents": torch.ones(2, 1, 2, 2), "timesteps": torch.ones(2), "conditioning": conditioning}
    prepared = prepare_flow_grpo_batch(context(), batch, pad_to_len=7)
    assert prepared.latents is batch["latents"] and prepared.timesteps is batch["timesteps"]
    assert prepared.conditioning == conditioning
    with pytest.raises(StageError, match="8 text tokens"):
        prepare_flow_grpo_batch(context(), batch, pad_to_len=8)
    del batch["conditioning"]
    with pytest.raises(StageError, match=r"needs \['conditioning'\].*\['latents', 'timesteps'\]"):
        prepare_flow_grpo_batch(context(), batch)
