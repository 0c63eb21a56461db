"""`miles up` given again leaves automations alone that say the same."""

import random

import yaml
from prefect.automations import Automation

from flows.cli.worker import AUTOMATIONS_YAML, _meaning


def test_the_same_automation_with_its_events_in_another_order_means_the_same() -> None:
    """An update makes the server forget of whom it was waiting to hear: a killed flow would be noticed by nobody."""
    dice = random.Random(0)
    for one in yaml.safe_load(AUTOMATIONS_YAML.read_text()):
        first = _meaning(Automation(**one))
        # As a list its order would depend on the process's hash seed.
        assert isinstance(first["trigger"]["expect"], set)
        for _ in range(20):
            dice.shuffle(one["trigger"]["expect"])
            assert _meaning(Automation(**one)) == first


def test_another_time_or_action_means_another() -> None:
    one = yaml.safe_load(AUTOMATIONS_YAML.read_text())[0]
    first = _meaning(Automation(**one))
    assert _meaning(Automation(**one | {"trigger": one["trigger"] | {"within": 91}})) != first
    assert _meaning(Automation(**one | {"description": "other"})) != first
    fewer = one["trigger"] | {"expect": one["trigger"]["expect"][1:]}
    assert _meaning(Automation(**one | {"trigger": fewer})) != first
