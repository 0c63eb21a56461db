"""Log-probs of engine and trainer that differ: told, stopped at, or replaced by the trainer's own (pitfall 2)."""

import json

import pytest
import torch
from trained_rollouts import SDE_STEPS, SHIFTS, Iteration, checkpoint_tensors, follow

from miles_core.errors import StageError
from miles_core.store.parts import read_bytes
from miles_core.training.agreement import gate, told
from miles_core.training.alignment import Gap, merged

DEBUG = {"diffusion_debug_mode": True}
MEAN_SHIFT = sum(map(abs, SHIFTS)) / len(SHIFTS)


@pytest.fixture(scope="module")
def true(iteration):
    return iteration.inputs("alignment-true")


@pytest.fixture(scope="module")
def shifted(iteration):
    return iteration.inputs("alignment-shifted", shifted=True)


def same(files, one, other):
    mine, theirs = (checkpoint_tensors(files, result.parts) for result in (one, other))
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_the_trainers_own_log_probs_make_the_first_ratio_one(iteration, make, true, shifted):
    """Bit for bit, whatever the engine stored; without it a shift moves the policy elsewhere (pitfall 2)."""
    files, recompute = iteration.files, {"diffusion_recompute_old_log_prob": True}
    plain, off = (make().update(files, given, f"alignment/{n}") for n, given in (("p", true), ("s", shifted)))
    one, other = (
        make(**recompute).update(files, given, f"alignment/r{n}") for n, given in (("p", true), ("s", shifted))
    )
    assert plain.metrics[0]["ratio_max_abs_dev"] > 0 and not same(files, plain, off)
    for result in (one, other):
        assert result.metrics[0]["ratio_max_abs_dev"] == result.metrics[0]["log_prob_mean_abs_diff"] == 0
    assert same(files, one, other)
    assert off.log_prob_mismatch == pytest.approx(MEAN_SHIFT, rel=0.02)
    assert other.log_prob_mismatch == pytest.approx(MEAN_SHIFT, rel=0.02)
    assert 0 < one.log_prob_mismatch < 1e-6


def test_later_steps_keep_the_log_probs_of_before_the_first(iteration, make, true):
    """Recomputed after each step, every ratio would be 1 and nothing be clipped."""
    steps = {"num_steps_per_rollout": 2, "diffusion_recompute_old_log_prob": True}
    # The same pairs in both steps: the second meets a policy that has moved.
    result = make(**steps, lr=1e-2).update(iteration.files, true, "alignment/steps")
    first, second = result.metrics
    assert first["ratio_max_abs_dev"] == 0 < second["ratio_max_abs_dev"]


def test_a_gate_that_stops_does_so_before_anything_moved(iteration, make, true, shifted):
    """(pitfall 2)"""
    files, stopping = iteration.files, {"alignment_gate": "stop"}
    one = make(**stopping)
    with pytest.raises(StageError, match=r"0\.00013 from the engine's .* --diffusion-recompute-old-log-prob"):
        one.update(files, shifted, "alignment/stopped")
    assert not list(files.list("alignment/stopped"))
    resumed, plain = one.update(files, true, "alignment/resumed"), make().update(files, true, "alignment/plain")
    assert same(files, resumed, plain)
    make(**stopping, diffusion_recompute_old_log_prob=True).update(files, shifted, "alignment/own")


@pytest.fixture(scope="module")
def debugged(iteration, tmp_path_factory):
    """The same iteration with the engine's model outputs kept."""
    return Iteration(tmp_path_factory.mktemp("debugged"), iteration.model, iteration.adapter, debug=True)


def test_model_outputs_are_compared_by_step_and_dtype(debugged, make):
    found = {}
    for dtype in ("fp32", "bf16"):
        given = debugged.inputs(f"compared-{dtype}")
        one = make(diffusion_debug_mode=True, diffusion_forward_dtype=dtype)
        result = one.update(debugged.files, given, f"compared/{dtype}")
        assert [(row["step"], row["dtype"], row["pairs"]) for row in result.alignment] == [
            (n, dtype, 4) for n in SDE_STEPS
        ]
        (part,) = [part for part in result.parts if part.path.endswith("alignment.json")]
        assert json.loads(read_bytes(debugged.files, part)) == result.alignment
        found[dtype] = result.alignment
    for exact, coarse in zip(found["fp32"], found["bf16"], strict=True):
        assert 0 <= exact["output_mean_rel_diff"] <= exact["output_max_rel_diff"] < 1e-5
        assert 0 <= exact["log_prob_mean_abs_diff"] <= exact["log_prob_max_abs_diff"] < 1e-6
        assert coarse["output_mean_rel_diff"] > 1e-3 and coarse["log_prob_mean_abs_diff"] > 1e-6


def test_comparing_changes_nothing_that_is_trained(debugged, make):
    files, given = debugged.files, debugged.inputs("unchanged")
    plain, looked = (make(**c).update(files, given, f"unchanged/{n}") for n, c in (("p", {}), ("l", DEBUG)))
    assert same(files, plain, looked) and plain.alignment == []


def test_without_the_engines_outputs_log_probs_are_compared_alone(iteration, make, true):
    rows = make(**DEBUG).update(iteration.files, true, "alignment/plain-rollout").alignment
    assert [row["output_mean_rel_diff"] for row in rows] == [None] * 3
    assert 0 < max(row["log_prob_max_abs_diff"] for row in rows) < 1e-6


def test_a_skipped_step_leaves_the_policy_and_the_next_iteration_goes_on(iteration, make, true):
    files, skipping = iteration.files, {"debug_skip_optimizer_step": True}
    one = make(**skipping)
    result = one.update(files, true, "alignment/skipped")
    assert result.policy_digest == iteration.digest and result.metrics[0]["grad_norm"] > 0
    again = one.update(files, follow(iteration, result, "alignment-next", 1), "alignment/next")
    assert again.policy_digest == iteration.digest and again.metrics[0]["global_step"] == 1


def test_what_is_told_and_from_when() -> None:
    assert told(4e-5, 1e-4, recompute=False) == ""
    assert "--diffusion-recompute-old-log-prob, or both the same precision" in told(6e-5, 1e-4, recompute=False)
    assert "the trainer's own are taken" in told(6e-5, 1e-4, recompute=True)
    assert gate(1.0, 1e-4, "warn") == gate(1.0, 1e-4, "off") == gate(4e-5, 1e-4, "stop") == ""
    assert "clipped at 0.0001" in gate(6e-5, 1e-4, "stop")


def test_differences_add_up() -> None:
    one, other = merged([{1: Gap(4, 2.0, 1.5, 0.4, 0.3)}, {1: Gap(2, 1.0, 0.5, 0.2, 0.2), 0: Gap(1, 0.5, 0.5)}]).items()
    assert one == (0, Gap(1, 0.5, 0.5)) and other == (1, Gap(6, 3.0, 1.5, pytest.approx(0.6), 0.3))
    assert other[1].mean == 0.5 and Gap().mean == 0
