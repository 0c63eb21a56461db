"""Log-probs of engine and trainer that differ: told, stopped at, or replaced by the trainer's own (pitfall 2)."""

import pytest
import torch
from trained_rollouts import SHIFTS, checkpoint_tensors

from miles_core.errors import StageError
from miles_core.training.alignment import Difference, gate, told

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


def test_what_is_told_and_from_when() -> None:
    assert told(4e-5, 1e-4, recompute=False) == ""
    assert "--diffusion-recompute-old-log-prob, or both the same precision" in told(6e-5, 1e-4, recompute=False)
    assert "the trainer's own are taken" in told(6e-5, 1e-4, recompute=True)
    assert gate(1.0, 1e-4, "warn") == gate(1.0, 1e-4, "off") == gate(4e-5, 1e-4, "stop") == ""
    assert "clipped at 0.0001" in gate(6e-5, 1e-4, "stop")


def test_differences_add_up() -> None:
    summed = Difference(2.0, 1.5, 4) + Difference(1.0, 0.5, 2)
    assert (summed.mean, summed.largest, summed.pairs) == (0.5, 1.5, 6)
    assert Difference().mean == 0
