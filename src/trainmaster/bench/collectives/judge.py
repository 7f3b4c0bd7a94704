"""Verdict on a run: all ranks present, data correct, transport proven, bandwidth sufficient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trainmaster.bench import limits, link_limits
from trainmaster.bench.collectives.gather import RunOutcome
from trainmaster.bench.collectives.result import PLANNED, Lost, Member, Row, Wrong
from trainmaster.bench.collectives.transport import Proof
from trainmaster.core.results import CheckResult, Finding, Verdict, error, fail, ok

_SHOWN = 8  # wrong ranks listed one by one


def judge(
    outcome: RunOutcome,
    *,
    world: int,
    nodes: int,
    proof: Proof,
    keys: Mapping[str, limits.Key],
    least_gbps: float | None,
) -> tuple[CheckResult, ...]:
    """Findings of the four checks of a run. A finding's device is the host."""
    rows, partial, members = outcome.rows, outcome.partial, outcome.members
    names = dict.fromkeys(row.collective for row in (*rows, *partial))
    findings = (
        _ranks(rows, outcome.lost, outcome.planned, world, nodes),
        _data(rows, partial, members, world),
        [proof.finding],
        _settle(_bandwidth(rows, names, keys, least_gbps), members, nodes)
        if world > 1
        else [error("one rank sends nothing to anybody", action="run with two ranks or more")],
    )
    return tuple(CheckResult.of(check, check_findings) for check, check_findings in zip(PLANNED, findings, strict=True))


def _ranks(rows: Sequence[Row], lost: Sequence[Lost], planned: int, world: int, nodes: int) -> list[Finding]:
    if lost:
        return [fail(item.reason, action=_to_do(item), device=item.host, state=item.state) for item in lost]
    if len(rows) < planned or not planned:
        return [error(f"{len(rows)} of {planned} points were finished by every rank", action="run it again")]
    where = f"on {nodes} nodes" if nodes > 1 else "on one node"
    return [ok(f"all {world} ranks {where} finished all {planned} points")]


def _to_do(lost: Lost) -> str:
    match lost.state:
        case "killed":
            return f"look for the cause in the kernel log of {lost.host} (OOM killer, Xid), then run again"
        case "failed":
            return "repair what it says, then run again"
        case "hung":
            return "run `trainmaster isolate` to find the node or link"
        case _:
            return f"run `trainmaster check --level 2` on {lost.host} alone"


def _data(rows: Sequence[Row], partial: Sequence[Row], members: Sequence[Member], world: int) -> list[Finding]:
    hosts = {member.rank: member.host for member in members}
    items = [(row, item) for row in (*rows, *partial) for item in row.wrong]
    first: dict[int, tuple[Row, Wrong]] = {}
    for row, item in items:
        first.setdefault(item.rank, (row, item))
    if first:
        findings = [
            fail(
                f"rank {rank} on {hosts.get(rank, 'an unknown host')} received wrong data in {row.collective} of "
                f"{limits.render_size(row.size_bytes)} {item.when}: element {item.index} is 0x{item.got:08x}, expected "
                f"0x{item.expected:08x}; {item.count:,} wrong there, {sum(w.rank == rank for _, w in items)} points",
                action="take the node out of use and run the silent-corruption test on each of its GPUs",
                device=hosts.get(rank), rank=rank, index=item.index, expected=item.expected, got=item.got,
            )
            for rank, (row, item) in sorted(first.items())[:_SHOWN]
        ]  # fmt: skip
        if len(first) > _SHOWN:
            findings.append(fail(f"and {len(first) - _SHOWN} more ranks", action="see --json for all of them"))
        return findings
    if not rows:
        return [error("no point was finished by every rank, so no data was verified", action="run it again")]
    return [ok(f"every element of {len(rows)} points was right on all {world} ranks, before and after timing")]


def _bandwidth(
    rows: Sequence[Row], names: Iterable[str], keys: Mapping[str, limits.Key], least_gbps: float | None
) -> list[Finding]:
    return [
        limits.judge(
            keys.get(name),
            {row.size_bytes: row.busbw_gbps for row in rows if row.collective == name},
            baselines=limits.load(),
            least_gbps=least_gbps,
            collective=name,
        )
        for name in names
    ]


def _settle(findings: list[Finding], members: Sequence[Member], nodes: int) -> list[Finding]:
    """A verdict for each collective without a baseline, by the class of its GPUs, as nccl-tests' curves have one."""
    devices = {member.device for member in members}
    if len(devices) == 1:
        (gpu,) = devices
        findings = [
            (finding.verdict is Verdict.SKIP and link_limits.by_class(finding, gpu, nodes=nodes)) or finding
            for finding in findings
        ]
    if all(finding.verdict is Verdict.SKIP for finding in findings):
        # Measured is not judged: a PASS would claim a comparison that was not made.
        words = "measured, not judged: there is no baseline for any of it" if findings else "nothing was measured"
        findings.append(
            error(words, action="state what you expect with --min-busbw GB/s, or compare with a run you trust")
        )
    return findings
