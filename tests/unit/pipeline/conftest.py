import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """Four iterations of a run, made once: real engine, parser, scorer and trainer in this process, nothing pruned."""
    import torch
    from tiny_run import TinyRun

    torch.set_num_threads(1)
    made = TinyRun(tmp_path_factory.mktemp("trained"))
    for iteration in range(4):
        made.iterate(iteration)
    made.workers.end_trainer()
    return made


@pytest.fixture
def run(trained_run, tmp_path):
    """A copy of the trained run that a test may prune and go on with."""
    copy = trained_run.copy(tmp_path / "copy")
    yield copy
    copy.workers.end_trainer()
