"""Fixtures of the checks' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from machines import H200, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A recorded node that the test may damage."""
    return Machine(tmp_path / "h200", of=H200)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many damaged answers were judged, and how many tests found one that opened the judgement."""
    reports = [
        (report, dict(report.user_properties))
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, ())
        if "test_emptied_answers" in report.nodeid
    ]
    told = [(report, int(found["mutations"])) for report, found in reports if "mutations" in found]
    if told:
        failed = sum(report.failed for report, _ in told)
        total = sum(number for _, number in told)
        line = f"emptied answers: {total:,} mutations in {len(told)} tests; {failed} tests with a fail-open judgement"
        terminalreporter.write_line(line)
