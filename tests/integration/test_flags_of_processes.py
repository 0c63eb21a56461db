"""Options of processes on a real Ray head: how many there are, how often one is replaced, what outlives the command
(pitfall 32)."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.ray_driver import driver, environment

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("home")
    yield made
    subprocess.run([Path(sys.executable).parent / "miles", "down"], env=environment(made), check=True)


def test_as_many_processes_as_the_options_say(home: Path) -> None:
    """Engines, parsers, scorers, and ranks of nodes and of a node (pitfall 32)."""
    code = """
counts = dict(rollout_num_engines=2, rollout_parser_num_workers=3, ocr_num_workers=3)
with workers(name="tiny-ocr", actor_num_nodes=2, actor_num_gpus_per_node=2, **counts) as w:
    w.engines(), w.parsers(), w.scorers(w.config, w.inputs)
    w._trainer = w._start_trainer()
    tell("names", *w.ray.util.list_named_actors())
with workers(2, name="tiny-ocr", ocr_num_workers=1) as w:
    w.engines(), w.parsers(), w.scorers(w.config, w.inputs)
    w._trainer = w._start_trainer()
    tell("names", *w.ray.util.list_named_actors())
"""
    many, few = (Counter(word.split("-")[0] for word in line[1:]) for line in driver(home, code) if line[0] == "names")
    assert many == {"engine": 2, "parser": 3, "scorer": 3, "trainer": 4}
    assert few == {"engine": 1, "parser": 1, "scorer": 1, "trainer": 1}


@pytest.mark.parametrize("retries", [0, 1])
def test_a_dying_engine_is_replaced_as_often_as_the_option_says(home: Path, retries: int) -> None:
    """(pitfall 32)"""
    code = """
tries = []

def work(engine):
    tries.append(engine.handle._actor_id.hex())
    w.get([engine.call("checksum")], "the engine")
    os.kill(w.ray.get(engine.status()).pid, 9)
    w.get([engine.call("checksum")], "the engine")

with workers(rollout_max_retries=int(sys.argv[1])) as w:
    try:
        w.with_engine(0, work)
    except ProcessDied as fault:
        tell("died", len(set(tries)), len(tries))
"""
    assert ["died", str(retries + 1), str(retries + 1)] in driver(home, code, str(retries))


@pytest.mark.parametrize("keep", [False, True])
def test_actors_are_kept_for_the_next_command_where_that_is_asked(home: Path, keep: bool) -> None:
    """After a good end, with the Ray head; a command that does not ask ends them (pitfall 32)."""
    code = """
with workers(int(sys.argv[1]), keep_actors=sys.argv[2] == "True") as w:
    tell("pids", *[s.pid for s in w.ray.get([p.status() for p in w.parsers()])])
"""

    def pids(epoch: int, keep: bool) -> list[int]:
        return [int(w) for line in driver(home, code, str(epoch), str(keep)) if line[0] == "pids" for w in line[1:]]

    first = pids(1, keep)
    assert len(first) == 1
    assert all(psutil.pid_exists(pid) == keep for pid in first)
    second = pids(2, False)
    assert (second == first) == keep
    assert not any(psutil.pid_exists(pid) for pid in first + second)


def test_engines_and_trainer_are_deterministic_where_that_is_asked(home: Path) -> None:
    """(pitfall 32)"""
    code = """
def deterministic(actor):
    import torch

    return torch.are_deterministic_algorithms_enabled()

for epoch, asked in ((1, False), (2, True)):
    with workers(epoch, deterministic_mode=asked) as w:
        w._trainer = w._start_trainer()
        found = w.ray.get([actor.handle.__ray_call__.remote(deterministic) for actor in [*w.engines(), *w._trainer]])
        tell("mode", asked, *found)
"""
    lines = driver(home, code)
    assert ["mode", "False", "False", "False"] in lines
    assert ["mode", "True", "True", "True"] in lines
