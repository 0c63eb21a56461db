"""How reports look at the terminal."""

from collections.abc import Sequence

from miles_core.doctor.check import Report, counts

_NAME = 15


def report_lines(report: Report) -> list[str]:
    """Status, name and finding; beneath it the way out, where there is one."""
    lines = [f"  {report.status:<5} {report.name:<{_NAME}} {report.found}  · {report.seconds:.1f} s"]
    if report.way_out:
        lines.append(f"        {'':<{_NAME}} → {report.way_out}")
    return lines


def summary_line(reports: Sequence[Report]) -> str:
    """How many of each, and the seconds of all."""
    told = ", ".join(f"{count} {status}" for status, count in counts(reports).items() if count or status != "skip")
    return f"{told} · {sum(r.seconds for r in reports):.1f} s"
