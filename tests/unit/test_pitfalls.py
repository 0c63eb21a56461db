"""docs/pitfalls.md: its checks exist and tell their number, and no fault of the list lacks one."""

import re

import pytest
from named_tests import ROOT, exists, told

NEEDED = {6, 10, 11, 12, 13, 17, 19, 20, 21, 31, 32, 35, 39, 42, 44, 45, 46, 47}
_ROW = re.compile(r"\| (?P<numbers>\d[\d, ]*) \|(?:[^|]+\|){3} (?P<checks>[^|]+) \|")
_TOLD = re.compile(r"pitfalls?[ _\n]+(\d+(?:,?\s+(?:and\s+)?\d+)*)", re.IGNORECASE)


def rows() -> list[tuple[set[int], list[str]]]:
    """(numbers, checks) of every row."""
    page = (ROOT / "docs" / "pitfalls.md").read_text()
    found = [match for line in page.splitlines() if (match := _ROW.fullmatch(line))]
    assert len(found) == page.count("\n| ") - 1
    return [({int(n) for n in m["numbers"].split(",")}, re.findall(r"`([^`]+)`", m["checks"])) for m in found]


def numbers_told(text: str) -> set[int]:
    return {int(number) for match in _TOLD.findall(text) for number in re.findall(r"\d+", match)}


def test_every_check_that_the_page_names_exists() -> None:
    page = (ROOT / "docs" / "pitfalls.md").read_text()
    named = re.findall(r"`(tests/[^`]+::[^`]+)`", page.partition("Symptom →")[2])
    assert named and [check for check in named if not exists(check)] == []


def test_every_fault_that_must_be_checked_has_a_row() -> None:
    assert NEEDED - set().union(*(numbers for numbers, _ in rows())) == set()


@pytest.mark.parametrize(("numbers", "checks"), rows(), ids=lambda value: str(value) if isinstance(value, set) else "")
def test_the_checks_of_a_row_exist_and_tell_its_numbers(numbers: set[int], checks: list[str]) -> None:
    assert checks
    assert [check for check in checks if not exists(check)] == []
    said = {check: numbers_told(told(check)) for check in checks}
    assert [check for check, found in said.items() if not found & numbers] == []
    assert numbers - set().union(*said.values()) == set()


def test_every_number_that_a_test_tells_has_a_row() -> None:
    told_anywhere = set().union(*(numbers_told(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")))
    assert told_anywhere - set().union(*(numbers for numbers, _ in rows())) == set()


def test_numbers_are_read_as_they_are_written() -> None:
    """What the tests above see with."""
    assert numbers_told("(pitfall 17): and (pitfalls 12, 13, 42), Pitfalls 1, 19 and 39; test_pitfall_36_a 5") == {
        *(17, 12, 13, 42, 1, 19, 39, 36)
    }
    assert not exists("tests/unit/test_pitfalls.py::test_that_is_not_there") and not exists("tests/none.py::test_a")
