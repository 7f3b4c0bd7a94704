"""The pre-flight decides whether ranks may start: real checks, on a machine that is as expected and one that is not."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from trainmaster import checks
from trainmaster.core.results import Overall
from trainmaster.core.states import Reason

UP = 'touch "$(dirname $TRAINMASTER_STOP)/up"'
OTHERS = [name for name in checks.plan(1) if name != "cpu"]


def started(node: Any) -> bool:
    return bool((node.folder / "up").exists())


def test_what_holds_lets_the_ranks_start(node: Any) -> None:
    plan = node.shell(UP, preflight={"level": 1, "skip": OTHERS, "expect": {"cpus": 1}})
    assert node.run(plan) == (0, "")
    assert started(node)
    found = [event for event in node.events() if event["phase"] == "PREFLIGHT"]
    assert [event["event"] for event in found] == ["start", "check", "end"]
    assert found[0]["data"] == {"planned": ["cpu"]}
    assert set(found[1]["data"]) == {"check", "verdict", "took_s", "findings"}
    assert set(found[1]["data"]["findings"][0]) == {"verdict", "reason", "action", "device", "values", "proof"}
    assert found[2]["data"]["overall"] in (Overall.PASS, Overall.WARN)


def test_what_fails_keeps_them_from_starting(node: Any) -> None:
    plan = node.shell(UP, preflight={"level": 1, "expect": {"cpus": 100_000}, "allow_incomplete": True})
    code, said = node.run(plan)
    assert code == 1
    assert "cpu" in said
    record = node.record()
    assert record.reason is Reason.CHECK_FAILED
    assert record.evidence["overall"] == "FAIL"
    assert [item["verdict"] for item in record.evidence["findings"] if item["check"] == "cpu"] == ["fail"]
    checked = [event["data"]["check"] for event in node.events() if event["event"] == "check"]
    assert checked == checks.plan(1)
    assert not started(node)


@pytest.mark.matrix(one_in=2, of="checks before ranks start")
@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="here a GPU could be measured")
@pytest.mark.parametrize("allowed", [False, True])
def test_what_was_not_measured_is_no_pass_unless_allowed(node: Any, allowed: bool) -> None:
    others = [name for name in checks.plan(1) if name != "gpu_count"]  # which has nothing to count here
    code, _ = node.run(node.shell(UP, preflight={"level": 1, "skip": others, "allow_incomplete": allowed}))
    assert code == (0 if allowed else 1)
    assert next(event["data"] for event in node.events() if event["event"] == "end") == {"overall": "INCOMPLETE"}
    assert node.record().reason is (None if allowed else Reason.CHECK_INCOMPLETE)
    assert started(node) is allowed


@pytest.mark.matrix(one_in=2, of="checks before ranks start")
@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="here is a GPU")
def test_a_profile_of_a_gpu_keeps_a_machine_without_one_from_starting(node: Any) -> None:
    others = [name for name in checks.plan(1) if name not in ("gpu_count", "gpu_model")]
    code, _ = node.run(node.shell(UP, preflight={"level": 1, "skip": others, "profile": "H200"}))
    assert code == 1
    assert node.record().reason is Reason.CHECK_FAILED
    assert "gpu_model=H200" in node.record().message
    assert not started(node)


@pytest.mark.matrix(one_in=2, of="checks before ranks start")
def test_a_check_that_does_not_exist_keeps_them_from_starting(node: Any) -> None:
    node.run(node.shell(UP, preflight={"level": 1, "skip": ["gpu_cuont"]}))
    assert node.record().reason is Reason.CHECK_INCOMPLETE
    assert "did you mean gpu_count" in node.record().message
    assert not started(node)


@pytest.mark.matrix(one_in=2, of="checks before ranks start")
def test_a_profile_says_what_the_node_should_be(node: Any) -> None:
    others = [name for name in checks.plan(1) if name != "gpu_count"]
    preflight = {"level": 1, "skip": others, "profile": "ml.p5.48xlarge", "expect": {"gpus": 4096}}
    node.run(node.shell(UP, preflight=preflight))
    assert node.record().reason is Reason.CHECK_FAILED
    assert "of 4096 GPUs" in node.record().message, "what the spec states lies over the profile"
    assert not started(node)


@pytest.mark.matrix(one_in=2, of="checks before ranks start")
def test_a_profile_that_does_not_exist_keeps_them_from_starting(node: Any) -> None:
    node.run(node.shell(UP, preflight={"level": 1, "profile": "ml.p5.48xlrage"}))
    assert node.record().reason is Reason.CHECK_INCOMPLETE
    assert "ml.p5.48xlarge" in node.record().message
    assert not started(node)


@pytest.mark.matrix(one_in=2, of="checks before ranks start")
def test_the_disk_of_the_checkpoints_is_what_is_measured(node: Any) -> None:
    others = [name for name in checks.plan(1) if name != "disk_space"]
    node.run(node.shell(UP, preflight={"level": 1, "skip": others}))
    (check,) = [event["data"] for event in node.events() if event["event"] == "check"]
    assert check["findings"][0]["values"]["path"] == str(node.checkpoints)


def test_a_check_that_hangs_does_not_hold_up_a_stop(node: Any, tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "chronyc"  # which the clock check asks first
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/asked\nexec sleep 60\n")
    tool.chmod(0o755)
    node.env["PATH"] = f"{tool.parent}:{node.env['PATH']}"
    agent = node.start(node.shell(UP, preflight={"level": 1}))
    pid = int(node.until(lambda: (tmp_path / "asked").exists() and (tmp_path / "asked").read_text(), what="chronyc"))
    agent.send_signal(signal.SIGTERM)
    assert agent.wait() == 1
    assert node.record().reason is Reason.PREEMPTED
    assert "during the pre-flight" in node.record().message
    assert "PREFLIGHT end" not in node.names()
    assert not node.alive(pid)
    assert not started(node)


def test_level_0_says_nothing_about_the_machine(node: Any) -> None:
    node.run(node.shell(UP))
    assert started(node)
    assert not [name for name in node.names() if name.startswith("PREFLIGHT")]
