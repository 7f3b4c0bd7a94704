"""A check that was not measured again keeps its last verdict, on pages of nodes and in `trainmaster nodes` alike."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pages import samples
from trainmaster.cli.main import build
from trainmaster.cluster.health import history, journal
from trainmaster.core.events import Event
from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.results import CheckResult, Finding, Verdict, error, fail, ok, skip
from trainmaster.core.states import Stage
from trainmaster.pages import machines, node_history, node_map
from trainmaster.store.capacity import machines as store
from trainmaster.store.database import Database
from trainmaster.store.migrate import open_database

HOUR = timedelta(hours=1)


def check(home: Path, hours: int, *results: tuple[str, Finding], cluster: tuple[CheckResult, ...] = ()) -> None:
    """A check by the operator of gpu-02."""
    node = NodeHealth(
        node="gpu-02", level=1, planned=tuple(name for name, _ in results),
        results=tuple(CheckResult(check=name, findings=(finding,), took_s=0.1) for name, finding in results),
    )  # fmt: skip
    at = (samples.T0 + hours * HOUR).isoformat()
    assert journal.record(home, ClusterHealth(asked=("gpu-02",), nodes=(node,), cluster=cluster, started_at=at))


def preflight(db: Database, hours: int, **verdicts: str) -> samples.Story:
    """A job on gpu-02 with this pre-flight, which runs."""
    story = samples.Story(db, samples.spec(name="long1", target="ssh:/h2.yaml"), at=samples.T0 + hours * HOUR).start()
    events = [Event(phase="PROJECT", event="start", data={"attempt": story.attempt, "host": "gpu-02", "version": "0"})]
    events += [Event(phase="PREFLIGHT", event="start", data={"planned": list(verdicts)})]
    for name, verdict in verdicts.items():
        findings = [{"verdict": verdict, "reason": f"it {verdict}s", "values": {}}]
        data = {"check": name, "verdict": verdict, "took_s": 0.1, "findings": findings}
        events.append(Event(phase="PREFLIGHT", event="check", data=data))
    story.tell(events)
    return story.move(Stage.RUNNING)


def verdicts(db: Database, home: Path) -> set[Verdict | None]:
    """What the map, the page of the node and the list of machines say."""
    (mapped,), (listed,) = node_map.read(db, home=home).nodes, machines.read(db, home=home).machines
    return {mapped.verdict, listed.verdict, node_history.read(db, node="gpu-02", home=home).verdict}


BAD = fail("0 of 8 GPUs", action="look at the bus")


@pytest.mark.both_databases
def test_a_failed_check_of_the_operator_stands_until_it_is_measured_again(any_db: Database, tmp_path: Path) -> None:
    db = any_db
    check(tmp_path, 0, ("gpu_count", BAD), ("disk", ok("fine")))
    preflight(db, 1, disk="pass", gpu_count="skip")
    assert verdicts(db, tmp_path) == {Verdict.FAIL}
    (mapped,) = node_map.read(db, home=tmp_path, state="bad").nodes
    assert mapped.standing.startswith("gpu_count: 0 of 8 GPUs (") and mapped.standing.endswith("not measured since)")
    preflight(db, 2, disk="pass", gpu_count="error")
    check(tmp_path, 3, ("disk", ok("fine")), ("gpu_count", error("nvidia-smi hangs", action="reboot it")))
    assert verdicts(db, tmp_path) == {Verdict.FAIL}, "not measured is never a pass"
    preflight(db, 4, disk="pass", gpu_count="pass")
    assert verdicts(db, tmp_path) == {Verdict.PASS}


def test_a_failed_pre_flight_stands_until_the_operator_measures_it(db: Database, tmp_path: Path) -> None:
    preflight(db, 0, gpu_count="fail", disk="pass")
    preflight(db, 1, disk="pass")
    assert verdicts(db, tmp_path) == {Verdict.FAIL}
    check(tmp_path, 2, ("disk", ok("fine")), ("gpu_count", skip("no GPU is expected", proof="expect: {}")))
    assert verdicts(db, tmp_path) == {Verdict.FAIL}
    check(tmp_path, 3, ("gpu_count", ok("8 GPUs")))
    assert verdicts(db, tmp_path) == {Verdict.PASS}
    preflight(db, 4, gpu_count="fail")
    assert verdicts(db, tmp_path) == {Verdict.FAIL}


def test_a_comparison_that_blames_another_node_clears_this_one(db: Database, tmp_path: Path) -> None:
    def drift(*findings: Finding) -> tuple[CheckResult, ...]:
        return (CheckResult(check="drift", findings=findings, took_s=0.0),)

    fine = ("disk", ok("fine"))
    check(tmp_path, 0, fine, cluster=drift(fail("another driver", action="install it", device="gpu-02")))
    check(tmp_path, 1, fine, cluster=drift(skip("there is nothing to compare", proof="1 node answered")))
    assert verdicts(db, tmp_path) == {Verdict.FAIL}
    check(tmp_path, 2, fine, cluster=drift(fail("another driver", action="install it", device="gpu-09")))
    assert verdicts(db, tmp_path) == {Verdict.PASS}


def test_a_run_of_before_counts_as_a_whole() -> None:
    def entry(day: int, verdict: Verdict, *checks: str) -> history.Entry:
        at, run = f"2026-03-{day:02}T00:00:00+00:00", str(day)
        return history.Entry(run=run, at=at, key="node:n", node="n", device=None, verdict=verdict, checks=checks)

    runs = [entry(1, Verdict.FAIL, "disk"), entry(2, Verdict.ERROR, "answer")]
    assert history.list_measured(runs)["n"]["disk"].verdict is Verdict.FAIL
    assert history.list_measured([*runs, entry(3, Verdict.PASS)])["n"]["disk"].verdict is Verdict.PASS


def test_the_list_says_target_job_since_and_drained(tmp_path: Path) -> None:
    home = tmp_path / "home"
    words = ["nodes", "--home", str(home)]
    assert CliRunner().invoke(build(guarded=True), words).exit_code == 0
    db = open_database(home / "trainmaster.db")
    story = preflight(db, 0, disk="pass")
    (line,) = machines.read(db, home=home).machines
    assert (line.target, [use.job_id for use in line.used_by]) == ("ssh:/h2.yaml", [story.id])
    shown = CliRunner().invoke(build(guarded=True), words, env={"COLUMNS": "200"}).stdout.splitlines()[-1]
    assert shown.split()[:3] == ["ssh:/h2.yaml", "gpu-02", "pass"] and f"{story.id[:8]} long1" in shown, shown
    with db.write() as conn:
        store.drain(conn, "ssh:/h2.yaml", "gpu-02", reason="a fan", by="eve", at=samples.T0)
    shown = CliRunner().invoke(build(guarded=True), words, env={"COLUMNS": "200"}).stdout.splitlines()[-1]
    assert shown.split()[:3] == ["ssh:/h2.yaml", "gpu-02", "drained"] and f"{story.id[:8]} long1" in shown, shown
