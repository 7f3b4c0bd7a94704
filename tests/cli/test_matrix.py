"""A cluster at the terminal: hundreds of nodes fit on a page, the worst stand first, silence is not hidden."""

from __future__ import annotations

import pytest
from rich.console import Console

from trainmaster.cli import _console
from trainmaster.cli._views import cluster_table
from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
from trainmaster.core.results import CheckResult, Finding, Verdict, fail, ok, warn


def node(name: str, finding: Finding) -> NodeHealth:
    fine = CheckResult(check="cpu", findings=(ok("fine"),), took_s=0.0)
    return NodeHealth(
        node=name, level=1, planned=("cpu", "shm"),
        results=(fine, CheckResult(check="shm", findings=(finding,), took_s=0.0)),
    )  # fmt: skip


def show(health: ClusterHealth, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    console = Console(width=140, record=True, color_system=None, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    monkeypatch.setattr(_console, "out", console)
    cluster_table.show(health)
    console.file.close()
    return console.export_text().splitlines()


def test_500_nodes_fit_on_a_page_and_the_worst_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node(f"n{i:03}", ok("fine")) for i in range(500)]
    nodes[7] = node("n007", fail("2 GiB [not markup]", action="raise it"))
    nodes[8], nodes[9] = (node(f"n00{i}", warn("small", action="raise it")) for i in (8, 9))
    drift = CheckResult(check="drift", findings=(fail("driver 1", action="x", device="n300"),), took_s=0.0)
    silent = Silent(node="n999", verdict=Verdict.ERROR, reason="nothing listens", action="start sshd")
    names = tuple(item.node for item in nodes)
    lines = show(
        ClusterHealth(asked=(*names, "n999"), nodes=tuple(nodes), silent=(silent,), cluster=(drift,)), monkeypatch
    )
    assert len(lines) < 25
    rows = [line.split()[0] for line in lines[1:6]]
    assert rows == ["n999", "n007", "n300", "n[008-009]", "n[000-006,010-299,301-499]"]
    text = "\n".join(lines)
    assert "2 GiB [not markup]" in text
    assert "nothing listens" in text
    assert "· pass, - does not apply, w warn, E error, F fail, ? no answer" in text
    assert "FAIL  500 of 501 nodes answered, 2 FAIL, 2 WARN, 496 PASS; silent: n999; between nodes: drift" in text


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["n1", "n2", "n3", "n5"], "n[1-3,5]"),
        (["n08", "n09", "n10"], "n[08-10]"),
        (["n8", "n9", "n10"], "n[8-10]"),
        (["n1", "n01"], "n1, n01"),
        (["a", "b7"], "b7, a"),
        (["r1-n1", "r1-n2", "r2-n1"], "r1-n[1-2], r2-n1"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.[1-2]"),
        ([], ""),
    ],
)
def test_names_fold(names: list[str], folded: str) -> None:
    assert cluster_table.fold(names) == folded
