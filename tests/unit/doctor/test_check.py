"""How checks are gone through: a crash is that check's stop, one fault is told once, what the exit code means."""

import pytest

from miles_core.doctor.check import Check, Finding, Report, counts, examine, exit_code, passed
from miles_core.errors import InputError


def test_a_crash_is_that_checks_stop_and_the_others_are_made(subject):
    def crash(_: object) -> Finding:
        raise RuntimeError("first\n  second")

    reports = list(examine([Check("a", crash), Check("b", lambda _: passed("fine"))], subject()))
    assert [(r.name, r.status, r.found) for r in reports] == [
        ("a", "stop", "RuntimeError: first second"),
        ("b", "pass", "fine"),
    ]


def test_an_interrupt_is_no_finding(subject):
    def interrupt(_: object) -> Finding:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(examine([Check("a", interrupt)], subject()))


def test_one_fault_is_one_stop_and_what_needs_it_is_skipped(subject, tmp_path):
    broken = subject(prompt_data=str(tmp_path / "none.txt"))
    look = Check("a", lambda s: passed(str(s.prompts))), Check("b", lambda s: passed(str(s.inputs)))
    first, second = examine(look, broken)
    assert first.status == "stop" and "none.txt does not exist" in first.found
    assert second.status == "skip" and "the prompts" in second.found


def test_what_is_needed_is_named_by_its_own_check(subject, tmp_path):
    broken = subject(hf_checkpoint=str(tmp_path / "none"))
    with pytest.raises(InputError, match="--hf-checkpoint"):
        _ = broken.inputs
    assert broken._failed == {"the model"}


@pytest.mark.parametrize(
    ("statuses", "plain", "strict"),
    [("pass pass", 0, 0), ("pass warn", 0, 2), ("pass stop", 2, 2), ("pass skip", 0, 0), ("warn stop skip", 2, 2)],
)
def test_exit_codes(statuses, plain, strict):
    reports = [Report("x", status, "", "", 0.0) for status in statuses.split()]
    assert (exit_code(reports, False), exit_code(reports, True)) == (plain, strict)
    assert sum(counts(reports).values()) == len(reports)
