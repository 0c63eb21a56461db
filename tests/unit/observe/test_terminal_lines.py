"""The line after an iteration."""

import pytest

from miles_core.observe.terminal import iteration_line, seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(8.14, "8.1 s"), (99.9, "99.9 s"), (99.96, "2 min"), (725, "12 min"), (11_100, "3 h 05 min")],
)
def test_seconds_as_people_write_them(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_the_line_tells_the_reward_its_move_and_the_time_left() -> None:
    line = iteration_line(3, 10, [60.0, 8.0, 10.0, 9.0], {1: 0.5, 2: 0.25, 3: 0.375})
    assert line == "iteration 3 done in 9.0 s · reward 0.375 (+0.125) · 6 to go, about 54.0 s"


def test_the_first_iteration_estimates_from_itself_and_the_last_has_none_to_go() -> None:
    assert (
        iteration_line(0, 3, [20.0], {0: 1.0})
        == "iteration 0 done in 20.0 s · reward 1 · 2 to go, at most about 40.0 s"
    )
    assert iteration_line(2, 3, [20.0, 4.0], {}) == "iteration 2 done in 4.0 s"
