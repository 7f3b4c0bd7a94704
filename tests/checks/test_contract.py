"""What holds for every check, also for those that are yet to be written."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainmaster import checks
from trainmaster.checks.comparison import Rule, software
from trainmaster.checks.contract import Check, find_faults
from trainmaster.checks.facts import gather
from trainmaster.core.expect import Expect
from trainmaster.core.results import Verdict
from trainmaster.core.schema import to_plain
from trainmaster.node.recorded import RecordedHost

HOSTS = Path(__file__).parents[1] / "hosts"
# What a check must not touch by itself: everything it learns comes through the host, or it cannot be replayed.
FORBIDDEN = {"os", "subprocess", "socket", "shutil", "platform", "time", "datetime", "resource", "open", "Path"}


@pytest.mark.parametrize("name", checks.names())
def test_a_check_keeps_the_contract(name: str) -> None:
    check = checks.load(name)
    first = (check.__doc__ or "").splitlines()[0]
    assert first.endswith("."), "the first line says what holds when the check passes"
    assert find_faults(check) == []
    assert float(getattr(check, "TIMEOUT_S", 1)) > 0
    assert list(inspect.signature(check.read).parameters) == ["host"]
    assert list(inspect.signature(check.judge).parameters)[1] == "expect"


def test_no_two_checks_state_one_fact_differently() -> None:
    assert find_conflicts({name: checks.load(name) for name in checks.names()}) == []


def find_conflicts(stating: Mapping[str, Check]) -> list[str]:
    """What two checks state differently: an expectation has one check, and a name that holds everywhere one rule."""
    stated = gather(stating)
    rules: dict[str, Rule] = {**stated.same, **stated.peers}
    conflicts = []
    for name, check in stating.items():
        conflicts += [
            f"{name}: EXPECTS names {field}, which {stated.measured_by[field]} measures"
            for field in check.EXPECTS
            if stated.measured_by[field] != name
        ]
        conflicts += [
            f"{name}: COMPARES has another rule for {rule.name} everywhere than another check"
            for rule in check.COMPARES
            if rule.everywhere and rules[rule.name] != rule
        ]
    return conflicts


SOUND = {"LEVEL": 1, "GPU": False, "EXPECTS": (), "COMPARES": (), "METRICS": {}}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"LEVEL": 1, "EXPECTS": ()}, "state GPU, COMPARES, METRICS beside its code"),
        ({**SOUND, "LEVEL": 4}, "LEVEL is 4"),
        ({**SOUND, "GPU": "no"}, "GPU is 'no'"),
        ({**SOUND, "EXPECTS": "gpus"}, "EXPECTS is no tuple"),
        ({**SOUND, "EXPECTS": ("gpu",)}, "EXPECTS names gpu, which is no field of Expect"),
        ({**SOUND, "COMPARES": ("driver",)}, "COMPARES is no tuple of rules"),
        ({**SOUND, "METRICS": {"gpu.name": 1}}, "METRICS is no mapping of text to text"),
    ],
)
def test_facts_that_are_missing_or_wrong_are_told(facts: dict[str, object], words: str) -> None:
    assert find_faults(SimpleNamespace(**SOUND)) == []
    (line,) = find_faults(SimpleNamespace(**facts))
    assert words in line


def test_a_fact_that_two_checks_state_differently_is_told() -> None:
    first = SimpleNamespace(**{**SOUND, "EXPECTS": ("gpus",), "COMPARES": (software("driver", "driver"),)})
    second = SimpleNamespace(**{**SOUND, "EXPECTS": ("gpus",), "COMPARES": (software("driver", "other"),)})
    found = find_conflicts({"first": first, "second": second})  # type: ignore[dict-item]
    assert [line.split(",")[0] for line in found] == [
        "first: EXPECTS names gpus",
        "first: COMPARES has another rule for driver everywhere than another check",
    ]


@pytest.mark.parametrize("path", sorted(Path(checks.__path__[0]).glob("*/*.py")), ids=lambda path: path.name)
def test_a_check_reads_only_through_the_host(path: Path) -> None:
    used = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    assert not used & FORBIDDEN


def test_on_a_machine_that_answers_nothing_every_check_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "answers.json").write_text('{"v": 1}')
    results = checks.run(RecordedHost(tmp_path), Expect(), level=3)
    assert [result.check for result in results] == checks.plan(3)
    assert {result.verdict for result in results} == {Verdict.ERROR}


@pytest.mark.parametrize(
    "folder", sorted(path for path in HOSTS.iterdir() if path.is_dir()), ids=lambda path: path.name
)
def test_recorded_healthy_nodes_pass(folder: Path) -> None:
    results = checks.run(RecordedHost(folder), Expect(), level=1)
    wrong = [(result.check, f) for result in results for f in result.findings if f.verdict not in ("pass", "skip")]
    assert wrong == []
    assert any(result.verdict is Verdict.PASS for result in results)


def test_findings_are_plain_enough_for_json() -> None:
    results = checks.run(RecordedHost(HOSTS / "h200"), Expect(), level=1)
    plain = to_plain(results)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
