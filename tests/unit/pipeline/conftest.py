import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def places(tmp_path_factory):
    """Input files of `three`."""
    from lines import input_files

    return input_files(tmp_path_factory.mktemp("inputs") / "model")


@pytest.fixture(scope="session")
def three_files(tmp_path_factory, places):
    """The files of a run of three iterations whose stages hold only what they were asked for."""
    from lines import Line
    from roots import FolderRoot

    root = FolderRoot(tmp_path_factory.mktemp("three"))
    run = Line.begin(root, places)
    for iteration in range(3):
        run.iterate(iteration)
    return {name: root.get(name) for name in root.names()}


@pytest.fixture
def three(root, three_files):
    """That run, named parent, on an artifact root of each kind."""
    from lines import Line

    for name, data in three_files.items():
        root.put(name, data)
    return Line.open(root, "parent")


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
