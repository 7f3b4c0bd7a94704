"""The tests of one testbed are one group, and the testbed ends with the last of them."""

from __future__ import annotations

import pytest

import testbeds

CONTRACT = "tests/targets/test_target_contract.py::test_cancel_stops_it_with_the_reason"


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/cli/test_remedy.py::test_x", "slurm"),
        ("tests/targets/kubernetes/test_life_cycle.py::test_x[a]", "kube"),
        ("tests/e2e/test_kubernetes.py::test_x", "nodes"),
        (f"{CONTRACT}[slurm]", "slurm"),
        (f"{CONTRACT}[local]", None),
        ("tests/core/test_states.py::test_x", None),
        ("tests/no_such_file.py::test_x", None),
    ],
)
def test_a_test_belongs_to_the_testbed_that_its_file_names(nodeid: str, group: str | None) -> None:
    assert testbeds.group_of(nodeid) == group


def test_a_testbed_is_left_once() -> None:
    left: list[str] = []
    testbeds.keep("some").callback(left.append, "some")
    testbeds.close("some")
    testbeds.close("some")
    assert left == ["some"]


def test_every_group_has_tests_in_more_than_one_file() -> None:
    """A pattern that finds nothing any more would start one testbed per worker again."""
    files = [path.relative_to(testbeds.TESTS.parent) for path in testbeds.TESTS.rglob("test_*.py")]
    groups = [testbeds.group_of(f"{file}::test_x") for file in files]
    assert groups.count("slurm") > 4 and groups.count("kube") > 4 and groups.count("nodes") > 1


def test_the_files_that_are_begun_first_are_there() -> None:
    assert [file for file in testbeds.LONG if not (testbeds.TESTS / file).is_file()] == []
