"""Deterministic mode: the same bits, and no operation that could give others."""

import os

import pytest
import torch
from trained_rollouts import free_port, run_config, trainer

from miles_core.errors import StageError
from miles_core.training.determinism import make_deterministic
from miles_core.training.trainer import TrainerRank


@pytest.fixture(autouse=True)
def _restored(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    benchmark = torch.backends.cudnn.benchmark
    yield
    make_deterministic(False, "cpu")
    torch.backends.cudnn.benchmark = benchmark
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def scatter() -> None:
    """Which of two values stays is up to the threads."""
    torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))


def update(iteration, inputs, out, **changes):
    one = trainer(run_config(num_steps_per_rollout=2, diffusion_kl_beta=0.1, **changes), iteration.model)
    one.start()
    try:
        return one.update(iteration.files, inputs, out)
    finally:
        one.stop()


def test_operation_without_a_deterministic_kernel_raises() -> None:
    make_deterministic(False, "cpu")
    scatter()
    make_deterministic(True, "cpu")
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
        scatter()
    make_deterministic(False, "cpu")
    scatter()


@pytest.mark.parametrize("mode", [False, True])
def test_the_cpu_computes_in_one_thread_whatever_the_mode(mode: bool) -> None:
    torch.set_num_threads(2)
    assert torch.get_num_threads() == 2
    make_deterministic(mode, "cuda")
    assert torch.get_num_threads() == 2
    make_deterministic(mode, "cpu")
    assert torch.get_num_threads() == 1


def test_cuda_gets_fixed_kernels_and_a_fixed_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.backends.cudnn.benchmark = True
    make_deterministic(False, "cuda")
    assert torch.backends.cudnn.benchmark and not torch.backends.cudnn.deterministic
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    make_deterministic(True, "cuda")
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    make_deterministic(True, "cuda")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_two_runs_give_the_same_bits_and_on_the_cpu_those_of_the_other_mode(iteration):
    inputs = iteration.inputs("deterministic", shifted=True)
    modes = (True, True, False)
    results = [update(iteration, inputs, f"deterministic/{i}", deterministic_mode=m) for i, m in enumerate(modes)]
    first, *others = [[(part.sha256, part.content) for part in result.parts] for result in results]
    assert others == [first, first]
    assert results[0].policy_digest != iteration.digest


def test_trainer_stops_at_an_operation_without_a_deterministic_kernel(iteration):
    class Careless(TrainerRank):
        def _predict(self, *arguments):
            scatter()
            return super()._predict(*arguments)

    inputs = iteration.inputs("careless")
    for mode in (False, True):
        one = Careless(
            run_config(deterministic_mode=mode), str(iteration.model), "sd3", master_port=free_port(), device="cpu"
        )
        one.start()
        try:
            if mode:
                with pytest.raises(
                    StageError, match=r"in update: step 1 of 1, forward 1 of 6: RuntimeError: put_ does"
                ):
                    one.update(iteration.files, inputs, "careless/deterministic")
                assert one.policy() == ""
            else:
                assert one.update(iteration.files, inputs, "careless/not").policy_digest != iteration.digest
        finally:
            one.stop()
