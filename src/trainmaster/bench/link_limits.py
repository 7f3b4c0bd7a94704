"""Verdict on collectives without a published baseline: a site's own figures, peers, or the limit of the link.

A baseline is the best judge, and most machines have none. Then the order is: figures that the site states; the median
of equal nodes; the physical bandwidth of the slowest link, of which a healthy machine reaches a known share. Where none
of these is known the measurement is a warning: it was measured, and nothing to compare it with exists.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from trainmaster.bench import bus_baselines
from trainmaster.bench.limits import FAIL_BELOW, WARN_BELOW, parse_size, render_size
from trainmaster.core.compat import read_toml
from trainmaster.core.errors import UsageError
from trainmaster.core.gpus import find_gpu
from trainmaster.core.node_links import LATENCY_BOUND, SHARES, Link, find_node_link
from trainmaster.core.results import Finding, Verdict, fail, ok, warn

_LEAST_PEERS = 3
_PEER_SHARES = (0.8, 0.9)
_OWN_BYTES = ("all_to_all", "sendrecv")  # their bus bandwidth is that of one rank, not of the whole node
# Of a figure published for the same GPU on other numbers of nodes. Networks of one GPU differ by a factor of five (four
# adapters of 200 Gb/s, eight of 400), so only a tenfold loss is certain.
_CLASS_FAILS = 0.12
_LIKE_ALL_REDUCE = ("all_reduce", "all_gather", "reduce_scatter")
_MOST = 2.5  # of the link; ours: reductions inside switches double the bus bandwidth at most, more was not measured
_UNJUDGED = "measured, not judged"
_ISOLATE = "run `trainmaster isolate` to find the node or link that is slow"


def find_link(*, instance: str | None, nodes: int, gpu: str | None = None, gpus: int = 1) -> Link | None:
    """The limiting link of a run on these instances, of `gpus` GPUs each; None where it is not known."""
    if nodes > 1:
        gbit = _network().get((instance or "").strip().lower().removeprefix("ml."))
        if gbit is None:
            return None
        return Link(kind="network", gbps=gbit / 8, words=f"the {gbit:g} Gb/s network of {instance}", gpus=gpus)
    return find_node_link(gpu)


def parse_site(text: str) -> dict[str, dict[int, float]]:
    """A site's own figures: `[all_reduce]` with `"1G" = 85.0`, bus bandwidth in GB/s that a healthy run reaches."""
    try:
        document = read_toml(text)
        return {
            name: {parse_size(size): _figure(gbps) for size, gbps in rows.items()} for name, rows in document.items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f'--baseline: write [all_reduce] and below it "1G" = 85.0 ({error})') from None


def _figure(gbps: object) -> float:
    """A bandwidth that can be missed: finite and above 0."""
    if isinstance(gbps, bool) or not isinstance(gbps, (int, float)) or not (math.isfinite(gbps) and gbps > 0):
        raise ValueError(f"{gbps!r} is no bandwidth above 0")
    return float(gbps)


def settle(
    findings: Sequence[Finding], *, link: Link | None, site: Mapping[str, Mapping[int, float]] | None = None
) -> list[Finding]:
    """Findings on bandwidth with a verdict for each that had no baseline. Others stay as they are."""
    return [
        _judge(finding, link, site or {}) if _open(finding) else finding
        for finding in findings
        if not (finding.reason.startswith(_UNJUDGED) and "busbw_gbps" not in finding.values)
    ]


def settle_nodes(
    by_node: Mapping[str, Sequence[Finding]],
    *,
    link: Link | None,
    site: Mapping[str, Mapping[int, float]] | None = None,
) -> dict[str, list[Finding]]:
    """Findings of equal runs on single nodes: by the site's figures, else by peers and link, the worse of the two.

    Peers alone do not decide: nodes that are all slow agree with each other.
    """
    seen: dict[tuple[str, int], dict[str, float]] = {}
    for node, findings in by_node.items():
        for finding in findings:
            if _open(finding) and (at := largest(finding)) is not None:
                seen.setdefault((str(finding.values["collective"]), at[0]), {})[node] = at[1]
    return {
        node: settle([_among(finding, seen, link, site or {}) for finding in findings], link=link, site=site)
        for node, findings in by_node.items()
    }


def _among(
    finding: Finding,
    seen: Mapping[tuple[str, int], Mapping[str, float]],
    link: Link | None,
    site: Mapping[str, Mapping[int, float]],
) -> Finding:
    at = largest(finding) if _open(finding) else None
    if at is None or _by_site(finding, site) is not None:
        return finding
    name, (size, gbps) = str(finding.values["collective"]), at
    peers = seen[name, size]
    if len(peers) < _LEAST_PEERS:
        return finding
    middle = statistics.median(peers.values())
    share = gbps / middle if middle else 0.0
    reason = f"{name}: {gbps:.3g} GB/s at {render_size(size)}, {share:.0%} of the median of {len(peers)} nodes"
    values = {**finding.values, "peers": len(peers), "median_gbps": round(middle, 3)}
    judged = [_verdict(share, _PEER_SHARES, reason, values), by_link(finding, link)]
    order = (Verdict.FAIL, Verdict.WARN, Verdict.PASS)
    return min(
        (candidate for candidate in judged if candidate is not None),
        key=lambda candidate: order.index(candidate.verdict),
    )


def _judge(finding: Finding, link: Link | None, site: Mapping[str, Mapping[int, float]]) -> Finding:
    at = largest(finding)
    if at is None:
        return finding
    judged = _by_site(finding, site) or by_link(finding, link)
    if judged is not None or "link_gbps" in finding.values:
        return judged or finding
    name, (size, gbps) = str(finding.values["collective"]), at
    action = "state what a healthy run reaches with --baseline FILE, or compare with a run you trust"
    reason = f"{name}: {gbps:.3g} GB/s at {render_size(size)}; no baseline, peer or link limit to compare with"
    return warn(reason, action=action, **finding.values)


def _by_site(finding: Finding, site: Mapping[str, Mapping[int, float]]) -> Finding | None:
    """Verdict by the site's figures; None where it states none of a measured size."""
    name, values = str(finding.values["collective"]), finding.values
    stated = {want: least for want, least in site.get(name, {}).items() if str(want) in values["busbw_gbps"]}
    if not stated:
        return None
    share, want = min((float(values["busbw_gbps"][str(want)]) / least, want) for want, least in stated.items())
    reason = f"{name}: {share:.0%} of the site's {stated[want]:g} GB/s at {render_size(want)}"
    return _verdict(share, (FAIL_BELOW, WARN_BELOW), reason, values)


def by_link(finding: Finding, link: Link | None) -> Finding | None:
    """Verdict by the bandwidth of the link; None where it is not known, or the messages show latency."""
    at = largest(finding)
    if link is None or at is None or at[0] < LATENCY_BOUND:
        return None
    name = str(finding.values["collective"])
    own = name in _OWN_BYTES and link.gpus > 1
    limit, words = (link.gbps / link.gpus, f"a GPU's share of {link.words}") if own else (link.gbps, link.words)
    share = at[1] / limit
    if share > _MOST:
        return None
    reason = f"{name}: {at[1]:.3g} GB/s at {render_size(at[0])}, {share:.0%} of {words}"
    return _verdict(share, SHARES[link.kind], reason, {**finding.values, "link_gbps": round(limit, 3)})


def by_class(finding: Finding, gpu: str, *, nodes: int) -> Finding | None:
    """Verdict on a shape without a baseline: by the link inside a node, between nodes by published figures of the GPU.

    None where neither is known; between nodes also where it is not far below, because what carried it is not known.
    """
    if nodes == 1:
        return by_link(finding, find_node_link(gpu))
    model, at = find_gpu(gpu), largest(finding)
    base = bus_baselines.find(model, nodes=nodes) if model is not None else None
    if base is None or at is None or at[0] < LATENCY_BOUND or finding.values["collective"] not in _LIKE_ALL_REDUCE:
        return None
    share = at[1] / base.gbps
    if share >= _CLASS_FAILS:
        return None
    words = f"{finding.values['collective']}: {at[1]:.3g} GB/s at {render_size(at[0])}, {share:.0%} of {base.source}"
    action = "see which network carried it (NCCL_DEBUG=INFO), then run `trainmaster isolate`"
    return fail(words, action=action, **finding.values)


def _verdict(share: float, shares: tuple[float, float], reason: str, values: Mapping[str, Any]) -> Finding:
    if share < shares[0]:
        return fail(reason, action=_ISOLATE, **values)
    if share < shares[1]:
        return warn(reason, action="run again on an idle machine; if it stays, run `trainmaster isolate`", **values)
    return ok(reason, **values)


def _open(finding: Finding) -> bool:
    """Measured, without a baseline: unjudged, or judged by the link alone, which a site's figures and peers precede."""
    measured = finding.values.get("busbw_gbps")
    judged = finding.verdict not in (Verdict.SKIP, Verdict.ERROR) and "link_gbps" not in finding.values
    return not judged and isinstance(measured, Mapping) and bool(measured)


def largest(finding: Finding) -> tuple[int, float] | None:
    """The largest message of a finding, and its bus bandwidth."""
    measured = finding.values.get("busbw_gbps")
    if not isinstance(measured, Mapping) or not measured or "collective" not in finding.values:
        return None
    size = max(map(int, measured))
    return size, float(measured[str(size)])


@functools.cache
def _network() -> Mapping[str, float]:
    text = resources.files("trainmaster.bench").joinpath("data", "links.toml").read_text(encoding="utf-8")
    return {name: float(value) for name, value in read_toml(text)["network_gbit"].items()}
