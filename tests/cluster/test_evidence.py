"""A run judged again from its evidence gives the same bytes; what changed between two runs is told by kind."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from machines import H200, Machine
from trainmaster.cli.main import build
from trainmaster.cluster.health import diff, evidence, journal
from trainmaster.core.errors import NotCaptured, UsageError
from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
from trainmaster.core.results import CheckResult, Finding, Overall, Verdict, error, fail, ok, skip, warn

ONLY = ["--only", "cpu,gpu_count,gpu_driver,gpu_memory,ram,shm"]


def invoke(*words: str) -> tuple[int, str]:
    ran = CliRunner().invoke(build(), list(words))
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return ran.exit_code, ran.stdout


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    assert invoke("check", "--replay", str(H200), "--out", str(tmp_path / "run"), *ONLY)[0] == 0
    return tmp_path / "run"


def test_rejudged_it_is_the_same_byte_for_byte(bundle: Path) -> None:
    code, text = invoke("rejudge", str(bundle), "--json")
    assert (code, text.encode()) == (0, (bundle / "verdict.json").read_bytes())
    assert (bundle / "nodes" / "h200" / "answers.json").exists()
    assert (bundle / "report.html").exists()


@pytest.mark.spawns
def test_every_check_of_this_machine_rejudges_to_the_same_bytes(tmp_path: Path) -> None:
    """Whatever a check finds here, it finds again in what was captured."""
    first, _ = invoke("check", "--out", str(tmp_path / "run"), "--json")
    again, text = invoke("rejudge", str(tmp_path / "run"), "--json")
    assert text.encode() == (tmp_path / "run" / "verdict.json").read_bytes()
    assert again == first


def test_the_verdict_holds_no_time_and_health_does(bundle: Path) -> None:
    health, verdict = (json.loads((bundle / name).read_text()) for name in ("health.json", "verdict.json"))
    assert health["started_at"]
    assert health["nodes"][0]["started_at"]
    assert verdict["started_at"] == verdict["nodes"][0]["started_at"] == ""
    assert {result["took_s"] for result in verdict["nodes"][0]["results"]} == {0.0}


@pytest.mark.slow
def test_another_expectation_gives_another_verdict(bundle: Path) -> None:
    assert invoke("rejudge", str(bundle), "--expect", "gpus=8")[0] == 1
    assert invoke("rejudge", str(bundle))[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("word", ["gemm_tflops=5000", "dcgm=true", "disk_read_mib_s=1", "busbw_gbps=100"])
def test_an_expectation_that_was_not_measured_is_no_pass(bundle: Path, word: str) -> None:
    code, text = invoke("rejudge", str(bundle), "--expect", word)
    assert code == 3
    assert word in text


def test_an_unmeasured_expectation_rejudges_to_the_same_bytes(tmp_path: Path) -> None:
    wanted = ["--expect", "gemm_tflops=5000", "--expect", "busbw_gbps=100"]
    run = tmp_path / "run"
    assert invoke("check", "--replay", str(H200), "--out", str(run), *wanted)[0] == 3
    code, text = invoke("rejudge", str(run), "--json")
    assert (code, text.encode()) == (3, (run / "verdict.json").read_bytes())
    assert "was not run at level 1" in text


def test_a_changed_capture_gives_another_verdict(bundle: Path) -> None:
    Machine(bundle / "nodes" / "h200").answer("disk", "/dev/shm", {"free_bytes": 9, "total_bytes": 9, "free_files": 9})
    assert invoke("rejudge", str(bundle), "--json")[1].encode() != (bundle / "verdict.json").read_bytes()


def test_a_node_whose_capture_is_gone_is_silent(bundle: Path) -> None:
    shutil.rmtree(bundle / "nodes" / "h200")
    health = evidence.rejudge(bundle)
    assert (health.overall, [node.node for node in health.silent]) == (Overall.INCOMPLETE, ["h200"])


def test_a_check_that_this_version_does_not_have_is_an_error(bundle: Path) -> None:
    health = json.loads((bundle / "health.json").read_text())
    health["nodes"][0]["planned"].append("flux_capacitor")
    (bundle / "health.json").write_text(json.dumps(health))
    assert evidence.rejudge(bundle).overall is Overall.INCOMPLETE


def change(bundle: Path, **fields: object) -> None:
    """Other fields of the only node in health.json."""
    health = json.loads((bundle / "health.json").read_text())
    health["nodes"][0].update(fields)
    (bundle / "health.json").write_text(json.dumps(health))


@pytest.mark.parametrize("keep", [1, 5])
def test_a_check_taken_off_the_list_is_judged_all_the_same(bundle: Path, keep: int) -> None:
    """The driver is gone, and the list names only checks that do not need it."""
    Machine(bundle / "nodes" / "h200").refuses("nvidia-smi -q -x", "CommandTimedOut", "no answer in 90 s")
    assert invoke("rejudge", str(bundle))[0] == 3
    node = json.loads((bundle / "health.json").read_text())["nodes"][0]
    change(bundle, planned=node["planned"][:keep], results=node["results"][:keep])
    code, text = invoke("rejudge", str(bundle), "--json")
    assert code == 3
    checks = {result["check"] for result in json.loads(text)["nodes"][0]["results"]}
    assert {"gpu_count", "gpu_memory"} <= checks


def test_a_changed_list_is_no_pass_where_a_run_is_only_loaded(bundle: Path) -> None:
    node = json.loads((bundle / "health.json").read_text())["nodes"][0]
    assert evidence.load(bundle).overall is Overall.PASS
    change(bundle, planned=node["planned"][:3], results=node["results"][:3])
    loaded = evidence.load(bundle)
    assert loaded.overall is Overall.INCOMPLETE
    (found,) = [result for result in loaded.cluster if result.check == evidence.BUNDLE]
    assert any("gpu_memory" in finding.reason for finding in found.findings)


def test_a_bundle_without_its_verdict_is_no_pass(bundle: Path) -> None:
    (bundle / "verdict.json").unlink()
    assert invoke("rejudge", str(bundle))[0] == 3
    assert evidence.load(bundle).overall is Overall.INCOMPLETE


def test_a_node_taken_off_the_list_is_no_pass(bundle: Path) -> None:
    shutil.copytree(bundle / "nodes" / "h200", bundle / "nodes" / "n2")
    code, text = invoke("rejudge", str(bundle), "--json")
    assert code == 3
    assert "a capture of n2" in text


def rewrite(bundle: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """The same edit in both files of the run, so that they agree."""
    for name in ("health.json", "verdict.json"):
        plain = json.loads((bundle / name).read_text())
        edit(plain)
        (bundle / name).write_text(json.dumps(plain))


def list_twice(plain: dict[str, Any]) -> None:
    plain["nodes"] = plain["nodes"] * 2


def list_and_ask_twice(plain: dict[str, Any]) -> None:
    plain["nodes"], plain["asked"] = plain["nodes"] * 2, plain["asked"] * 2


def ask_twice(plain: dict[str, Any]) -> None:
    plain["asked"] = plain["asked"] * 2


def share_a_capture(plain: dict[str, Any]) -> None:
    (node,) = plain["nodes"]
    plain["nodes"] = [{**node, "node": "h200"}, {**node, "node": ".h200"}]
    plain["asked"] = ["h200", ".h200"]


def ask_for_another(plain: dict[str, Any]) -> None:
    plain["asked"] = []


@pytest.mark.parametrize("edit", [list_twice, list_and_ask_twice, ask_twice, share_a_capture, ask_for_another])
def test_a_node_that_is_listed_twice_is_no_pass(bundle: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    rewrite(bundle, edit)
    again, loaded = evidence.rejudge(bundle), evidence.load(bundle)
    assert (again.overall, loaded.overall) == (Overall.INCOMPLETE, Overall.INCOMPLETE)
    (result,) = [result for result in again.cluster if result.check == evidence.BUNDLE]
    assert "times" in result.findings[0].reason or "was not asked" in result.findings[0].reason


def test_a_narrowed_run_says_what_it_left_out(bundle: Path) -> None:
    node = json.loads((bundle / "health.json").read_text())["nodes"][0]
    assert "gpu_ecc" in node["left_out"]
    assert not set(node["left_out"]) & set(node["planned"])


def test_a_capture_reads_nothing_outside_itself(bundle: Path) -> None:
    secret = bundle / "secret.out"
    secret.write_text("<nvidia_smi_log>")
    machine = Machine(bundle / "nodes" / "h200")
    machine.answer("run", "nvidia-smi -q -x", {"exit_code": 0, "took_s": 0, "text": "../../secret"})
    with pytest.raises(NotCaptured):
        machine.host.run("nvidia-smi", "-q", "-x")


@pytest.mark.parametrize("text", ["", "{}", "[]", "{", '{"asked": [], "nodes": 3}'])
def test_a_damaged_bundle_is_refused(bundle: Path, text: str) -> None:
    (bundle / "health.json").write_text(text)
    with pytest.raises(UsageError):
        invoke("rejudge", str(bundle))


def test_one_folder_holds_one_run(bundle: Path) -> None:
    with pytest.raises(UsageError, match="already holds"):
        invoke("check", "--replay", str(H200), "--out", str(bundle), *ONLY)


def run(**findings: Finding) -> ClusterHealth:
    results = tuple(CheckResult(check=name, findings=(finding,), took_s=0.0) for name, finding in findings.items())
    return ClusterHealth(
        asked=("n1",), nodes=(NodeHealth(node="n1", level=1, planned=tuple(findings), results=results),)
    )


def test_a_diff_tells_what_got_worse_better_new_gone_and_changed() -> None:
    before = run(
        a=ok("x"), b=fail("x", action="y"), c=ok("x"), e=ok("x"), f=ok("x", driver="570"), g=ok("x", celsius=3)
    )
    after = run(
        a=warn("z", action="y"),
        b=ok("x"),
        d=ok("x"),
        e=error("x", action="y"),
        f=ok("x", driver="580"),
        g=ok("x", celsius=4),
    )
    assert [(c.kind, c.check) for c in diff.compare(before, after)] == [
        ("worse", "e"), ("worse", "a"), ("new", "d"), ("gone", "c"), ("better", "b"), ("changed", "f"),
    ]  # fmt: skip
    assert diff.compare(before, before) == []


def test_to_be_measured_no_more_is_worse_and_silence_is_told() -> None:
    assert [c.kind for c in diff.compare(run(a=ok("x")), run(a=skip("x", proof="y")))] == ["worse"]
    gone = Silent(node="n1", verdict=Verdict.ERROR, reason="no route", action="look")
    changes = diff.compare(run(a=ok("x")), ClusterHealth(asked=("n1",), nodes=(), silent=(gone,)))
    assert [(c.kind, c.check) for c in changes] == [("new", "answer")], "one row, not one for each of its checks"


@pytest.mark.slow
def test_the_diff_is_printed_and_in_the_json(bundle: Path, tmp_path: Path) -> None:
    words = ["check", "--replay", str(H200), *ONLY, "--expect", "gpus=2", "--diff", str(bundle)]
    code, text = invoke(*words)
    assert code == 1
    assert "worse" in text
    document = json.loads(invoke(*words, "--json")[1])
    assert document["overall"] == "FAIL"
    assert {"worse"} <= {change["kind"] for change in document["diff"]}


def digest_by_hand(bundle: Path) -> str:
    line = (
        "find health.json verdict.json nodes collectives -type f 2>/dev/null | LC_ALL=C sort"
        " | xargs -d '\\n' sha256sum | sha256sum"
    )
    ran = subprocess.run(["sh", "-c", line], cwd=bundle, check=True, capture_output=True, text=True)
    return ran.stdout.split()[0]


def test_the_digest_is_that_of_sha256sum_and_is_printed_and_recorded(tmp_path: Path) -> None:
    run, home = tmp_path / "run", tmp_path / "home"
    words = ["--out", str(run), "--only", "kernel", "--home", str(home)]
    printed = CliRunner().invoke(build(), ["check", *words]).stderr
    digest = digest_by_hand(run)
    assert evidence.digest(run) == digest and f"sha256:{digest}" in printed
    assert {entry.bundle_sha256 for entry in journal.history(home)} == {digest}
    again = CliRunner().invoke(build(), ["rejudge", str(run), "--home", str(home)]).stderr
    assert f"sha256:{digest} (as recorded by the run of" in again
    elsewhere = CliRunner().invoke(build(), ["rejudge", str(run), "--home", str(tmp_path / "other")]).stderr
    assert f"sha256:{digest} (not in the history of this home)" in elsewhere


def test_a_bundle_that_was_edited_alike_in_every_file_has_another_digest(bundle: Path) -> None:
    """The capture, health.json and verdict.json agree with each other: only the digest shows the edit."""
    before = evidence.digest(bundle)
    capture = bundle / "nodes" / "h200" / "files" / "proc" / "meminfo"
    capture.write_text(capture.read_text().replace("MemTotal:       ", "MemTotal:       9"))
    evidence.save(bundle, evidence.rejudge(bundle))
    assert invoke("rejudge", str(bundle))[0] == 0
    code, text = invoke("rejudge", str(bundle), "--sha256", before)
    assert code == 3 and "its digest is not" in text
    assert invoke("rejudge", str(bundle), "--sha256", f"sha256:{evidence.digest(bundle)}")[0] == 0


def test_reports_do_not_change_the_digest_and_a_link_has_none(bundle: Path) -> None:
    before = evidence.digest(bundle)
    (bundle / "report.html").unlink()
    assert evidence.digest(bundle) == before
    (bundle / "nodes" / "extra").symlink_to("/etc/hostname")
    with pytest.raises(UsageError, match="is a link"):
        evidence.digest(bundle)


def test_bytes_that_are_no_text_and_deep_nesting_are_damage(bundle: Path) -> None:
    answers = bundle / "nodes" / "h200" / "answers.json"
    answers.write_text("[" * 100_000)
    assert invoke("rejudge", str(bundle))[0] == 3
    (bundle / "health.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(UsageError, match="is damaged"):
        evidence.rejudge(bundle)
