"""Reports of acceptance suites: of a real run with two ranks, and of documents with faults; opened in a browser."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fork_server import ForkServer
from trainmaster.bench.accept.options import Options
from trainmaster.cluster.acceptance import suite
from trainmaster.cluster.acceptance.suite_plan import Machine, plan
from trainmaster.report.acceptance import build, render_html, render_markdown, write_bundle
from warm_python import WarmPython

if TYPE_CHECKING:
    from playwright.sync_api import Page

SECTIONS = ("verdict", "measurements", "parts", "not-measured", "map", "recommendations", "versions", "signature")


@pytest.fixture(scope="module")
def real(programs: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A quick suite of this machine with two ranks on gloo, and its reports."""
    folder = tmp_path_factory.mktemp("acceptance")
    options = Options(
        backend="gloo", processes=2, batch_size=2, image_size=32, num_classes=10, warmup_iterations=1,
        active_iterations=3, min_throughput=0.01,
    )  # fmt: skip
    parts = plan("quick", options, Machine(on=None, gpus=0), folder, only=["kernel"], min_busbw=0.000001)
    python = WarmPython(programs)
    document = suite.run(
        "quick", parts, folder, on=None, show=lambda _: None, program=(str(python.path), "-m", "trainmaster")
    )
    python.close()
    write_bundle(document, folder)
    yield folder


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks", by_file=True)
@pytest.mark.slow
def test_a_real_suite_of_two_ranks_has_everything(real: Path) -> None:
    document = json.loads((real / "report.json").read_text())
    assert {one["name"]: one["overall"] is not None for one in document["parts"]} == {
        "check": True, "bandwidth": True, "train-resnet18": True, "isolate": False,
    }  # fmt: skip
    assert [one for one in document["parts"] if one.get("reason")] == []
    view = build(document)
    assert [one.unit for one in view.measurements][:2] == ["samples/s", "GB/s"]
    assert view.measurements[0].source == "floor of the user (--min-throughput)"
    assert len(view.curves) == 1
    assert view.versions["torch"]
    text = (real / "report.md").read_text()
    assert text.startswith(f"# {document['overall']}: Acceptance of ")
    assert "Signature: ____" in text


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks", by_file=True)
@pytest.mark.slow
def test_the_report_of_a_real_suite_in_a_browser(real: Path, tab: Page) -> None:
    tab.goto((real / "report.html").as_uri())
    assert "Acceptance of" in tab.inner_text("h1")
    for section in SECTIONS:
        assert tab.locator(f"#{section}").is_visible(), section
    assert tab.locator("#map g.v-pass, #map g.v-warn, #map g.v-fail").count() == 2
    assert tab.locator("figure.chart").count() == 1
    wide = tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert wide
    assert len(tab.pdf()) > 10_000  # printable
    assert tab.locator("script").count() == 0


def finding(verdict: str, reason: str, **more: Any) -> dict[str, Any]:
    named = {name: more.pop(name, None) for name in ("action", "device", "proof")}
    return {"verdict": verdict, "reason": reason, **named, "values": more}


def faulty() -> dict[str, Any]:
    """Two nodes with four ranks each, rank 5 slow; a bandwidth part without a baseline; one part that crashed."""
    times = {"p50": 0.1, "p95": 0.1, "p99": 0.1, "max": 0.1}
    ranks = [
        {"rank": rank, "node": rank // 4, "host": f"node-{rank // 4}<b>", "alone_s": {**times, "p50": own}}
        for rank, own in enumerate([0.1] * 5 + [0.13] + [0.1] * 2)
    ]  # fmt: skip
    training = {
        "overall": "FAIL", "nodes": 2, "ranks": ranks, "precision": "bf16", "world_size": 8, "device": "NVIDIA H100",
        "throughput_samples_per_second": 12_000.0, "options": {"min_throughput": None}, "recommendations": ["do this"],
        "baseline": {"samples_per_s": 14_000.0, "source": "quick reference", "judges": False},
        "versions": {"torch": "2.13", "nccl": "2.29"},
        "checks": [
            {"check": "accept_stragglers", "took_s": 0.0, "findings": [
                finding("fail", "130.0 ms a step", device="rank5", host="node-1<b>", action="look at clocks")]},
            {"check": "accept_throughput", "took_s": 0.0, "findings": [finding("error", "no baseline for this")]},
        ],
    }  # fmt: skip
    rows = [{"collective": "all_reduce", "size_bytes": 1 << n, "busbw_gbps": float(n)} for n in range(20, 31)]
    compared = [{"size_bytes": 1 << 30, "baseline_gbps": 442.0, "source": "published"}]
    bandwidth = {
        "overall": "PASS", "rows": rows, "results": [
            {"check": "collective_bandwidth", "took_s": 0.0, "findings": [finding(
                "pass", "all_reduce: fine", collective="all_reduce", compared=compared,
                busbw_gbps={str(1 << n): float(n) for n in range(20, 31)})]}],
    }  # fmt: skip
    plain = {
        "words": [],
        "env": {},
        "run": 2,
        "exit_code": 1,
        "reason": None,
        "took_s": 61.0,
        "started_at": "2026-01-01",
    }
    return {
        "v": 1, "suite": "full", "on": "ssh:hosts.yaml", "host": "head", "overall": "FAIL", "exit_code": 1,
        "started_at": "2026-01-01T00:00:00+00:00", "finished_at": "2026-01-01T01:00:00+00:00", "runs": ["a", "b"],
        "resumed": ["bandwidth"], "trainmaster": "0.1.0",
        "parts": [
            {**plain, "name": "bandwidth", "title": "Collectives", "kind": "bandwidth", "overall": "PASS",
             "document": bandwidth, "run": 1},
            {**plain, "name": "train", "title": "Training resnet50", "kind": "training", "overall": "FAIL",
             "document": training},
            {**plain, "name": "latency", "title": "Latency", "kind": "bandwidth", "overall": "INCOMPLETE",
             "document": None, "reason": "Traceback\nOutOfMemoryError: no", "exit_code": -9},
            {"name": "isolate", "title": "Isolation", "kind": "isolation", "words": [], "env": {}, "overall": None,
             "skipped": "nothing was slow", "run": 2},
        ],
    }  # fmt: skip


def test_checks_that_were_left_out_are_named() -> None:
    document = faulty()
    document["parts"][0]["words"] = ["check", "--only", "kernel", "--level", "1", "--only", "ram"]
    assert "Collectives: all but kernel, ram (--only)" in build(document).not_measured


def test_a_recommendation_names_its_training_unless_it_is_of_all() -> None:
    document = faulty()
    second = copy.deepcopy(document["parts"][1])
    second |= {"name": "train-2", "title": "Training resnet18"}
    second["document"]["recommendations"] = ["do this", "a larger batch"]
    document["parts"].append(second)
    assert build(document).recommendations == ["do this", "Training resnet18: a larger batch"]
    assert build(faulty()).recommendations == ["do this"]


def test_a_failed_suite_names_rank_node_and_gaps() -> None:
    view = build(faulty())
    assert view.sentence == (
        "2 of 4 parts were measured; not accepted: Training resnet50, Latency. First: node-1<b> rank5: 130.0 ms a step."
    )
    assert {node.name: [cell.verdict.value for cell in node.cells["train"]] for node in view.nodes} == {
        "node-0<b>": ["pass"] * 4, "node-1<b>": ["pass", "fail", "pass", "pass"],
    }  # fmt: skip
    assert [(one.measured, one.baseline, one.source) for one in view.measurements] == [
        (12_000.0, 14_000.0, "quick reference; shown, does not judge"), (30.0, 442.0, "published"),
    ]  # fmt: skip
    assert view.not_measured == [
        "Isolation: nothing was slow",
        "Latency: ended with -9 and no result: OutOfMemoryError: no",
        "Training resnet50, accept_throughput: no baseline for this",
    ]
    text = render_markdown(view)
    assert "Resumed: Collectives had finished before an interruption (2 runs)." in text
    assert text.splitlines()[0] == "# FAIL: Acceptance of ssh:hosts.yaml"


@pytest.mark.parametrize("name", ["a\u202egnp.exe", "x\x1b[31m", "n\x00l", "\udcff", "<script>alert(1)</script>"])
def test_names_of_nodes_do_not_act_on_the_reader(tmp_path: Path, name: str) -> None:
    document = faulty()
    document["on"], document["host"] = None, name
    for one in document["parts"][1]["document"]["ranks"]:
        one["host"] = name
    write_bundle(document, tmp_path)
    for file in ("report.html", "report.md"):
        assert name not in (tmp_path / file).read_text(encoding="utf-8")


def test_silent_nodes_and_findings_of_nodes_are_in_the_report() -> None:
    document = faulty()
    checked = {
        "overall": "INCOMPLETE", "silent": [{"node": "n9", "reason": "nothing listens", "action": "boot it"}],
        "nodes": [{"node": "n1", "results": [
            {"check": "gpu_ecc", "took_s": 0.0, "findings": [finding("fail", "3 errors", device="gpu2")]}]}],
        "cluster": [{"check": "drift", "took_s": 0.0, "findings": [finding("warn", "n1 has another driver")]}],
    }  # fmt: skip
    part = {**document["parts"][1], "name": "check", "title": "Checks", "kind": "check", "document": checked}
    view = build({**document, "parts": [part]})
    assert view.not_measured == ["Checks: n9 did not answer: nothing listens"]
    assert {(one.check, one.where) for one in view.problems} == {("gpu_ecc", "n1 gpu2"), ("drift", "")}


def test_a_part_without_a_verdict_is_not_measured_and_says_why_everywhere() -> None:
    document = faulty()
    isolation = {
        **document["parts"][2], "title": "Isolation", "kind": "isolation", "reason": "too few pairs",
        "document": {"verdict": "INCOMPLETE", "diagnosis": {"notes": ["too few pairs"]}},
    }  # fmt: skip
    parts = [document["parts"][0], document["parts"][2], isolation]
    view = build({**document, "overall": "INCOMPLETE", "parts": parts})
    unsure = "Latency (OutOfMemoryError: no), Isolation (too few pairs)"
    assert view.sentence.startswith(f"1 of 3 parts were measured; no verdict is possible on: {unsure}.")
    assert [row.note for row in view.parts] == ["", "OutOfMemoryError: no", "too few pairs"]
    assert "Isolation: too few pairs" in view.not_measured


@pytest.mark.proof
def test_the_report_of_a_failed_suite_in_a_browser(tmp_path: Path, tab: Page) -> None:
    (tmp_path / "report.html").write_text(render_html(build(faulty())))
    tab.goto((tmp_path / "report.html").as_uri())
    assert tab.inner_text("#verdict .word") == "FAIL"
    assert "Collectives had finished before an interruption" in tab.inner_text("#resumed")
    assert tab.locator("#map g.v-fail title").text_content() == "node-1<b>, train, rank 5: +30.0% against the median"
    assert "node-1<b>" in tab.inner_text("#problems")
    assert tab.locator("b:text-is('x')").count() == 0
    assert render_html(build(faulty())) == (tmp_path / "report.html").read_text()
