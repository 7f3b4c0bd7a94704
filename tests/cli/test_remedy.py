"""Nodes are taken out by a plan, within a limit, never because nothing is known; and come back after a newer pass."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from slurm import Cluster
from trainmaster.cli.main import build
from trainmaster.cluster.health import evidence, journal
from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
from trainmaster.core.results import CheckResult, Finding, Verdict, error, fail, ok, skip, warn

FAILED = fail("2 uncorrectable errors", action="replace the GPU", device="gpu3")
PASSED = ok("no error", device="gpu3")
Bundle = Callable[..., Path]


def node(name: str, finding: Finding = PASSED, check: str = "gpu_ecc") -> NodeHealth:
    results = (CheckResult(check=check, findings=(finding,), took_s=0.1),)
    return NodeHealth(node=name, level=1, planned=(check,), results=results)


def silent(name: str) -> Silent:
    return Silent(node=name, verdict=Verdict.ERROR, reason="no answer in 60 s", action="look at its console")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    def write(*nodes: NodeHealth | Silent, cluster: tuple[CheckResult, ...] = (), after_s: float = 0.0) -> Path:
        health = ClusterHealth(
            asked=tuple(one.node for one in nodes),
            nodes=tuple(one for one in nodes if isinstance(one, NodeHealth)),
            silent=tuple(one for one in nodes if isinstance(one, Silent)),
            cluster=cluster,
            started_at=(datetime.now(UTC) + timedelta(seconds=after_s)).isoformat(),
        )
        path = tmp_path / f"bundle-{len(list(tmp_path.glob('bundle-*')))}"
        evidence.save(path, health)
        return path

    return write


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    def invoke(verb: str, bundle: Path, *words: str, scheduler: str = "slurm") -> Result:
        argv = [verb, str(bundle), "--with", scheduler, "--home", str(tmp_path / "home"), *words]
        return CliRunner().invoke(build(), argv)

    return invoke


def commands(result: Result) -> list[list[str]]:
    return [shlex.split(line) for line in result.stdout.splitlines()]


def said(result: Result) -> str:
    """What was told on standard error, however it was wrapped."""
    return " ".join(result.stderr.split())


# --- the plan ------------------------------------------------------------------------------------------------------


def test_the_plan_is_printed_and_nothing_is_done(bundle: Bundle, run: Callable[..., Result], tmp_path: Path) -> None:
    result = run("remedy", bundle(node("n1"), node("n2", FAILED)))
    assert result.exit_code == 0
    reason = "reason=trainmaster: gpu_ecc gpu3: 2 uncorrectable errors"
    assert commands(result) == [["scontrol", "update", "nodename=n2", "state=drain", reason]]
    assert "nothing was done" in said(result)
    assert not (tmp_path / "home").exists()


def test_kubernetes_speaks_kubectl(bundle: Bundle, run: Callable[..., Result]) -> None:
    result = run("remedy", bundle(node("n1"), node("n2", FAILED)), scheduler="kubernetes")
    assert result.stdout.splitlines() == [
        "kubectl annotate node n2 'trainmaster/reason=trainmaster: gpu_ecc gpu3: 2 uncorrectable errors' --overwrite",
        "kubectl cordon n2",
        "kubectl taint node n2 trainmaster/health=fail:NoSchedule --overwrite",
        "kubectl label node n2 trainmaster/health=fail --overwrite",
    ]


@pytest.mark.slow
def test_more_nodes_than_the_limit_and_none_is_touched(bundle: Bundle, run: Callable[..., Result]) -> None:
    bad = bundle(*(node(f"n{place}", FAILED if place < 3 else PASSED) for place in range(20)))
    result = run("remedy", bad, "--yes")  # a tenth of 20 is 2
    assert result.exit_code == 1
    assert "would drain 3 of 20 nodes; the limit is 2" in said(result)
    assert run("remedy", bad, "--max-nodes", "3").exit_code == 0
    assert run("remedy", bad, "--max-nodes", "0").exit_code == 1


def test_nodes_that_are_out_count_against_the_limit(bundle: Bundle, run: Callable[..., Result], tmp_path: Path) -> None:
    journal.append(tmp_path / "home" / journal.REMEDIES, [{"did": "drain", "node": "n9", "at": "x", "checks": []}])
    result = run("remedy", bundle(*(node(f"n{place}", FAILED if place == 1 else PASSED) for place in range(10))))
    assert result.exit_code == 1
    assert "beside 1 already drained" in said(result)


@pytest.mark.parametrize(
    "unknown",
    [
        silent("n2"),
        node("n2", error("nvidia-smi hung", action="reboot")),
        node("n2", skip("no GPU", proof="gpus=0")),
        NodeHealth(node="n2", level=1, planned=("gpu_ecc",), results=()),
    ],
    ids=["silent", "error", "all skipped", "did not report"],
)
def test_unknown_is_not_bad(bundle: Bundle, run: Callable[..., Result], unknown: NodeHealth | Silent) -> None:
    path = bundle(node("n1"), unknown)
    result = run("remedy", path)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "n2: its state is unknown, not bad" in said(result)
    assert "nodename=n2" in run("remedy", path, "--include-silent").stdout


def test_a_warning_takes_nobody_out(bundle: Bundle, run: Callable[..., Result]) -> None:
    result = run("remedy", bundle(node("n1", warn("hot", action="look at its fans"))))
    assert (result.exit_code, result.stdout) == (0, "")


def test_a_node_that_differs_from_the_rest_is_taken_out(bundle: Bundle, run: Callable[..., Result]) -> None:
    odd = CheckResult(check="drift", findings=(fail("driver 570", action="update it", device="n2"),), took_s=0.0)
    result = run("remedy", bundle(node("n1"), node("n2"), cluster=(odd,)))
    assert commands(result)[0][2:] == ["nodename=n2", "state=drain", "reason=trainmaster: drift: driver 570"]


def test_a_failure_of_all_together_drains_nobody_and_is_told(bundle: Bundle, run: Callable[..., Result]) -> None:
    slow = CheckResult(check="collective_bandwidth", findings=(fail("3.8 GB/s", action="isolate"),), took_s=0.0)
    result = run("remedy", bundle(node("n1"), node("n2"), cluster=(slow,)))
    assert result.stdout == ""
    assert "collective_bandwidth failed without naming a node; run `trainmaster isolate`" in said(result)


@pytest.mark.parametrize("name", ["ALL", "all", "n[1-9]", "n1,n2", "-a", "n1 n2", "n1;reboot", "$(reboot)", ""])
def test_a_name_that_means_more_than_one_node_goes_nowhere(
    bundle: Bundle, run: Callable[..., Result], name: str
) -> None:
    result = run("remedy", bundle(node(name, FAILED)), "--yes")
    assert result.stdout == ""
    assert "several nodes" in said(result)


def test_a_node_that_nobody_asked_for_is_left_alone(run: Callable[..., Result], tmp_path: Path) -> None:
    health = ClusterHealth(asked=("n1",), nodes=(node("n1"), node("db-server", FAILED)))
    (tmp_path / "health.json").write_text(health.to_json())
    result = run("remedy", tmp_path / "health.json", "--yes")
    assert result.stdout == ""
    assert "not in the plan" in said(result)


def test_a_reason_from_a_node_stays_one_argument_of_one_line(bundle: Bundle, run: Callable[..., Result]) -> None:
    hostile = fail("x\n\"'; reboot `id` $(id) \x1b[31m é" + "y" * 500, action="z")
    result = run("remedy", bundle(node("n1", hostile)))
    (command,) = commands(result)
    assert len(command) == 5
    assert command[4].startswith("reason=trainmaster: gpu_ecc: x ; reboot id")
    assert not set(command[4]) & set("\"'`$\\\n\x1b")
    assert len(command[4]) < 200


def test_a_damaged_bundle_is_said_to_be_so(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "health.json").write_text('{"asked": 3')
    result = run("remedy", tmp_path)
    assert result.exit_code != 0
    assert "is damaged" in str(result.exception)


def test_an_edited_bundle_drains_and_readmits_nobody(
    bundle: Bundle, run: Callable[..., Result], tmp_path: Path
) -> None:
    path = bundle(node("n1"), node("n2", FAILED))
    health = path / "health.json"
    plain = json.loads(health.read_text())
    plain["nodes"][1]["results"][0]["findings"][0]["verdict"] = "pass"
    health.write_text(json.dumps(plain))
    result = run("remedy", path, "--yes")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "not the one that the run wrote" in said(result)
    row = {"did": "drain", "node": "n2", "at": "2020-01-01T00:00:00+00:00", "checks": ["gpu_ecc"]}
    journal.append(tmp_path / "home" / journal.REMEDIES, [row])
    result = run("readmit", path, "--yes", scheduler="kubernetes")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "bundle names no node" in said(result)


# --- with a real Slurm ---------------------------------------------------------------------------------------------


def test_a_node_is_drained_and_comes_back_after_a_newer_pass(
    slurm: Cluster, bundle: Bundle, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    before = bundle(node("n1"), node("n2", FAILED), node("n3"), after_s=-60)
    result = run("remedy", before, "--yes")
    assert result.exit_code == 0, result.stderr
    assert slurm.node_state("n2") == "drained|trainmaster: gpu_ecc gpu3: 2 uncorrectable errors"
    assert {slurm.node_state(name).split("|")[0] for name in ("n1", "n3")} == {"idle"}

    again = run("remedy", before, "--yes")
    assert (again.exit_code, again.stdout) == (0, "")
    assert "already drained" in said(again)

    for stale, why in (
        (bundle(node("n2"), after_s=-60), "before the drain"),
        (bundle(node("n2", FAILED), after_s=60), "FAIL"),
        (bundle(silent("n2"), after_s=60), "not in this run"),
        (bundle(node("n1"), after_s=60), "not in this run"),
        (bundle(node("n2", error("hung", action="reboot")), after_s=60), "INCOMPLETE"),
        (bundle(node("n2", warn("hot", action="cool it")), after_s=60), "WARN"),
        (bundle(node("n2", ok("8 CPUs"), check="cpu"), after_s=60), "gpu_ecc drained it and was not measured again"),
    ):
        result = run("readmit", stale, "--yes")
        assert (result.exit_code, result.stdout) == (1, ""), why
        assert why in said(result)
    assert slurm.node_state("n2").startswith("drained|")

    retest = bundle(node("n2"), after_s=60)
    assert run("readmit", retest).stdout == "scontrol update nodename=n2 state=resume\n"
    assert slurm.node_state("n2").startswith("drained|")  # that was a dry run
    assert run("readmit", retest, "--yes").exit_code == 0
    assert slurm.node_state("n2").split("|")[0] == "idle"
    assert "nothing to do" in said(run("readmit", retest, "--yes"))


def test_what_somebody_else_drained_is_left_as_it_is(
    slurm: Cluster, bundle: Bundle, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    from trainmaster.cluster.remedy import drain, schedulers

    drain.run(
        schedulers.load("slurm"), ["scontrol", "update", "nodename=n3", "state=drain", "reason=disk swap, ask Kim"]
    )
    result = run("remedy", bundle(node("n3", FAILED)), "--yes")
    assert result.exit_code == 1
    assert "disk swap, ask Kim" in said(result)
    assert slurm.node_state("n3") == "drained|disk swap, ask Kim"
    drain.run(schedulers.load("slurm"), ["scontrol", "update", "nodename=n3", "state=resume"])


def test_a_node_that_slurm_does_not_know_is_told(
    slurm: Cluster, bundle: Bundle, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    result = run("remedy", bundle(node("nowhere", FAILED)), "--yes")
    assert result.exit_code == 1
    assert "not done" in said(result)
    assert not (tmp_path / "home" / journal.REMEDIES).exists()


def test_a_journal_says_what_was_done(
    slurm: Cluster, bundle: Bundle, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    run("remedy", bundle(node("n1", FAILED)), "--yes")
    run("readmit", bundle(node("n1"), after_s=60), "--yes")
    rows = [json.loads(line) for line in (tmp_path / "home" / journal.REMEDIES).read_text().splitlines()]
    assert [(row["did"], row["node"], row["through"]) for row in rows] == [
        ("drain", "n1", "slurm"),
        ("resume", "n1", "slurm"),
    ]
    assert rows[0]["checks"] == ["gpu_ecc"]
