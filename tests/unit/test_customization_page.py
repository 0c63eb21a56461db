"""docs/customization.md: every hook and every option of the reference's pages has a row with a test that exists."""

import re

import pytest
from named_tests import ROOT, exists

from miles_core.config import FIELDS, flag
from miles_core.config.reference import not_yet
from miles_core.hooks import HOOKS

OPTIONS = """
--buffer-filter-path --colocate-reward --cuda-visible-devices --custom-convert-samples-to-train-data-path
--custom-eval-rollout-log-function-path --custom-expand-samples-to-train-pairs-path --custom-generate-function-path
--custom-loss-function-path --custom-prepare-train-batch-path --custom-reward-post-process-path --custom-rm-path
--custom-rollout-log-function-path --data-source-path --deterministic-mode --diffusion-kl-beta --diffusion-model-family
--diffusion-num-sde-steps --diffusion-sde-candidate-steps --diffusion-sde-type --diffusion-sde-window-range
--diffusion-step-strategy-path --disable-grpo-std-normalization --dynamic-sampling-filter-path --eval-function-path
--global-batch-size --globalize-reward-mean --globalize-reward-std --hf-checkpoint --input-key --lora-ipc-weight-sync
--loss-type --metadata-key --model-backend-path --num-rollout --ocr-num-workers --pickscore-batch-size
--pickscore-model-path --pickscore-num-frames --pickscore-num-gpus-per-worker --pickscore-num-workers
--pickscore-processor-path --rm-type --rm-url --rollout-function-path --rollout-sample-filter-path
--sde-step-backend-path --train-pipeline-config-path
""".split()
AWAITED = {
    "--colocate-reward",
    "--cuda-visible-devices",
    "--lora-ipc-weight-sync",
    "--pickscore-num-frames",
    "--model-backend-path",
    "--train-pipeline-config-path",
}
"""Options of the pages that are refused by name."""


def rows() -> list[tuple[str, list[str]]]:
    """(options, tests) of each row."""
    table = (ROOT / "docs" / "customization.md").read_text().partition("## What each is shown by")[2]
    found = [re.split(r" \| ", line.strip("| "), maxsplit=1) for line in table.splitlines() if line.startswith("| `")]
    return [(options, re.findall(r"`(tests/[^`]+)`", tests)) for options, tests in found]


@pytest.mark.parametrize(("options", "tests"), rows())
def test_a_row_names_tests_that_exist(options: str, tests: list[str]) -> None:
    assert tests and [test for test in tests if not exists(test)] == []


@pytest.mark.parametrize("option", sorted({*OPTIONS, *(flag(hook.flag) for hook in HOOKS)} - AWAITED))
def test_every_option_has_a_row(option: str) -> None:
    assert option.removeprefix("--").replace("-", "_") in FIELDS
    assert any(f"`{option}`" in options for options, _ in rows())


@pytest.mark.parametrize("option", sorted(AWAITED))
def test_what_is_awaited_is_refused_by_name(option: str) -> None:
    assert not_yet(option.removeprefix("--").replace("-", "_"))
