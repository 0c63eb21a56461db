import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deployments.recipes import recipe
from miles_core.doctor.subject import Subject
from miles_core.families.tiny_sd3 import make_tiny_sd3

sys.path.insert(0, str(Path(__file__).parent))

PROMPTS = 'a "red" cat\na "blue" dog\na "green" pig\n'


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder."""
    return make_tiny_sd3(tmp_path_factory.mktemp("model") / "tiny-stable-diffusion-3.5-medium")


@pytest.fixture
def subject(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Subject]]:
    """A subject of the recipe tiny with changes, its own prompts, artifact root and MILES_HOME."""
    for name in ("RAY_ADDRESS", "PREFECT_API_URL", "MILES_ARTIFACT_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MILES_HOME", str(tmp_path / "home"))
    (tmp_path / "p.txt").write_text(PROMPTS)
    made: list[Subject] = []

    def make(kind: type[Subject] = Subject, **changes: Any) -> Subject:
        places = {
            "hf_checkpoint": str(tiny),
            "prompt_data": str(tmp_path / "p.txt"),
            "artifact_root": str(tmp_path / "root"),
            "rollout_batch_size": 2,
            "n_samples_per_prompt": 4,
            "rollout_microgroup_size": 2,
        }
        made.append(kind(recipe("tiny").replace(**(places | changes)), "tiny"))
        return made[-1]

    yield make
    for one in made:
        one.__exit__(None, None, None)
