"""Verdict on collectives without a published baseline: a site's own figures, peers, or the limit of the link.

A baseline is the best judge, and most machines have none. Then the order is: figures that the site states; the median
of equal nodes; the physical bandwidth of the slowest link, of which a healthy machine reaches a known share. Where none
of these is known the measurement is a warning: it was measured, and nothing to compare it with exists.
"""

from __future__ import annotations

import functools
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

from trainmaster.bench.limits import FAIL_BELOW, WARN_BELOW, parse_size, render_size
from trainmaster.core.errors import UsageError
from trainmaster.core.gpus import find_gpu
from trainmaster.core.results import Finding, Verdict, fail, ok, warn

Kind = Literal["network", "nvlink", "pcie"]
# Shares of the link's bandwidth: (fails below, warns below). Ring all_reduce reaches 0.8 to 1.2 of the network (2×p4de:
# 78 of 50 GB/s, 4×p5en: 365 of 400), 0.8 of NVLink (8×A100: 235 of 300), and without peer access a tenth to a third of
# PCIe, because each byte passes host memory twice.
_SHARES: Mapping[Kind, tuple[float, float]] = {"network": (0.25, 0.5), "nvlink": (0.25, 0.5), "pcie": (0.05, 0.15)}
_LATENCY_BOUND = 16 << 20  # bytes: smaller messages show latency, not bandwidth
_LEAST_PEERS = 3
_PEER_SHARES = (0.8, 0.9)
_PCIE_GBPS = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}  # one lane, one direction
_FEWEST_LANES = 8  # of a server's slot; for models whose width no source states
_UNJUDGED = "measured, not judged"
_ISOLATE = "run `trainmaster isolate` to find the node or link that is slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The slowest link of a run: GB/s in one direction, and its source."""

    kind: Kind
    gbps: float
    words: str


def find_link(*, instance: str | None, nodes: int, gpu: str | None = None) -> Link | None:
    """The limiting link of a run on these instances; None where it is not known."""
    if nodes > 1:
        gbit = _network().get((instance or "").strip().lower().removeprefix("ml."))
        if gbit is None:
            return None
        return Link(kind="network", gbps=gbit / 8, words=f"the {gbit:g} Gb/s network of {instance}")
    model = find_gpu(gpu) if gpu else None
    if model is None:
        return None
    if model.nvlinks:
        # NVLink 2 to 4 have 25 GB/s a link and direction, NVLink 5 has 50.
        each = 50.0 if model.name.startswith(("B", "GB")) else 25.0
        return Link(kind="nvlink", gbps=model.nvlinks * each, words=f"{model.nvlinks} NVLinks of {model.name}")
    if model.pcie_gen in _PCIE_GBPS:
        lanes = model.pcie_width or _FEWEST_LANES
        rate = _PCIE_GBPS[model.pcie_gen] * lanes
        return Link(kind="pcie", gbps=rate, words=f"PCIe {model.pcie_gen} x{lanes} of {model.name}")
    return None


def parse_site(text: str) -> dict[str, dict[int, float]]:
    """A site's own figures: `[all_reduce]` with `"1G" = 85.0`, bus bandwidth in GB/s that a healthy run reaches."""
    try:
        document = tomllib.loads(text)
        return {name: {parse_size(size): float(gbps) for size, gbps in rows.items()} for name, rows in document.items()}
    except (tomllib.TOMLDecodeError, AttributeError, TypeError, ValueError) as wrong:
        raise UsageError(f'--baseline: write [all_reduce] and below it "1G" = 85.0 ({wrong})') from None


def settle(
    findings: Sequence[Finding], *, link: Link | None, site: Mapping[str, Mapping[int, float]] | None = None
) -> list[Finding]:
    """Findings on bandwidth with a verdict for each that had no baseline. Others stay as they are."""
    return [
        _judge(finding, link, site or {}) if _open(finding) else finding
        for finding in findings
        if not (finding.reason.startswith(_UNJUDGED) and "busbw_gbps" not in finding.values)
    ]


def settle_peers(by_node: Mapping[str, Sequence[Finding]]) -> dict[str, list[Finding]]:
    """Findings of equal runs on single nodes, each compared with the median of all where it had no baseline."""
    seen: dict[tuple[str, int], dict[str, float]] = {}
    for node, findings in by_node.items():
        for finding in findings:
            if _open(finding) and (at := _largest(finding)) is not None:
                seen.setdefault((str(finding.values["collective"]), at[0]), {})[node] = at[1]
    return {node: [_among(finding, seen) for finding in findings] for node, findings in by_node.items()}


def _among(finding: Finding, seen: Mapping[tuple[str, int], Mapping[str, float]]) -> Finding:
    at = _largest(finding) if _open(finding) else None
    if at is None:
        return finding
    name, (size, gbps) = str(finding.values["collective"]), at
    peers = seen[name, size]
    if len(peers) < _LEAST_PEERS:
        return finding
    middle = statistics.median(peers.values())
    share = gbps / middle if middle else 0.0
    reason = f"{name}: {gbps:.3g} GB/s at {render_size(size)}, {share:.0%} of the median of {len(peers)} nodes"
    return _verdict(
        share, _PEER_SHARES, reason, {**finding.values, "peers": len(peers), "median_gbps": round(middle, 3)}
    )


def _judge(finding: Finding, link: Link | None, site: Mapping[str, Mapping[int, float]]) -> Finding:
    name, at = str(finding.values["collective"]), _largest(finding)
    values = dict(finding.values)
    if at is None:
        return finding
    size, gbps = at
    stated = {want: least for want, least in site.get(name, {}).items() if str(want) in values["busbw_gbps"]}
    if stated:
        share, want = min((float(values["busbw_gbps"][str(want)]) / least, want) for want, least in stated.items())
        reason = f"{name}: {share:.0%} of the site's {stated[want]:g} GB/s at {render_size(want)}"
        return _verdict(share, (FAIL_BELOW, WARN_BELOW), reason, values)
    if link is not None and size >= _LATENCY_BOUND:
        share = gbps / link.gbps
        reason = f"{name}: {gbps:.3g} GB/s at {render_size(size)}, {share:.0%} of {link.words}"
        return _verdict(share, _SHARES[link.kind], reason, {**values, "link_gbps": round(link.gbps, 3)})
    action = "state what a healthy run reaches with --baseline FILE, or compare with a run you trust"
    reason = f"{name}: {gbps:.3g} GB/s at {render_size(size)}; no baseline, peer or link limit to compare with"
    return warn(reason, action=action, **values)


def _verdict(share: float, shares: tuple[float, float], reason: str, values: Mapping[str, Any]) -> Finding:
    if share < shares[0]:
        return fail(reason, action=_ISOLATE, **values)
    if share < shares[1]:
        return warn(reason, action="run again on an idle machine; if it stays, run `trainmaster isolate`", **values)
    return ok(reason, **values)


def _open(finding: Finding) -> bool:
    """Measured, with no baseline to judge by."""
    measured = finding.values.get("busbw_gbps")
    return finding.verdict in (Verdict.SKIP, Verdict.ERROR) and isinstance(measured, Mapping) and bool(measured)


def _largest(finding: Finding) -> tuple[int, float] | None:
    measured = finding.values.get("busbw_gbps")
    if not isinstance(measured, Mapping) or not measured or "collective" not in finding.values:
        return None
    size = max(map(int, measured))
    return size, float(measured[str(size)])


@functools.cache
def _network() -> Mapping[str, float]:
    text = resources.files("trainmaster.bench").joinpath("data", "links.toml").read_text(encoding="utf-8")
    return {name: float(value) for name, value in tomllib.loads(text)["network_gbit"].items()}
