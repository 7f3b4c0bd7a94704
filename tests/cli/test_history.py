"""A GPU's failures follow it from node to node; a run that is recorded twice counts once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trainmaster.cli.main import build
from trainmaster.cluster.health import journal
from trainmaster.cluster.health.history import entries, offenders
from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
from trainmaster.core.results import CheckResult, Verdict, fail, ok

SERIAL = "1652922003456"


def run_on(name: str, day: int, *, bad: bool = True, **identity: Any) -> ClusterHealth:
    """A run in which GPU 3 of a node is bad (or not), and GPU 0 is fine."""
    identity = identity or {"serial": SERIAL, "uuid": "GPU-1"}
    ecc = fail("2 uncorrectable errors", action="replace it", device="gpu3") if bad else ok("none", device="gpu3")
    results = (
        CheckResult(check="gpu_count", findings=(ok("8 GPUs"), ok("H100", device="gpu3", **identity)), took_s=0.1),
        CheckResult(check="gpu_ecc", findings=(ok("none", device="gpu0", uuid="GPU-0"), ecc), took_s=0.1),
    )
    node = NodeHealth(node=name, level=1, planned=("gpu_count", "gpu_ecc"), results=results)
    return ClusterHealth(asked=(name,), nodes=(node,), started_at=f"2026-03-{day:02}T12:00:00+00:00")


def test_one_gpu_on_two_nodes_is_one_offender() -> None:
    recorded = [*entries(run_on("n1", 1)), *entries(run_on("n2", 2)), *entries(run_on("n2", 3, bad=False))]
    (offender,) = offenders(recorded)
    assert (offender.key, offender.failed, offender.runs, offender.nodes) == (f"serial:{SERIAL}", 2, 3, ("n1", "n2"))
    assert (offender.first[:10], offender.last[:10], offender.checks) == ("2026-03-01", "2026-03-02", ("gpu_ecc",))


@pytest.mark.parametrize(
    ("identity", "key"),
    [
        ({"serial": SERIAL, "uuid": "GPU-1"}, f"serial:{SERIAL}"),
        ({"serial": "N/A", "uuid": "GPU-1"}, "uuid:GPU-1"),
        ({"serial": "0000000000", "uuid": "GPU-1"}, "uuid:GPU-1"),
        ({"serial": None, "bus": "0000:3b:00.0"}, "bus:n1/0000:3b:00.0"),
        ({"model": "H100"}, "place:n1/gpu3"),
    ],
)
def test_who_a_gpu_is(identity: dict[str, Any], key: str) -> None:
    assert [entry.key for entry in entries(run_on("n1", 1, **identity)) if entry.device == "gpu3"] == [key]


def test_runs_of_different_zones_are_put_in_order() -> None:
    late, early = (dataclasses.replace(run_on(name, 1), started_at=at) for name, at in (
        ("n1", "2026-03-01T12:00:00-08:00"), ("n2", "2026-03-01T13:00:00+00:00")))  # fmt: skip
    (offender,) = offenders([*entries(late), *entries(early)])
    assert offender.nodes == ("n2", "n1")


def test_a_silent_node_is_remembered_and_did_not_fail() -> None:
    gone = Silent(node="n4", verdict=Verdict.ERROR, reason="no answer", action="look")
    (entry,) = entries(ClusterHealth(asked=("n4",), nodes=(), silent=(gone,)))
    assert (entry.key, entry.verdict) == ("node:n4", Verdict.ERROR)
    assert offenders([entry]) == []


def test_what_the_others_say_of_a_gpu_is_its_own() -> None:
    health = run_on("n1", 1, bad=False)
    slow = fail("20% below the median", action="take it out", device="n1", on="gpu3")
    peers = CheckResult(check="peers", findings=(slow,), took_s=0.0)
    recorded = entries(ClusterHealth(asked=("n1",), nodes=health.nodes, cluster=(peers,)))
    assert {entry.key for entry in recorded if entry.verdict is Verdict.FAIL} == {f"serial:{SERIAL}"}


def history(home: Path, *words: str) -> Any:
    result = CliRunner().invoke(build(), ["history", "--json", "--home", str(home), *words])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_verb_records_a_bundle_once(tmp_path: Path) -> None:
    for day in (1, 2):
        (tmp_path / f"run{day}").mkdir()
        (tmp_path / f"run{day}" / "health.json").write_text(run_on(f"n{day}", day).to_json())
    adding = [word for day in (1, 2, 1) for word in ("--add", str(tmp_path / f"run{day}"))]
    (offender,) = history(tmp_path / "home", "--repeat", *adding)
    assert (offender["key"], offender["failed"], offender["nodes"]) == (f"serial:{SERIAL}", 2, ["n1", "n2"])
    assert [row["node"] for row in history(tmp_path / "home", "--serial", SERIAL)] == ["n1", "n2"]
    assert history(tmp_path / "home", "--serial", "nobody") == []
    assert len((tmp_path / "home" / journal.HISTORY).read_text().splitlines()) == 6


def test_half_a_line_costs_itself_alone(tmp_path: Path) -> None:
    journal.record(tmp_path, run_on("n1", 1))
    with (tmp_path / journal.HISTORY).open("ab") as out:
        out.write(b'{"run": "ab')  # its writer died
    journal.record(tmp_path, run_on("n2", 2))
    assert [offender.nodes for offender in offenders(journal.history(tmp_path))] == [("n1", "n2")]
