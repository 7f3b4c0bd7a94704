"""A check is one file: put into a folder of the checks it is planned, listed, documented, compared and reported."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from test_contract import test_a_check_keeps_the_contract as keeps_the_contract
from test_contract import test_a_check_reads_only_through_the_host as reads_only_through_the_host
from typer.testing import CliRunner

from machines import H200, Machine, RecordedNodes
from trainmaster import checks, targets
from trainmaster.checks import document, facts, system
from trainmaster.cli.main import build
from trainmaster.cluster.collectives import plan as collective_plan
from trainmaster.cluster.health.compare import compare
from trainmaster.core.expect import Expect
from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.results import Verdict
from trainmaster.report import health as health_report

TOOL = Path(__file__).parents[2] / "tools" / "write_check_table.py"
CHECK = '''"""The toy of the node is wound up. A toy that stands still stops the game of all."""

from trainmaster.checks.comparison import Peer, setting
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok
from trainmaster.node.host import Host

LEVEL = 1
GPU = True
EXPECTS = ()
COMPARES = (
    setting("colour", "colour of the toy"),
    Peer(name="turns", words="of the toy", unit="turns", bad="low", least_far=0.1, fail_far=0.2, action="wind it up"),
)
METRICS = {"summary.test_results.gpu_detection": "verdict", "system.cpu.usage_percent": "turns"}


def read(host: Host) -> str:
    return host.read("/etc/toy").strip()


def judge(text: str, expect: Expect) -> Finding:
    colour, _, turns = text.partition(" ")
    say = ok if float(turns) else lambda reason, **values: fail(reason, action="replace the toy", **values)
    return say(f"{turns} turns left", turns=float(turns), colour=colour)
'''


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The check `toy`, as a file in one more folder of system/."""
    monkeypatch.setattr(system, "__path__", [*system.__path__, str(tmp_path)])
    (tmp_path / "toy.py").write_text(CHECK)
    yield tmp_path / "toy.py"
    sys.modules.pop("trainmaster.checks.system.toy", None)
    vars(system).pop("toy", None)


def node(name: str, toy: str = "blue 100") -> NodeHealth:
    machine = Machine(Path("/not/written"), of=H200)
    machine.file("/etc/toy", toy)
    return document.measure(machine.host, Expect(), level=1, only=["toy"], node=name)


def cluster(*nodes: NodeHealth) -> ClusterHealth:
    return ClusterHealth(asked=tuple(one.node for one in nodes), nodes=nodes)


def test_the_contract_tests_take_it_in(toy: Path) -> None:
    assert "toy" in checks.names()
    keeps_the_contract("toy")
    reads_only_through_the_host(toy)


def test_the_command_line_runs_and_lists_it() -> None:
    listed = CliRunner().invoke(build(), ["check", "--list"], env={"COLUMNS": "200"})
    assert "The toy of the node is wound up." in listed.stdout
    ran = CliRunner().invoke(build(), ["check", "--only", "toy", "--json", "--replay", str(H200)])
    assert [result["check"] for result in json.loads(ran.stdout)["results"]] == ["toy"]
    unknown = CliRunner().invoke(build(), ["check", "--only", "toys"])
    assert "did you mean toy?" in str(unknown.exception)


def test_it_runs_on_nodes_of_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {}
    for name, text in {"n1": "blue 100", "n2": "blue 0"}.items():
        machine = Machine(tmp_path / name, of=H200)
        machine.file("/etc/toy", text)
        folders[name] = machine.folder
    target = SimpleNamespace(open_nodes=lambda **_: RecordedNodes(folders))
    monkeypatch.setattr(targets, "load", lambda _: target)
    (tmp_path / "hosts.yaml").write_text("hosts: [n1, n2]\n")
    words = ["check", "--on", f"ssh:{tmp_path / 'hosts.yaml'}", "--only", "toy", "--json"]
    ran = CliRunner().invoke(build(), words, env={"TRAINMASTER_HOME": str(tmp_path / "home")})
    (healthy,), (failed,) = [node["results"] for node in json.loads(ran.stdout)["nodes"]]
    assert (healthy["check"], healthy["findings"][0]["verdict"]) == ("toy", "pass")
    assert (failed["check"], failed["findings"][0]["action"]) == ("toy", "replace the toy")


def test_the_page_of_checks_has_a_row_for_it() -> None:
    row = "| toy | 1 | yes | The toy of the node is wound up. A toy that stands still stops the game of all. |  "
    assert f"{row}| `colour`, `turns` |" in _tool().render()


def test_its_values_are_compared_between_nodes() -> None:
    drift, peers, _ = compare([*(node(f"n{number}") for number in range(5)), node("n5", "red 10")])
    assert [(f.device, f.values["what"]) for f in drift.findings] == [("n5", "colour")]
    assert [(f.verdict, f.device, f.values["what"]) for f in peers.findings] == [(Verdict.FAIL, "n5", "turns")]


def test_a_node_that_failed_it_takes_no_part_in_collectives() -> None:
    fit, _ = collective_plan.choose(cluster(node("n1"), node("broken", "blue 0"), node("n2")))
    assert [one.node for one in fit] == ["n1", "n2"]


def test_its_metrics_are_in_both_files() -> None:
    health = cluster(node("n1"), node("broken", "blue 0"))
    series = 'trainmaster_check_value{node="n1",check="toy",device="",name="turns"} 100.0'
    assert series in health_report.FILES["metrics.prom"](health_report.build(health)).splitlines()
    nodes = json.loads(health_report.FILES["health_check_metrics.json"](health_report.build(health)))["nodes"]
    assert nodes["node_0"]["system"]["cpu"]["usage_percent"] == 100.0
    assert [nodes[f"node_{n}"]["summary"]["test_results"]["gpu_detection"] for n in (0, 1)] == ["PASS", "FAIL"]


def test_without_its_facts_it_is_an_error_that_says_what_to_write(toy: Path) -> None:
    toy.write_text(CHECK.replace("GPU = True\n", ""))
    (result,) = node("n1").results
    assert result.verdict is Verdict.ERROR
    assert "trainmaster.checks.system.toy: state GPU beside its code" in result.findings[0].reason
    assert "toy" not in facts.read().of_gpus


def test_every_metric_that_a_check_states_is_a_field_of_the_file() -> None:
    schema = json.loads((Path(health_report.__file__).parent / "metrics.schema.json").read_text())
    (of_node,) = schema["properties"]["nodes"]["patternProperties"].values()
    assert [metric for metric in facts.read().metrics if not _has_field(of_node, metric.split("."))] == []
    assert not _has_field(of_node, ["gpu", "colour"])


def _has_field(part: dict[str, Any], path: list[str]) -> bool:
    if not path:
        return True
    if path[0] in part.get("properties", {}):
        return _has_field(part["properties"][path[0]], path[1:])
    return any(_has_field(inner, path) for inner in part.get("patternProperties", {}).values())


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_check_table", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
