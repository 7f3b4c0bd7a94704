"""PASS needs every planned check to have reported; nothing that was not measured passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainmaster.core.results import CheckResult, Finding, Overall, Verdict, exit_code, judge_overall


def result(check: str, *verdicts: Verdict) -> CheckResult:
    return CheckResult(check=check, findings=tuple(Finding(verdict=v, reason="") for v in verdicts), took_s=0.0)


@pytest.mark.parametrize(
    ("verdicts", "overall"),
    [
        ([Verdict.PASS], Overall.PASS),
        ([Verdict.PASS, Verdict.SKIP], Overall.PASS),
        ([Verdict.PASS, Verdict.WARN], Overall.WARN),
        ([Verdict.WARN, Verdict.ERROR], Overall.INCOMPLETE),
        ([Verdict.ERROR, Verdict.FAIL], Overall.FAIL),
        ([Verdict.SKIP], Overall.INCOMPLETE),
        ([], Overall.INCOMPLETE),
    ],
)
def test_the_worst_decides(verdicts: list[Verdict], overall: Overall) -> None:
    assert judge_overall([result("a", *verdicts)], planned=["a"]) is overall


def test_a_planned_check_without_a_result_is_incomplete() -> None:
    assert judge_overall([result("a", Verdict.PASS)], planned=["a", "b"]) is Overall.INCOMPLETE


def test_a_check_that_nobody_planned_and_that_says_nothing_is_incomplete() -> None:
    assert judge_overall([result("a", Verdict.PASS), result("b")], planned=["a"]) is Overall.INCOMPLETE


def test_nothing_planned_and_nothing_measured_is_no_pass() -> None:
    assert judge_overall([], planned=[]) is Overall.INCOMPLETE


@given(st.lists(st.lists(st.sampled_from(list(Verdict)), max_size=3), max_size=4), st.integers(0, 5))
def test_pass_only_when_all_reported_and_none_is_bad(verdicts: list[list[Verdict]], planned: int) -> None:
    results = [result(str(i), *some) for i, some in enumerate(verdicts)]
    overall = judge_overall(results, planned=[str(i) for i in range(planned)])
    if overall is Overall.PASS:
        assert all(i < len(verdicts) and verdicts[i] for i in range(planned))
        assert {v for some in verdicts for v in some} <= {Verdict.PASS, Verdict.SKIP}


def test_exit_codes() -> None:
    assert [exit_code(o) for o in Overall] == [0, 0, 1, 3]
    assert [exit_code(o, strict=True) for o in Overall] == [0, 1, 1, 3]
    assert [exit_code(o, nagios=True) for o in Overall] == [0, 1, 2, 3]
