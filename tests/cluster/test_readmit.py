"""A drained node returns only if the retest measured again, on this node, what put it out, and found no fault."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from trainmaster.cluster.health import compare
from trainmaster.cluster.remedy.drain import read_checks
from trainmaster.cluster.remedy.remedy import EVERY, Out, readmit, select
from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.results import CheckResult, Finding, error, fail, ok, skip, warn

WENT = "2026-03-01T12:00:00+00:00"


def gpu_node(
    name: str, *, driver: str | None = "580", gbps: float | None = None, digest: str | None = None
) -> NodeHealth:
    found = [("gpu_count", ok("one", listed=1)), ("gpu_model", ok("fine", device="gpu0", model="H200"))]
    if driver is not None:
        found.append(("gpu_driver", ok("fine", driver=driver)))
    if gbps is not None:
        found.append(("hbm", ok("fine", device="gpu0", read_gbps=gbps)))
    if digest is not None:
        found.append(("corruption", ok("fine", device="gpu0", digest=digest)))
    results = tuple(CheckResult(check=check, findings=(finding,), took_s=0.0) for check, finding in found)
    return NodeHealth(node=name, level=2, planned=tuple(check for check, _ in found), results=results)


def run(*nodes: NodeHealth, between: tuple[CheckResult, ...] = ()) -> ClusterHealth:
    cluster = (*compare.compare(nodes), *between)
    return ClusterHealth(asked=tuple(node.node for node in nodes), nodes=nodes, cluster=cluster)


def retest(health: ClusterHealth, before: ClusterHealth, *, allow_warn: bool = False) -> tuple[tuple[str, ...], str]:
    """Nodes that return, and why the others stay, after `before` drained what it found."""
    drains = select(before, limit=99).drains
    assert [drain.node for drain in drains] == ["bad"], drains
    began = datetime.fromisoformat(WENT).astimezone(UTC) + timedelta(hours=1)
    health = replace(health, started_at=began.isoformat())
    out = [Out(node=drain.node, at=WENT, checks=drain.checks) for drain in drains]
    back, stay = readmit(health, out, allow_warn=allow_warn)
    return back, " ".join(why for _, why in stay)


GOOD = [gpu_node("n1"), gpu_node("n2"), gpu_node("n3")]
OTHER_DRIVER = run(*GOOD, gpu_node("bad", driver="570"))
SLOW = run(*(gpu_node(f"n{i}", gbps=4000.0) for i in range(4)), gpu_node("bad", gbps=400.0))
BITS = run(*(gpu_node(f"n{i}", digest="aa") for i in range(4)), gpu_node("bad", digest="ab"))


@pytest.mark.parametrize("allow_warn", [False, True])
@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        # Of two that differ no majority says which is right: the difference is still there.
        (OTHER_DRIVER, run(GOOD[0], gpu_node("bad", driver="570")), "driver differs"),
        (OTHER_DRIVER, run(GOOD[0], GOOD[1], gpu_node("bad", driver=None)), "not measured again"),
        (OTHER_DRIVER, run(*(gpu_node(n, driver=None) for n in ("n1", "bad"))), "not measured again"),
        (OTHER_DRIVER, run(gpu_node("bad", driver="570")), "not measured again"),
        (SLOW, run(gpu_node("n1", gbps=4000.0), gpu_node("bad", gbps=400.0)), "scatter"),
        (SLOW, run(gpu_node("n1", gbps=4000.0), gpu_node("n2", gbps=4000.0), gpu_node("bad")), "not measured again"),
        (BITS, run(gpu_node("n1", digest="aa"), gpu_node("bad", digest="ab")), "different bits"),
        (BITS, run(*(gpu_node(f"n{i}", digest="aa") for i in range(3)), gpu_node("bad")), "not measured again"),
    ],
    ids=["same driver, two nodes", "no driver told", "no driver asked", "alone", "slow, two nodes", "not timed",
         "other bits, two nodes", "no digest"],
)  # fmt: skip
def test_a_node_stays_out(before: ClusterHealth, after: ClusterHealth, why: str, allow_warn: bool) -> None:
    back, stay = retest(after, before, allow_warn=allow_warn)
    assert back == ()
    assert why in stay


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (OTHER_DRIVER, run(*GOOD, gpu_node("bad"))),
        (OTHER_DRIVER, run(GOOD[0], gpu_node("bad"))),
        (SLOW, run(gpu_node("n1", gbps=4000.0), gpu_node("bad", gbps=3990.0))),
        (BITS, run(gpu_node("n1", digest="aa"), gpu_node("bad", digest="aa"))),
    ],
    ids=["driver", "driver, two nodes", "speed", "bits"],
)
def test_a_repaired_node_returns(before: ClusterHealth, after: ClusterHealth) -> None:
    assert retest(after, before) == (("bad",), "")


def collectives(*findings: Finding) -> CheckResult:
    return CheckResult(check="collectives", findings=findings, took_s=0.0)


CUT = run(*GOOD, gpu_node("bad"), between=(collectives(fail("rank 3 hung", action="look", device="bad")),))


@pytest.mark.parametrize(
    ("findings", "why"),
    [
        ([ok("all ranks", nodes=["n1", "n2"]), skip("left out", proof="x", device="bad")], "not measured again"),
        ([ok("all ranks", nodes=["n1", "n2"])], "not measured again"),
        ([fail("3 GB/s", action="isolate"), ok("all ranks", nodes=["n1", "bad"])], "3 GB/s"),
        ([error("rank 0 gave no report", action="again"), ok("x", nodes=["n1", "bad"])], "no report"),
        ([warn("slow", action="isolate"), ok("x", nodes=["n1", "bad"])], "slow"),
    ],
)
def test_collectives_must_have_included_the_node(findings: list[Finding], why: str) -> None:
    back, stay = retest(run(*GOOD, gpu_node("bad"), between=(collectives(*findings),)), CUT)
    assert back == ()
    assert why in stay


def test_collectives_that_included_it_count() -> None:
    found = collectives(ok("all ranks", nodes=["n1", "bad"]), ok("fast"))
    assert retest(run(*GOOD, gpu_node("bad"), between=(found,)), CUT) == (("bad",), "")


def test_a_run_that_is_not_whole_readmits_nobody() -> None:
    torn = CheckResult(check="bundle", findings=(error("health.json was changed", action="again"),), took_s=0.0)
    back, stay = retest(run(*GOOD, gpu_node("bad"), between=(torn,)), OTHER_DRIVER)
    assert back == ()
    assert "was changed" in stay


@pytest.mark.parametrize(
    ("reason", "checks"),
    [
        ("trainmaster: gpu_ecc gpu3: 2 errors (since 2026-03-01T12:00:00+00:00)", ("gpu_ecc",)),
        ("trainmaster: gpu_ecc: 2 errors; gpu_nvlink: 3 links; pid: 4", ("gpu_ecc", "gpu_nvlink")),
        ("trainmaster: gpu_ecc: 2 errors (and 2 more)", ("gpu_ecc", EVERY)),
        ("trainmaster: gpu_ecc: " + "x" * 170 + " (since 2026-03-01T12:00:00+00:00)", ("gpu_ecc", EVERY)),
        ("trainmaster: drift: driver 570", ("drift",)),
        ("trainmaster: sick", (EVERY,)),
    ],
)
def test_a_reason_names_all_checks_or_asks_for_every_one(reason: str, checks: tuple[str, ...]) -> None:
    assert read_checks(reason) == checks


def test_a_narrowed_retest_is_not_every_check() -> None:
    out = [Out(node="n1", at=WENT, checks=(EVERY,))]
    health = replace(run(*GOOD), started_at="2026-03-01T13:00:00+00:00")
    assert readmit(health, out)[0] == ("n1",)
    narrowed = replace(health, nodes=(replace(GOOD[0], left_out=("xid",)), *GOOD[1:]))
    assert readmit(narrowed, out)[0] == ()
