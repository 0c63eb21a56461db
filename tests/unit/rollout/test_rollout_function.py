"""A user's own rollout loop, from a folder outside of the repository (spec: Customization, Rollout)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.recipes import recipe
from miles_core.config.folders import own_args
from miles_core.data.sample import Sample
from miles_core.errors import InputError, StageError
from miles_core.rollout.protocol import GenerateRequest
from miles_core.rollout.rollout_function import GENERATOR, run_rollout
from miles_core.user_code import load_hook

MODULE = """
from miles.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from miles.rollout.sglang_diffusion_rollout import generate_rollout

CALLS = []

def stock(args, rollout_id, data_source, evaluation=False):
    CALLS.append((rollout_id, evaluation))
    return generate_rollout(args, rollout_id, data_source, evaluation)

def legacy_list(args, rollout_id, data_source):
    return stock(args, rollout_id, data_source).samples

def legacy_dict(args, rollout_id, data_source, evaluation):
    groups = stock(args, rollout_id, data_source, evaluation).samples
    return {"set": {"samples": [sample for group in groups for sample in group]}}

def less(args, rollout_id, data_source):
    return RolloutFnTrainOutput(stock(args, rollout_id, data_source).samples[:-1])

def nothing(args, rollout_id, data_source):
    return None

def broken(args, rollout_id, data_source):
    raise ValueError("no such luck")

def short(args, rollout_id):
    return []
"""


@pytest.fixture
def code(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[str, str]:
    """The folder, and the name of its module: one of its own a test, since a process imports a name once."""
    name = f"loops_of_{request.node.name.split('[')[0]}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    return str(tmp_path), name


class Listed:
    """Notes what it is asked for; `fails` where the engines do."""

    def __init__(self, fails: bool = False) -> None:
        self.asked: list[int] = []
        self.fails = fails

    async def generate(self, request: GenerateRequest, microgroup: list[Sample]) -> None:
        if self.fails:
            raise StageError("no engine answers")
        self.asked += [sample.index for sample in microgroup]


def run(code: tuple[str, str], evaluation: bool = False, fails: bool = False, **names: str) -> tuple[list[int], Any]:
    """Indices that were generated, and the calls that the user's module noted."""
    folder, module = code
    paths = {option: f"{module}.{name}" for option, name in names.items()}
    config = recipe("tiny").replace(code_path=folder, **paths)
    args = own_args(config)
    args.over_sampling_batch_size = 2
    groups = [[Sample(g, 2 * g + i, "a cat", 2 * g + i) for i in range(2)] for g in range(2)]
    listed = Listed(fails)
    token = GENERATOR.set(listed)
    try:
        run_rollout(args, 7, SimpleNamespace(get_samples=lambda n: groups[:n]), groups, evaluation=evaluation)  # type: ignore[arg-type]
    finally:
        GENERATOR.reset(token)
    return sorted(listed.asked), __import__(module).CALLS if paths else []


@pytest.mark.parametrize("name", ["stock", "legacy_list"])
def test_an_own_loop_is_run(code: tuple[str, str], name: str) -> None:
    made, calls = run(code, rollout_function_path=name)
    assert made == [0, 1, 2, 3] and calls[-1] == (7, False)


def test_an_evaluation_has_its_own_loop(code: tuple[str, str]) -> None:
    """Its own where there is one, the rollout's otherwise; in training it is not asked."""
    made, calls = run(code, evaluation=True, eval_function_path="legacy_dict", rollout_function_path="broken")
    assert made == [0, 1, 2, 3] and calls == [(7, True)]
    assert run(code, evaluation=True, rollout_function_path="stock")[1][-1] == (7, True)
    with pytest.raises(StageError, match="--rollout-function-path"):
        run(code, eval_function_path="stock", rollout_function_path="broken")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken", r"broken failed on samples 0\.\.3: ValueError: no such luck; mend it"),
        ("less", r"less returned 2 samples for the 4 samples 0\.\.3"),
        ("nothing", r"nothing returned something else for the 4 samples"),
    ],
)
def test_a_loop_that_raises_or_returns_less_is_named_with_its_samples(
    code: tuple[str, str], name: str, said: str
) -> None:
    with pytest.raises(StageError, match=said):
        run(code, rollout_function_path=name)


def test_a_failure_of_the_engines_is_not_the_loops(code: tuple[str, str]) -> None:
    with pytest.raises(StageError, match=r"^no engine answers$"):
        run(code, fails=True, rollout_function_path="stock")


@pytest.mark.parametrize("option", ["rollout_function_path", "eval_function_path"])
def test_the_expected_signature_is_shown(code: tuple[str, str], option: str) -> None:
    folder, module = code
    with pytest.raises(
        InputError, match=r"def generate_rollout\(args, rollout_id, data_source, \*, evaluation=False\)"
    ):
        load_hook(option, f"{module}.short", folder)
