"""The options as a form: all of them, each optional, checked as on the command line, told in one sentence."""

from typing import Any

import pytest

from deployments.recipes import recipe
from miles_core.config import FIELDS, GROUPS
from miles_core.config.forms import Options, changes_of, checked, grouped
from miles_core.config.overrides import as_flags, from_flags
from miles_core.errors import InputError

CHANGES: dict[str, Any] = {
    "num_rollout": 5,
    "lr": 1e-3,
    "globalize_reward_std": False,
    "diffusion_sde_window_range": (0, 4),
    "lora_target_modules": ("to_q", "to_k"),
    "rm_type": "jpeg_incompressibility",
    "run_id": "it's",
}


def schema_of(group: str) -> dict[str, Any]:
    schema = Options.model_json_schema()
    found: dict[str, Any] = schema["$defs"][schema["properties"][group]["$ref"].rsplit("/", 1)[1]]
    return found


def test_the_form_has_every_option_with_its_sentence_and_asks_for_none() -> None:
    for group in GROUPS:
        shown = schema_of(group)
        assert "required" not in shown
        own = {name: info for name, (owner, info) in FIELDS.items() if owner == group}
        assert shown["properties"].keys() == own.keys()
        for name, info in own.items():
            assert shown["properties"][name]["description"] == info.description
            assert "default" not in shown["properties"][name] and "anyOf" not in shown["properties"][name]


def test_limits_and_choices_are_in_the_form() -> None:
    assert schema_of("run")["properties"]["num_rollout"]["minimum"] == 1
    assert schema_of("training")["properties"]["diffusion_forward_dtype"]["enum"] == ["fp32", "bf16"]


def test_changes_go_through_the_form_unchanged() -> None:
    form = grouped(CHANGES)
    assert changes_of(form) == CHANGES
    assert changes_of(form.model_dump(mode="json")) == CHANGES
    assert form.model_dump()["run"] == {"num_rollout": 5, "run_id": "it's"}
    assert recipe("tiny").replace(**changes_of(form)) == recipe("tiny").replace(**CHANGES)


def test_nothing_given_is_nothing_changed() -> None:
    assert changes_of(None) == changes_of({}) == changes_of({"run": {}, "lora": {}}) == {}
    assert changes_of({"run": {"run_id": None, "num_rollout": 2}}) == {"num_rollout": 2}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"num_rollout": 5}, "options.num_rollout: num_rollout belongs to the group run, give options.run.num_rollout"),
        ({"data": {"lr": 1}}, "options.data.lr: lr belongs to the group optimizer, give options.optimizer.lr"),
        ({"zzz": {}}, "options.zzz: there is no such group, choose from run,"),
        ({"run": {"num_rolout": 3}}, "options.run.num_rolout: there is no option --num-rolout, did you mean"),
        ({"run": {"num_rollout": "two"}}, "options.run.num_rollout 'two': input should be a valid integer"),
        ({"run": {"num_rollout": 0}}, "options.run.num_rollout 0: input should be greater than or equal to 1"),
        ({"run": 5}, "options.run 5: give its options by name"),
        ({"reward": {"rm_type": "beauty"}}, "options.reward.rm_type 'beauty': input should be 'pickscore', 'ocr'"),
        ([1], "options [1]: give its options by name"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(given: Any, sentence: str) -> None:
    with pytest.raises(InputError) as refused:
        checked(given)
    assert str(refused.value).startswith(sentence)


def test_changes_as_flags_are_what_the_command_line_takes() -> None:
    words = as_flags(CHANGES)
    assert "--no-globalize-reward-std" in words and words[words.index("--diffusion-sde-window-range") + 1] == "0,4"
    given = from_flags(words)
    assert recipe("tiny").replace(**given) == recipe("tiny").replace(**CHANGES)
