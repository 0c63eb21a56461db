"""Which stages a rerun makes and which changes make sense for it."""

from typing import Any

import pytest

from miles_core.errors import InputError
from miles_core.pipeline.rerun import check_overrides, stages_of_rerun
from miles_core.store.stages import downstream_of


@pytest.mark.parametrize(
    ("stage", "later"),
    [
        ("prompts", ("rollout", "rewards", "advantages", "update", "sync")),
        ("rollout", ("rewards", "advantages", "update", "sync")),
        ("rewards", ("advantages", "update", "sync")),
        ("advantages", ("update", "sync")),
        ("update", ("sync",)),
        ("sync", ()),
    ],
)
def test_downstream(stage: Any, later: tuple[str, ...]) -> None:
    assert downstream_of(stage) == later


def test_a_rerun_makes_one_stage_and_with_downstream_the_later_ones_up_to_update() -> None:
    assert stages_of_rerun("rewards", downstream=False) == ("rewards",)
    assert stages_of_rerun("rewards", downstream=True) == ("rewards", "advantages", "update")


@pytest.mark.parametrize("stage", ["sync", "reward", "policy", ""])
def test_what_cannot_be_rerun_is_refused(stage: str) -> None:
    with pytest.raises(InputError):
        stages_of_rerun(stage, downstream=False)


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({"lr": 1}, ("rewards",)),
        ({"rm_type": "ocr"}, ("rollout",)),
        ({"lora_rank": 4}, ("update",)),
        ({"run_id": "x"}, ("rewards",)),
        ({"num_rollout": 3}, ("rewards",)),
    ],
)
def test_a_change_of_no_stage_made_is_refused(changes: dict[str, Any], stages: Any) -> None:
    with pytest.raises(InputError):
        check_overrides(changes, stages)


def test_changes_that_matter_and_operational_ones_are_taken() -> None:
    check_overrides({"rm_type": "ocr", "ocr_num_workers": 2}, ("rewards",))
    check_overrides({"lr": 1}, ("rewards", "advantages", "update"))
