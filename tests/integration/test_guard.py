"""The guard over a real run whose reward falls: it warns, stops a command, rewinds into a fork, is suspended and resumed in
the UI. Real Prefect, Ray, engine, scorers and trainer; a tiny random model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from commands import MILES, Place
from prefect_api import Api

from miles_core.store.stages import ITERATION_STAGES, StageName

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
# Under the recipe's rollout_seed the reward of iteration 2, of 4 groups of 2, is far below the others.
REWARD = """
async def score(args, samples):
    return [sample.seed % 11 / 11 - 9.0 * (16 <= sample.index < 24 and sample.seed < 1000) for sample in samples]
"""
SMALL = ("--rollout-batch-size", "4", "--n-samples-per-prompt", "2", "--rollout-microgroup-size", "2")
FEW = (*SMALL, "--num-steps-per-rollout", "1", "--diffusion-num-steps", "4", "--diffusion-sde-window-range", "0,3")
FELL = 2


def options(code: Path, *more: str) -> tuple[str, ...]:
    return ("--run-id", "fell", "--code-path", str(code), "--custom-rm-path", "falling.score", *FEW, *more)


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    (folder / "falling.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def rewound(place: Place, code: Path) -> str:
    """What a run of four iterations says whose reward falls in the third."""
    return place.miles("train", "tiny", *options(code, "--num-rollout", "4", "--guard", "rewind"))


def digests(place: Place, run: str, iterations: range) -> dict[tuple[int, StageName], str]:
    return {(i, s): place.on_line(run, i, s).content_digest for i in iterations for s in ITERATION_STAGES}


def test_a_rewound_run_trains_on_in_a_fork_with_another_seed(place: Place, rewound: str) -> None:
    """Back to the last healthy policy and on (pitfall 27): iteration 1 was still good, so the one that made it is kept."""
    assert "guard, iteration 2: reward-drop: mean reward -8" in rewound
    assert "run fell is left as it is; fell-rewind1 goes on from iteration 1" in rewound
    assert "run fell-rewind1 is done: 3 iterations computed, 1 reused" in rewound
    assert place.store("fell").line_iterations("update") == [0, 1, 2]
    kept = digests(place, "fell", range(1))
    assert digests(place, "fell-rewind1", range(1)) == kept
    own = digests(place, "fell-rewind1", range(1, 4))
    fell = digests(place, "fell", range(1, 3))
    assert all(own[i, s] != fell[i, s] for i, s in fell if s in ("prompts", "rollout", "update"))
    shown = place.miles("show", "fell-rewind1").splitlines()
    assert "a fork of fell at iteration 1" in shown[1] and "guard:" not in "\n".join(shown)
    # The images were looked at on the way: a random model's upsampling leaves a grid of its own.
    energy = place.on_line("fell", 0, "rewards").summary["grid_energy"]
    assert energy.keys() == {"8", "16"} and all(value > 1 for value in energy.values())


def test_the_same_command_goes_to_the_same_fork(place: Place, code: Path, rewound: str) -> None:
    before = digests(place, "fell-rewind1", range(4))
    again = place.miles("train", "tiny", *options(code, "--num-rollout", "4", "--guard", "rewind"))
    assert "run fell-rewind1 is done: 0 iterations computed, 4 reused" in again
    assert digests(place, "fell-rewind1", range(4)) == before


def test_a_command_stops_and_says_how_to_go_on(place: Place, code: Path, rewound: str) -> None:
    """Whatever is not to be done automatically ends with exit code 1, as often as it is asked for (pitfall 27)."""
    for more in (("--guard", "suspend"), ("--guard", "rewind", "--guard-max-rewinds", "0")):
        said = place.miles("train", "tiny", *options(code, "--num-rollout", "4", *more), code=1)
        assert "the guard suspended run fell after iteration 2 (reward-drop)" in said and "--guard-from 3" in said
        assert re.search(r"`miles fork fell 1 --run-id fell-rewind1 --rollout-seed \d+`", said)
        assert "resume" not in said.splitlines()[-1] and "starting" not in said
    shown = place.miles("show", "fell").splitlines()
    assert [line.partition("guard: ")[2] for line in shown if line.startswith("iteration")] == ["", "", "reward-drop"]
    row = place.miles("show", "fell", "2").splitlines()[-1]
    assert row.startswith("guard      reward-drop") and "below the" in row


def test_a_warning_lets_it_pass(place: Place, code: Path, rewound: str) -> None:
    said = place.miles("train", "tiny", *options(code, "--num-rollout", "3", "--guard", "warn"))
    assert "guard, iteration 2: reward-drop" in said and "run fell is done: 0 iterations computed, 3 reused" in said
    said = place.miles("train", "tiny", *options(code, "--num-rollout", "3", "--guard", "suspend", "--guard-from", "3"))
    assert "guard, iteration" not in said


def test_a_deployments_run_is_suspended_and_resumed_in_the_ui(place: Place, rewound: str, tmp_path: Path) -> None:
    """A pause that people end (pitfall 27)."""
    done = subprocess.run(
        [MILES, "up"], env=place.environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    address = re.search(r"Prefect UI (http://\S+)", done.stdout)
    assert address, done.stdout + done.stderr
    api = Api(f"{address[1]}/api")
    given = {"run": {"run_id": "fell", "num_rollout": 4}, "guard": {"guard": "suspend", "guard_from": 0}}
    flow_run = api.run("train", {"recipe": "same", "options": given})
    api.until(lambda: api.flow_run(flow_run)["state_name"] == "Suspended", "suspension")
    assert place.store("fell").line_iterations("update") == [0, 1, 2]
    (artifact, *_) = api.artifacts("fell-guard")
    assert "reward-drop" in artifact["data"] and "miles fork fell 1" in artifact["data"]
    table = api.artifacts("fell-iterations")[0]["data"]
    assert '"guard": "reward-drop"' in table
    api.post(f"/flow_runs/{flow_run}/resume", {})
    api.wait(flow_run)
    assert place.store("fell").line_iterations("update") == [0, 1, 2, 3]
    assert (place.store("fell").record() or {})["guard_from"] == FELL + 1
