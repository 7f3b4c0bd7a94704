"""Each class of input that was once judged too mildly, or accused wrongly, has its verdict; and the docs show it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fail_open_alone import CASES as ALONE
from fail_open_cases import CASES as FIRST
from fail_open_cases import Case
from fail_open_hidden import CASES as HIDDEN

from machines import Machine
from trainmaster.checks import document
from trainmaster.checks.profiles import resolve

CASES = (*FIRST, *HIDDEN, *ALONE)
PAGE = Path(__file__).parents[2] / "docs" / "how" / "checks.md"


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_class_has_its_verdict(machine: Machine, case: Case) -> None:
    case.put(machine)
    expect = resolve(case.expect, machine.host).expect
    health = document.measure(machine.host, expect, level=2, only=case.check.split(","))
    assert str(health.overall) == case.after


def test_the_page_shows_every_class() -> None:
    text = PAGE.read_text()
    for case in CASES:
        assert f"| {case.name} | {case.check.replace(',', ', ')} | {case.before} | {case.after} |" in text
