"""`miles doctor` as a process: real OCR on a model that draws no words, in a folder and in a bucket."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from commands import Place
from roots import Root

pytestmark = pytest.mark.integration


def test_a_model_that_draws_no_words_is_warned_of(tmp_path_factory: pytest.TempPathFactory, root: Root) -> None:
    home = tmp_path_factory.mktemp("home")
    place = Place(home, root.files.root, variables={"MILES_ARTIFACT_ROOT": root.files.root})
    before = root.names()
    random = ["--hf-checkpoint", "tiny:sd3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "8"]
    output = place.miles("doctor", "tiny-ocr", "--json", "--strict", *random, code=2)
    told = json.loads(output[output.index("{\n") :])
    found = {check["name"]: check for check in told["checks"]}
    assert {name: check["status"] for name, check in found.items() if check["status"] != "pass"} == {
        "noise level": "warn",
        "reward spread": "warn",
    }
    assert "does not draw the words even without noise" in found["noise level"]["found"]
    assert "4 of 4 groups without spread" in found["reward spread"]["found"]
    assert "ocr 0.000 and 1.000" in found["scorers"]["found"]
    assert root.names() == before


def test_a_model_that_draws_words_passes(tmp_path_factory: pytest.TempPathFactory) -> None:
    place = Place(tmp_path_factory.mktemp("home"))
    small = ["--rollout-batch-size", "4", "--n-samples-per-prompt", "8"]
    output = place.miles("doctor", "tiny-ocr", "--json", "--strict", *small)
    found = {check["name"]: check for check in json.loads(output[output.index("{\n") :])["checks"]}
    assert {check["status"] for check in found.values()} == {"pass"}
    assert "0 of 4 groups without spread" in found["reward spread"]["found"]
    assert "of 24 (tokenizer_3) tokens" in found["prompt length"]["found"]
