"""Files of golden runs and results that are damaged, hostile or of something else."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.test_acceptance import results
from trainmaster.bench.accept.baselines import append, compare, figures_of, golden_of, load_golden
from trainmaster.core.errors import UsageError


@pytest.mark.parametrize("name", ["samples_per_s", "step_p99_s", '"rank0"'])
@pytest.mark.parametrize(
    "value", ["nan", "inf", "-1.0", "0.0", "0", '"40"', "true", "2026-01-01", "[]", "1" + "0" * 4200]
)
def test_a_number_that_judges_nothing_is_refused(tmp_path: Path, name: str, value: str) -> None:
    """NaN would pass every later run; infinity and numbers below 0 would fail every one."""
    path = tmp_path / "site.toml"
    append(path, golden_of(results(), name="first"))
    path.write_text(re.sub(rf"^{name} = .*$", f"{name} = {value}", path.read_text(), flags=re.MULTILINE))
    with pytest.raises(UsageError, match=r"site\.toml: not a file of golden runs.*write a number above 0"):
        load_golden(path)


@pytest.mark.parametrize("value", ["2026-01-01", "3", "nan", "[]"])
def test_a_date_that_is_no_text_is_refused(tmp_path: Path, value: str) -> None:
    path = tmp_path / "site.toml"
    append(path, golden_of(results(), name="first"))
    path.write_text(re.sub(r"^recorded_at = .*$", f"recorded_at = {value}", path.read_text(), flags=re.MULTILINE))
    with pytest.raises(UsageError, match="write a string"):
        load_golden(path)


RANK = results()["ranks"][0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("throughput_samples_per_second", one) for one in (math.nan, math.inf, -1, 0, "x", None, 10**4200, True)),
        *(("ranks", one) for one in ([], None, [{}], {}, "x", [RANK, RANK], [{**RANK, "rank": 1}])),
        *(("options", one) for one in (None, {}, [])),
        *(("world_size", one) for one in (None, 2, "x", -1, math.nan)),
        ("checks", None), ("checks", [{}]), ("checks", [3]), ("finished_at", None),
        ("finished_at", 5), ("scaling_efficiency", "x"), ("scaling_efficiency", math.nan),
    ],
)  # fmt: skip
def test_results_that_are_not_whole_are_no_golden_run(name: str, value: Any) -> None:
    document = {**copy.deepcopy(results()), name: value}
    with pytest.raises(UsageError, match=r"not a whole results\.json"):
        golden_of(document, name="first")


@pytest.mark.parametrize(
    "changes",
    [
        {"overall": "FAIL"},
        {"limit_samples_per_second": 39.0},
        {"options": {**results()["options"], "fault": {"kind": "slow", "rank": 0, "share": 0.3}}},
        {"checks": [{"check": "accept_gradients", "findings": [{"verdict": "error"}]}]},
    ],
)
def test_a_run_that_cannot_be_trusted_is_no_golden_run(changes: dict[str, Any]) -> None:
    assert golden_of(results(), name="first").samples_per_s == 40
    with pytest.raises(UsageError, match="this run"):
        golden_of({**results(), **changes}, name="first")


def test_a_hostile_name_comes_back_as_it_was(tmp_path: Path) -> None:
    name = 'x"\n[[golden]]\n\u202e<script>\x00'
    append(tmp_path / "site.toml", golden_of(results(), name=name))
    (found,) = load_golden(tmp_path / "site.toml")
    assert found.name == name
    assert compare(found, figures_of(results(), name="now")) == []
