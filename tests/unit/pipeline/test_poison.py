"""The halving finds the one row, in few calls, and invents none."""

import pytest

from miles_core.pipeline.poison import find_poison


@pytest.mark.parametrize(("rows", "bad"), [(1, 0), (2, 1), (7, 0), (7, 3), (8, 5), (8, 7), (13, 12)])
def test_the_row_that_fails_alone_is_found_with_two_calls_a_halving(rows: int, bad: int) -> None:
    calls: list[tuple[int, int]] = []

    def fails(start: int, stop: int) -> str | None:
        calls.append((start, stop))
        return f"died on {start}:{stop}" if start <= bad < stop else None

    assert find_poison(rows, fails) == (bad, f"died on {bad}:{bad + 1}")
    assert len(calls) <= max(1, 2 * (rows - 1).bit_length())


def test_of_two_such_rows_the_first_is_named() -> None:
    found = find_poison(8, lambda start, stop: "died" if start <= 2 < stop or start <= 6 < stop else None)
    assert found == (2, "died")


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_no_row_is_named_where_only_the_whole_fails(rows: int) -> None:
    assert find_poison(rows, lambda start, stop: "died" if stop - start == rows and rows > 1 else None) is None
