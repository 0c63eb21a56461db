"""Each hook's default exists under its path and takes the arguments that the reference's page names."""

import inspect

import pytest

from miles_core.config.reference import not_yet
from miles_core.config.run_config import FIELDS
from miles_core.hooks import HOOKS, Hook, parameters_of

IDS = [hook.flag for hook in HOOKS]


def test_all_nineteen_are_there() -> None:
    assert len({hook.flag for hook in HOOKS}) == 19


@pytest.mark.parametrize("hook", HOOKS, ids=IDS)
def test_the_default_takes_the_pages_arguments(hook: Hook) -> None:
    default = hook.load()
    names = parameters_of(default)
    missing = [name for name in (*hook.parameters, *hook.keywords) if name not in names]
    assert not missing, f"{hook.default} takes {names}"
    assert inspect.iscoroutinefunction(default) == hook.asynchronous


@pytest.mark.parametrize("hook", HOOKS, ids=IDS)
def test_the_flag_is_a_field_or_refused_by_name(hook: Hook) -> None:
    assert hook.flag in FIELDS or not_yet(hook.flag)
