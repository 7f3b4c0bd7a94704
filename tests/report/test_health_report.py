"""What the health reports say: who failed and why, who is silent, what to do first, what it is worth."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from report import healths
from trainmaster.core.health import ClusterHealth
from trainmaster.core.money.prices import Prices, Rate
from trainmaster.core.results import CheckResult, ok, skip
from trainmaster.report import health as report
from trainmaster.report.health import heatmap
from trainmaster.storage import upload_bundle

PRICES = Prices(by_profile={"p5.48xlarge": Rate(usd_per_hour=55.04, source="AWS price list, us-east-1")})


def test_the_published_example_fails_and_names_gpu_1() -> None:
    told = json.loads(healths.render("health_check_metrics.json", healths.published_example()))
    summary = told["cluster_summary"]
    assert summary["overall_status"] == "FAIL"
    assert summary["test_results"] == {
        "gpu_detection": "PASS",
        "efa_network": "NOT_MEASURED",
        "nccl_communication": "NOT_MEASURED",
        "dcgm_basic": "NOT_MEASURED",
        "dcgm_extended": "FAIL",
    }
    assert [issue for issue in summary["issues"] if "gpu1" in issue and "Targeted Power" in issue]
    assert summary["recommendations"] == ["drain the node and replace GPU 1"]
    assert told["training_readiness"]["ready"] is False
    extended = told["nodes"]["node_0"]["dcgm"]["diagnostics"]["extended"]
    assert extended["success"] is False
    assert [row["device"] for row in extended["parsed_output"]["findings"] if row["status"] == "FAIL"] == ["gpu1"]


def test_the_metrics_file_has_the_seeds_names() -> None:
    told = json.loads(healths.render("health_check_metrics.json", healths.mixed()))
    assert list(told)[:4] == ["timestamp", "cluster_info", "cluster_summary", "nodes"]
    assert list(told["cluster_info"]) == ["data_completeness", "note", "expected_total_gpus", "cluster_topology"]
    node = next(node for node in told["nodes"].values() if node["node_info"]["hostname"] == "n1")
    assert list(node) == ["timestamp", "node_info", "summary", "gpu", "system", "network", "nccl", "dcgm"]
    assert node["gpu"]["gpu_0"] == {
        "name": "NVIDIA H100 80GB HBM3", "driver_version": "580.82", "memory_total_mb": 81510, "memory_used_mb": 512,
        "memory_free_mb": 80998, "temperature_c": 31.0, "utilization_percent": None, "power_draw_w": None,
        "status": "PASS",
    }  # fmt: skip
    assert node["system"]["memory"] == {"total_gb": 2000.0, "available_gb": 1900.0, "used_percent": 5.0}
    assert node["network"]["efa_provider_count"] == 32
    assert told["cluster_info"]["data_completeness"] == "partial"
    assert told["cluster_info"]["cluster_topology"]["processes_per_node"] == 8
    assert round(told["cluster_summary"]["performance_summary"]["distributed_all_reduce_bandwidth_gbps"]) == 476


def test_what_was_not_measured_is_null_and_not_a_pass() -> None:
    bare = ClusterHealth(asked=("n1",), nodes=(healths.node("n1", healths.result("cpu", healths.ok("8 CPUs"))),))
    told = json.loads(healths.render("health_check_metrics.json", bare))
    assert set(told["cluster_summary"]["test_results"].values()) == {"NOT_MEASURED"}
    node = told["nodes"]["node_0"]
    assert node["network"]["efa_available"] is None
    assert node["dcgm"]["dcgm_available"] is None
    assert node["system"]["disk"] == {"total_gb": None, "free_gb": None, "used_percent": None}
    assert told["cluster_info"]["expected_total_gpus"] is None


def test_a_consequence_names_its_root_cause_and_asks_for_nothing() -> None:
    told = json.loads(healths.render("health_check_metrics.json", healths.mixed()))
    missing = next(one for one in told["issues"] if one["check"] == "gpu_memory")
    assert missing["root_cause"] == "gpu_count: not there"
    assert "see gpu_count" not in [one["action"] for one in told["recommendations"]]


def test_silent_nodes_and_unreported_checks_are_told() -> None:
    view = report.build(healths.mixed())
    assert [node.name for node in view.nodes] == ["n4", "n2", "n3", "n1"]
    assert "1 node gave no answer: n4." in view.sentence
    assert "n2: clock: it was planned and did not report" in view.reasons
    assert "n4: answer: no answer in 60 s" in view.reasons
    assert (view.coverage.nodes_heard, view.coverage.checks_planned, view.coverage.checks_reported) == (3, 11, 10)


def test_a_node_that_nobody_spoke_of_is_silent_too() -> None:
    view = report.build(ClusterHealth(asked=("n1", "n2"), nodes=(healths.healthy("n1"),)))
    assert [node.name for node in view.silent] == ["n2"]
    assert str(view.overall) == "INCOMPLETE"


def test_machines_without_gpus_are_told_as_such() -> None:
    results = (
        CheckResult(check="gpu_count", findings=(skip("no GPU on the bus", proof="lspci shows none"),), took_s=0.0),
        CheckResult(check="shm", findings=(ok("64 GiB"),), took_s=0.0),
    )
    bare = replace(healths.healthy("n1"), planned=("gpu_count", "shm"), results=results)
    told = [report.build(ClusterHealth(asked=("n1",), nodes=(one,))).sentence for one in (bare, healths.healthy("n1"))]
    assert ["No GPU was checked" in sentence for sentence in told] == [True, False]


def test_what_stops_a_run_is_done_first_then_what_touches_most_nodes() -> None:
    def sick(name: str) -> healths.NodeHealth:
        return healths.node(
            name,
            healths.result("a", healths.warn("slow", action="tune it")),
            healths.result("b", healths.fail("dead", action="replace it" if name == "n0" else "reboot it")),
        )

    nodes = tuple(sick(f"n{place}") for place in range(3))
    view = report.build(ClusterHealth(asked=("n0", "n1", "n2"), nodes=nodes))
    assert [(one.action, len(one.nodes)) for one in view.actions] == [
        ("reboot it", 2),
        ("replace it", 1),
        ("tune it", 3),
    ]


def test_a_finding_between_nodes_belongs_to_its_node() -> None:
    view = report.build(healths.mixed())
    n3 = next(node for node in view.nodes if node.name == "n3")
    assert str(n3.overall) == "FAIL"
    assert [row.check for row in view.cluster] == ["collective_bandwidth"]


def test_junit_has_a_case_per_node_check_and_device() -> None:
    root = ET.fromstring(healths.render("junit.xml", healths.mixed()).encode())
    cases = {(case.get("classname"), case.get("name")): case for case in root.iter("testcase")}
    failure = cases["trainmaster.n2", "gpu_count[gpu3]"].find("failure")
    assert failure is not None
    assert failure.get("message") == "not there"
    assert "what to do: look for Xid 79" in (failure.text or "")
    assert cases["trainmaster.n4", "answer"].find("error") is not None
    skipped = cases["trainmaster.n1", "ib_ports"].find("skipped")
    assert skipped is not None
    assert skipped.get("message") == "the profile expects no InfiniBand"
    assert next(iter(cases["trainmaster.n1", "ram"])).tag == "system-out"


def test_prometheus_counts_what_is_wrong_above_zero() -> None:
    text = healths.render("metrics.prom", healths.mixed())
    assert 'trainmaster_check_verdict{node="n2",check="gpu_count",device="gpu3"} 2.0' in text
    assert 'trainmaster_check_verdict{node="n1",check="ib_ports",device=""} -1.0' in text
    assert 'trainmaster_check_value{node="n1",check="gpu_temperature",device="gpu7",name="celsius"} 31.0' in text
    assert "trainmaster_run_timestamp_seconds 1772366400.0" in text
    for name in {line.split("{")[0].split()[0] for line in text.splitlines() if line[0] != "#"}:
        assert f"# HELP {name} " in text
        assert f"# TYPE {name} gauge" in text


def test_a_known_price_gives_what_a_lost_run_wastes() -> None:
    view = report.build(healths.mixed(), PRICES)
    assert view.cost.lines == (
        "A run of this size that is lost after 8 h wastes about $1,321 (3 × p5.48xlarge at $55.04 per hour).",
        "This check took 2 min 3 s and cost about $5.66.",
        "The price of 1 of 4 nodes is not known; they are not in these sums.",
        "Price: AWS price list, us-east-1.",
    )


def test_an_unknown_price_is_never_guessed() -> None:
    for prices in (None, Prices(by_profile={"p4d.24xlarge": Rate(usd_per_hour=21.9)})):
        cost = report.build(healths.mixed(), prices).cost
        assert (cost.usd_per_hour, cost.wasted_usd, cost.check_usd) == (None, None, None)
        assert "is not known" in cost.lines[0]
        assert "$" not in "".join(cost.lines)


def test_the_users_own_price_holds_for_every_node() -> None:
    cost = report.build(healths.mixed(), Prices(every=Rate(usd_per_hour=10.0), assumed_hours=24)).cost
    assert cost.wasted_usd == 4 * 10 * 24


@pytest.mark.parametrize("many", [1, 2, 48, 49, 256])
def test_the_map_shows_every_node(many: int) -> None:
    health = healths.cluster_of(many)
    picture = str(heatmap.render(report.build(health)))
    rows = re.findall(r'<text class="row"[^>]*>([^<]*)<title>([^<]*)</title>', picture)
    told = sum(int(found[1]) if (found := re.match(r"(\d+) nodes: ", label)) else 1 for label, _ in rows)
    assert told == many
    assert len(rows) == (many if many <= heatmap.EACH else 3)
    sick = f"gpu-{many // 3:03}"
    assert rows[0][0] == sick  # the worst on top
    assert f"{sick} · gpu_ecc: failed\n{sick} gpu5: 2 uncorrectable errors" in picture
    assert "✕" in picture


def test_of_a_silent_node_the_map_knows_nothing() -> None:
    view = report.build(healths.mixed())
    picture = str(heatmap.render(view))
    assert picture.count("<title>n4 · answer: not measured\nn4: no answer in 60 s</title>") == len(view.checks)
    assert "answer" not in view.checks


def test_the_bandwidth_curve_stands_beside_its_baseline() -> None:
    page = healths.render("report.html", healths.mixed())
    assert "all_reduce, GB/s (cluster)" in page
    assert page.count('data-name="measured"') == page.count('data-name="baseline"') == 1
    assert re.search(r"<title>baseline 487 at 16 GiB</title>", page)


def test_a_curve_by_size_as_the_collectives_tell_it() -> None:
    slow = healths.fail(
        "all_reduce: 3.8 GB/s at 1 GiB, 1% of 481", action="run `trainmaster isolate`", collective="all_reduce",
        busbw_gbps={"1048576": 1.2, "1073741824": 3.8, "x": 1.0},
        compared=[{"size_bytes": 1073741824, "baseline_gbps": 481.0, "kind": "measured", "source": "skypilot"}],
    )  # fmt: skip
    run = ClusterHealth(
        asked=("n1",), nodes=(healths.healthy("n1"),), cluster=(healths.result("collective_bandwidth", slow),)
    )
    page = healths.render("report.html", run)
    assert "<title>measured 3.8 at 1 GiB</title>" in page
    assert "<title>baseline 481 at 1 GiB</title>" in page
    summary = json.loads(healths.render("health_check_metrics.json", run))["cluster_summary"]
    assert summary["test_results"]["nccl_communication"] == "FAIL"
    assert summary["performance_summary"] == {
        "distributed_all_reduce_bandwidth_gbps": 3.8, "single_node_all_reduce_bandwidth_gbps": None,
    }  # fmt: skip


@pytest.mark.slow
def test_a_large_cluster_stays_a_small_file() -> None:
    assert len(healths.render("report.html", healths.cluster_of(256))) < 8_000_000


def test_a_bundle_is_written_whole_and_uploaded(tmp_path: Path) -> None:
    noted = replace(healths.mixed(), notes=("rack 7 <b>", "ticket 4711"))
    paths = report.write_bundle(noted, tmp_path / "run", cost=PRICES, digest="ab12")
    names = ["report.html", "report.md", "junit.xml", "metrics.prom", "health_check_metrics.json"]
    assert [path.name for path in paths] == names
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(names)
    assert "<dd>rack 7 &lt;b&gt;</dd>" in paths[0].read_text() and "<code>ab12</code>" in paths[0].read_text()
    ticket = paths[1].read_text()
    assert "- Note: rack 7 \\<b\\>\n- Note: ticket 4711\n- Evidence: sha256:ab12\n" in ticket
    assert len(upload_bundle(tmp_path / "run", tmp_path / "store")) == len(names)
    assert (tmp_path / "store" / "junit.xml").read_bytes() == (tmp_path / "run" / "junit.xml").read_bytes()


def test_more_checks_than_the_page_is_wide_go_on_below() -> None:
    """The map was cut off at the right."""
    names = [f"check_number_{number}" for number in range(70)]
    one = healths.node("gpu-node-with-a-name-of-some-length", *(healths.result(name, ok("fine")) for name in names))
    picture = str(heatmap.render(report.build(replace(healths.mixed(), nodes=(one,)))))
    maps = [float(width) for width in re.findall(r'<svg role="img"[^>]* width="(\d+)"', picture)]
    assert len(maps) == 3 and max(maps) <= 1026, "as wide as the page"
    assert [picture.count(f"<title>{name}</title>") for name in names] == [1] * 70
