"""Every documented option does something, and nothing but what it says (pitfall 32: a resume flag that was ignored)."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from consumers import Place
from flag_effects import EFFECTS, STAGES_OF, Effect, OneChoice
from named_tests import exists

from deployments.recipes import recipe
from miles_core.config import FIELDS, RunConfig, affects, by_content, is_code
from miles_core.errors import InputError
from miles_core.pipeline.run import meaning_of
from miles_core.pipeline.stage import stage_fingerprint
from miles_core.store.stages import STAGES, StageName

CHANGEABLE = {name: effect for name, effect in EFFECTS.items() if isinstance(effect, Effect)}
ONE_CHOICE = {name: effect for name, effect in EFFECTS.items() if isinstance(effect, OneChoice)}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name in ("MILES_ARTIFACT_ROOT", "MILES_FAULT", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MILES_HOME", str(tmp_path / "home"))
    return Place(tmp_path)


def configuration(place: Place, values: dict[str, Any]) -> RunConfig:
    """tiny with files of the place, and these values on top."""
    files = {"hf_checkpoint": "{}/model", "prompt_data": "{}/p.jsonl", "artifact_root": "{}/runs"}
    return recipe("tiny").replace(
        **{n: v.replace("{}", str(place)) if isinstance(v, str) else v for n, v in (files | values).items()}
    )


def both(place: Place, name: str) -> tuple[RunConfig, RunConfig]:
    effect = CHANGEABLE[name]
    return configuration(place, effect.base), configuration(place, effect.base | {name: effect.to})


def fingerprints(place: Place, config: RunConfig, *, chained: bool) -> dict[StageName, str]:
    """Of all stages of iteration 0: each alone, or each with those upstream of it."""
    found: dict[StageName, str] = {}
    for stage in STAGES:
        upstream = {n: found[n] for n in STAGES[stage].upstream if n != stage} if chained else {}
        found[stage] = stage_fingerprint(place.step(config), stage, upstream)
    return found


def below(stages: set[str]) -> set[str]:
    """The stages and all that consume what they make."""
    reached = set(stages)
    for stage in STAGES:
        if reached & set(STAGES[stage].upstream):
            reached.add(stage)
    return reached


def differing(one: dict[Any, str], other: dict[Any, str]) -> set[str]:
    return {name for name in one if one[name] != other[name]}


def as_expected(found: Any, expected: Any) -> bool:
    numbers = isinstance(expected, float | list) and not isinstance(expected, bool)
    return found == (pytest.approx(expected, rel=1e-3) if numbers else expected)


def test_every_option_has_its_effect_shown() -> None:
    """An option without an entry has none (pitfall 32)."""
    assert set(EFFECTS) == set(FIELDS)
    assert [name for name, effect in CHANGEABLE.items() if effect.shown is None and not effect.tests] == []


def test_every_option_declares_the_stages_that_its_result_is_in() -> None:
    """One that forgets a stage is ignored by every resume (pitfall 32)."""
    expected = {name: stages for stages, names in STAGES_OF.items() for name in names.split()}
    assert {name: affects(name) for name in FIELDS} == expected


@pytest.mark.parametrize("name", CHANGEABLE)
def test_an_option_changes_the_fingerprints_that_it_declares_and_no_other(name: str, place: Place) -> None:
    """Neither ignored by a resume nor the cause of a needless one (pitfall 32)."""
    if name == "diffusion_model_family":
        configs = tuple(configuration(place, values) for values in ({}, {name: "sd3"}))
    else:
        configs = both(place, name)
    flat = [config.flat() for config in configs]
    changed = {field for field in FIELDS if flat[0][field] != flat[1][field]}
    assert changed == {name, *CHANGEABLE[name].derives}
    declared = {stage for field in changed for stage in affects(field)}
    assert declared >= set(affects(name))
    alone, chained = ([fingerprints(place, c, chained=chain) for c in configs] for chain in (False, True))
    assert differing(*alone) == declared
    assert differing(*chained) == below(declared)
    meanings = [meaning_of(config, place.inputs(config)) for config in configs]
    assert (meanings[0] != meanings[1]) == bool(set(affects(name)) - {"evaluation"})


@pytest.mark.parametrize("name", [name for name in FIELDS if by_content(name) and not is_code(name)])
def test_a_path_counts_by_what_it_holds_and_never_by_its_name(name: str, place: Place) -> None:
    """The same content elsewhere changes no fingerprint (pitfall 32)."""
    config = both(place, name)[0]
    there = Path(config.flat()[name])
    elsewhere = there.rename(there.with_name(f"moved-{there.name}"))
    moved = config.replace(**{name: str(elsewhere)})
    there.symlink_to(elsewhere)
    assert moved.flat()[name] != config.flat()[name]
    assert fingerprints(place, moved, chained=True) == fingerprints(place, config, chained=True)


@pytest.mark.parametrize("name", [name for name, effect in CHANGEABLE.items() if effect.shown])
def test_an_option_reaches_what_consumes_it(name: str, place: Place) -> None:
    """(pitfall 32)"""
    effect = CHANGEABLE[name]
    assert effect.shown is not None
    assert not as_expected(effect.after, effect.before)
    for config, expected in zip(both(place, name), (effect.before, effect.after), strict=True):
        found = effect.shown(config, place)
        assert as_expected(found, expected), found


@pytest.mark.parametrize("name", ONE_CHOICE)
def test_an_option_with_one_value_refuses_every_other(name: str, place: Place) -> None:
    """(pitfall 32)"""
    choice = ONE_CHOICE[name]
    assert configuration(place, {name: choice.value}).flat()[name] == choice.value
    with pytest.raises(InputError, match=name.replace("_", "-")):
        configuration(place, {name: choice.refused})
    assert getattr(FIELDS[name][1].annotation, "__args__", (choice.value,)) == (choice.value,)


@pytest.mark.parametrize("name", [name for name, effect in CHANGEABLE.items() if effect.tests])
def test_the_tests_that_show_it_are_there(name: str) -> None:
    assert [test for test in CHANGEABLE[name].tests if not exists(test)] == []
