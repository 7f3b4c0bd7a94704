"""History of every GPU: its verdict in each run, on whichever node. Pure; cluster/health/journal.py keeps the file.

A GPU is identified by its serial number, else its UUID, else its node and bus address. A GPU moved to another node
keeps its history, so a repeat offender shows however often it was moved.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.results import WEIGHT, Finding, Verdict

_GPU = re.compile(r"gpu\d+")
_SHOWN = 300  # characters kept of a reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One GPU, or the rest of one node, in one run."""

    run: str  # hash of the run, so that a run recorded twice counts once
    at: str  # when the run began, ISO, in UTC
    key: str  # serial:1652922…, uuid:GPU-…, bus:NODE/0000:3b:00.0, place:NODE/gpu3, node:NODE
    node: str
    device: str | None
    verdict: Verdict
    checks: tuple[str, ...] = ()  # checks with this verdict, if it is bad
    reason: str = ""  # of the first such check
    bundle_sha256: str = ""  # digest of the evidence bundle; empty: the run wrote none
    # Checks that the whole node passed, in its first entry of a run; null: written before this was kept.
    passed: tuple[str, ...] | None = None
    target: str = ""  # through which the node was checked; empty: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The newest measurement of one check on one node."""

    check: str
    verdict: Verdict  # pass, warn, fail: what could not be run or does not apply was not measured
    at: datetime
    reason: str = ""
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offender:
    """One GPU or node over all its runs, with its failures."""

    key: str
    runs: int
    failed: int  # runs in which it failed
    nodes: tuple[str, ...]  # nodes in which it failed, in order of time
    checks: tuple[str, ...]
    first: str
    last: str
    reason: str  # the newest


def entries(health: ClusterHealth) -> list[Entry]:
    """Entries of a run: one per GPU, one per node for the rest, one per silent node."""
    at = _utc(health.started_at)
    run = hashlib.sha256(health.to_json().encode("utf-8", errors="replace")).hexdigest()[:16]
    listed = []
    for node in health.nodes:
        between = [
            (result.check, finding)
            for result in health.cluster
            for finding in result.findings
            if finding.device == node.node
        ]
        listed += list_node(node, between=between, agrees=_list_agreeing(node.node, health), run=run, at=at)
    for silent in health.silent:
        listed.append(
            Entry(
                run=run,
                at=at,
                key=f"node:{silent.node}",
                node=silent.node,
                device=None,
                verdict=Verdict.ERROR,
                checks=("answer",),
                reason=silent.reason[:_SHOWN],
            )
        )
    return listed


def list_node(
    node: NodeHealth,
    *,
    between: Sequence[tuple[str, Finding]] = (),
    agrees: Sequence[str] = (),
    run: str = "",
    at: str = "",
) -> list[Entry]:
    """Entries of one node. `between`: findings about it of comparisons between nodes, each with the check's name;
    `agrees`: comparisons that found nothing about it."""
    listed: list[Entry] = []
    passed = tuple(result.check for result in node.results if result.verdict is Verdict.PASS)
    for key, device, findings in _things(node, between):
        verdict = max((finding.verdict for _, finding in findings), key=WEIGHT.__getitem__)
        bad = [item for item in findings if item[1].verdict is verdict and WEIGHT[verdict] > WEIGHT[Verdict.PASS]]
        listed.append(
            Entry(
                run=run,
                at=at,
                key=key,
                node=node.node,
                device=device,
                verdict=verdict,
                checks=tuple(dict.fromkeys(check for check, _ in bad)),
                reason=bad[0][1].reason[:_SHOWN] if bad else "",
                passed=() if listed else (*passed, *agrees),
            )
        )
    return listed


def list_measured(history: Iterable[Entry]) -> dict[str, dict[str, Measured]]:
    """By node and check its newest measurement. A run that did not measure a check again leaves what was known."""
    runs: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in history:
        runs.setdefault((entry.at, entry.run, entry.node), []).append(entry)
    newest: dict[str, dict[str, Measured]] = {}
    for (at, _, node), some in sorted(runs.items()):
        known = newest.setdefault(node, {})
        if (when := _moment(at)) is None:
            continue
        passed = [check for entry in some for check in entry.passed or ()]
        if all(entry.passed is None and entry.verdict is not Verdict.ERROR for entry in some):
            passed = list(known)  # of before: it names no check that passed, and counted as a whole
        known |= {check: Measured(check=check, verdict=Verdict.PASS, at=when) for check in passed}
        for entry in sorted(some, key=lambda entry: WEIGHT[entry.verdict]):
            if entry.verdict in (Verdict.WARN, Verdict.FAIL):
                known |= {
                    check: Measured(
                        check=check, verdict=entry.verdict, at=when, reason=entry.reason, device=entry.device
                    )
                    for check in entry.checks
                }
    return newest


def offenders(history: Iterable[Entry], *, least: int = 1) -> list[Offender]:
    """GPUs and nodes that failed in at least `least` runs, most failures first. `error` is unknown, not a failure."""
    once = {(entry.run, entry.key): entry for entry in history}
    by_key: dict[str, list[Entry]] = {}
    for entry in sorted(once.values(), key=lambda entry: entry.at):
        by_key.setdefault(entry.key, []).append(entry)
    repeated = []
    for key, all_of in by_key.items():
        failed = [entry for entry in all_of if entry.verdict is Verdict.FAIL]
        if len(failed) < max(1, least):
            continue
        repeated.append(
            Offender(
                key=key,
                runs=len(all_of),
                failed=len(failed),
                nodes=tuple(dict.fromkeys(entry.node for entry in failed)),
                checks=tuple(dict.fromkeys(check for entry in failed for check in entry.checks)),
                first=failed[0].at,
                last=failed[-1].at,
                reason=failed[-1].reason,
            )
        )
    return sorted(repeated, key=lambda offender: (-offender.failed, -len(offender.nodes), offender.key))


def _list_agreeing(node: str, health: ClusterHealth) -> list[str]:
    """Comparisons that were made and found nothing about a node: what they found is of others, by name."""
    return [
        result.check
        for result in health.cluster
        if result.findings
        and all(
            finding.verdict is Verdict.PASS if finding.device is None else finding.device != node
            for finding in result.findings
        )
    ]


def _moment(text: str) -> datetime | None:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return None
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)


def _utc(text: str) -> str:
    """The time in UTC, so that text order is time order."""
    try:
        when = datetime.fromisoformat(text)
        return when.astimezone(UTC).isoformat() if when.tzinfo is not None else text
    except (ValueError, OverflowError):
        return text


def _things(
    node: NodeHealth, between: Sequence[tuple[str, Finding]]
) -> list[tuple[str, str | None, list[tuple[str, Finding]]]]:
    """Findings by GPU, and the node's remaining findings."""
    groups: dict[str | None, list[tuple[str, Finding]]] = {None: []}
    for result in node.results:
        for finding in result.findings:
            device = finding.device if finding.device and _GPU.fullmatch(finding.device) else None
            groups.setdefault(device, []).append((result.check, finding))
    for check, finding in between:
        on = finding.values.get("on")
        groups.setdefault(on if isinstance(on, str) and on in groups else None, []).append((check, finding))
    return [
        (_key(node.node, device, findings) if device else f"node:{node.node}", device, findings)
        for device, findings in groups.items()
        if findings
    ]


def _key(node: str, device: str, findings: Sequence[tuple[str, Finding]]) -> str:
    values: dict[str, Any] = {}
    for _, finding in findings:
        for name in ("serial", "uuid", "bus"):
            if name not in values and identifies(name, finding.values):
                values[name] = str(finding.values[name])
    if "serial" in values:
        return f"serial:{values['serial']}"
    if "uuid" in values:
        return f"uuid:{values['uuid']}"
    return f"bus:{node}/{values['bus']}" if "bus" in values else f"place:{node}/{device}"


def identifies(name: str, values: Mapping[str, Any]) -> bool:
    """Whether the value identifies a GPU. Virtual machines see N/A or zeros as serial number."""
    value = values.get(name)
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        return False
    return (
        re.fullmatch(r"[A-Za-z0-9:._-]{4,64}", str(value)) is not None
        and re.search(r"[1-9a-fA-F]", str(value)) is not None
    )
