import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from trained_rollouts import Iteration, adapter_file, run_config, trainer

from miles_core.families.tiny_sd3 import make_tiny_sd3


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return make_tiny_sd3(tmp_path_factory.mktemp("model") / "tiny-stable-diffusion-3.5-medium")


@pytest.fixture(scope="session")
def iteration(tmp_path_factory, tiny_model):
    """Iteration 0 of a policy that is not the base model."""
    return Iteration(tmp_path_factory.mktemp("artifacts"), tiny_model, adapter_file(tiny_model, scale=0.1))


@pytest.fixture
def make(iteration):
    """Start a trainer; the one before it is stopped, and the last at the end."""
    running = []

    def start(**changes):
        while running:
            running.pop().stop()
        one = trainer(run_config(**changes), iteration.model)
        running.append(one)
        one.start()
        return one

    yield start
    while running:
        running.pop().stop()
