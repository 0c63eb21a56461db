"""When a flow run that crashes again and again is left alone."""

from datetime import UTC, datetime, timedelta

import pytest
from prefect.client.schemas.objects import State, StateType

from tasks.restarts import crashes_in_vain

NOW = datetime(2026, 1, 1, tzinfo=UTC)
CRASHED, FAILED, RUNNING, SCHEDULED = StateType.CRASHED, StateType.FAILED, StateType.RUNNING, StateType.SCHEDULED


def history(*kinds: StateType) -> list[State]:
    """States a minute apart, the last one at NOW."""
    first = NOW - timedelta(minutes=len(kinds) - 1)
    return [State(type=kind, timestamp=first + timedelta(minutes=i)) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("kinds", "moved_minutes_ago", "count"),
    [
        ((SCHEDULED, RUNNING), 60, 0),
        ((RUNNING, CRASHED, SCHEDULED, RUNNING, CRASHED, SCHEDULED, RUNNING), 60, 2),
        ((RUNNING, CRASHED, SCHEDULED, RUNNING, CRASHED, SCHEDULED, RUNNING), 3, 1),
        ((RUNNING, CRASHED, SCHEDULED, RUNNING, CRASHED, SCHEDULED, RUNNING), 1, 0),
        ((RUNNING, CRASHED, SCHEDULED, RUNNING, FAILED, SCHEDULED, RUNNING, CRASHED, SCHEDULED), 60, 1),
    ],
)
def test_only_crashes_since_the_last_progress_count(
    kinds: tuple[StateType, ...], moved_minutes_ago: int, count: int
) -> None:
    moved = NOW - timedelta(minutes=moved_minutes_ago)
    assert crashes_in_vain(history(*kinds), moved.timestamp()) == count
