"""Proof of transport from NCCL's own log, against the expected transport.

A finished run proves nothing: NCCL falls back to TCP silently, and then only the speed is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trainmaster.core.errors import UsageError
from trainmaster.core.results import Finding, error, fail, ok, warn
from trainmaster.node.parse import ParseError
from trainmaster.node.parse.nccl_debug import NcclLog, Scope, Transport, parse_lines

Expected = Literal["EFA", "IB", "gIB", "FasTrak", "NVLS", "P2P", "Socket"]
Fabric = Literal["nvlink", "host", "ib", "roce", "efa", "gib", "fastrak", "tcp"]

_ONCE = "2×8 H200 gave 3.8 GB/s once instead of 481 because it fell back to TCP"
_TO_DO: Mapping[str, str] = {
    "EFA": "check that aws-ofi-nccl is installed and that `fi_info -p efa` lists devices inside the container",
    "IB": "check that the container has /dev/infiniband and that NCCL_IB_HCA and NCCL_IB_DISABLE admit the ports",
    "gIB": "check that the gIB plugin is mounted, its environment is sourced, and the pod has the RDMA interfaces",
    "FasTrak": "check that the FasTrak plugin and its rxdm daemon run, and that the pod has the GPU interfaces",
    "NVLS": "check that the fabric manager runs and that NCCL_NVLS_ENABLE is not 0",
    "P2P": "check that NCCL_P2P_DISABLE is not set and that `nvidia-smi topo -p2p r` shows OK between all GPUs",
    "Socket": "leave --expect-transport out: a faster transport than TCP carried the traffic",
}
_WANTED = {"EFA": Transport.OFI, "IB": Transport.IB, "gIB": Transport.GIB, "FasTrak": Transport.FASTRAK}
_RUN_AGAIN = "run again with NCCL_DEBUG=INFO and see that its file is written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The transports in words, the fabric for baseline lookup, and the verdict."""

    words: str
    fabric: Fabric | None
    finding: Finding


def parse_expected(word: str | None) -> Expected | None:
    if word is None:
        return None
    for name in get_args(Expected):
        if name.lower() == word.lower():
            return name  # type: ignore[no-any-return]
    raise UsageError(f"--expect-transport {word}: not one of {', '.join(get_args(Expected))}")


def read_logs(paths: Iterable[Path]) -> NcclLog | None:
    """The logs of all ranks as one; None without a log."""
    try:
        return parse_lines(_lines(paths))
    except (ParseError, OSError):
        return None


def _lines(paths: Iterable[Path]) -> Iterable[str]:
    for path in sorted(paths):
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from (line.rstrip("\n") for line in file)


def prove_gloo(expected: Expected | None, nodes: int) -> Proof:
    """Proof for gloo, which only has TCP and writes no log; on one machine it uses the loopback."""
    where = "over the network" if nodes > 1 else "through the loopback of one machine"
    words = f"gloo carries everything by TCP, {where}"
    if expected in (None, "Socket"):
        return Proof(words=words, fabric="tcp", finding=ok(words))
    to_do = f"run with --backend nccl on GPUs to prove {expected}"
    return Proof(words=words, fabric="tcp", finding=fail(f"{expected} was expected, but {words}", action=to_do))


def prove_nccl(log: NcclLog | None, expected: Expected | None, *, nodes: int, world: int) -> Proof:
    """Proof for NCCL. Fails closed: without a complete log nothing is proven."""
    if log is None:
        return Proof(
            words="unknown: NCCL left no log",
            fabric=None,
            finding=error("NCCL left no log, so the transport is unknown", action=_RUN_AGAIN),
        )
    fabric, words = _fabric(log, nodes), _words(log)
    spoke = sum(rank.ready for rank in log.ranks)
    values: dict[str, Any] = {"carried": words, "providers": list(log.providers), "hosts": len(log.hosts)}
    if contradiction := _contradiction(log, expected, nodes):
        to_do = _TO_DO[expected or ("IB" if nodes > 1 else "P2P")]
        finding = (
            fail(contradiction, action=to_do, **values) if expected else warn(contradiction, action=to_do, **values)
        )
    elif log.faults or spoke < world or (world > 1 and not log.carried) or (nodes > 1 and not _between(log)):
        kinds = f"{len(log.carried)} kinds of channels, {len(_between(log))} of them between nodes"
        why = log.faults[0] if log.faults else f"{spoke} of {world} ranks are in it, {kinds}"
        finding = error(f"the log of NCCL is not whole: {why}", action=_RUN_AGAIN, **values)
    elif expected in _WANTED and nodes == 1:
        finding = error(
            f"{expected} was expected, but all ranks are on one node and nothing left it",
            action="run on two nodes or more, or expect NVLS or P2P",
        )
    else:
        finding = ok(f"carried by {words}", **values)
    return Proof(words=words, fabric=fabric, finding=finding)


def _contradiction(log: NcclLog, expected: Expected | None, nodes: int) -> str | None:
    """Mismatch between log and expectation; without an expectation only TCP is suspicious."""
    outside = _between(log) if nodes > 1 else frozenset()
    inside = log.transports(Scope.INTRA) - outside
    tcp = Transport.SOCKET in outside or Transport.SOCKET in inside
    over_tcp = Transport.OFI in outside and not _is_efa(log)
    match expected:
        case None:
            return f"TCP sockets carried the traffic; {_ONCE}" if tcp or over_tcp else None
        case "Socket":
            return None if tcp else f"TCP was expected, but {_words(log)} carried the traffic"
        case "P2P" | "NVLS":
            slow = inside & {Transport.SHM, Transport.SOCKET}
            if slow:
                names = " and ".join(sorted(str(name).upper() for name in slow))
                return f"{expected} was expected, but {names} carried traffic inside a node: through host memory"
            if expected == "NVLS" and log.nvls is not True:
                state = "reports that it is not available" if log.nvls is False else "does not mention it"
                return f"NVLS was expected, but NCCL {state}"
            return None
        case "EFA" | "IB" | "gIB" | "FasTrak":
            wanted = _WANTED[expected]
            if tcp or (expected == "EFA" and over_tcp):
                return f"{expected} was expected, but TCP sockets carried the traffic between nodes; {_ONCE}"
            if nodes > 1 and outside and not outside <= {wanted, Transport.COLLNET}:
                return f"{expected} was expected, but {_words(log)} carried the traffic"
            return None


def _between(log: NcclLog) -> frozenset[Transport]:
    """Transports of traffic between nodes. A network transport of unknown scope counts: others cannot leave a node."""
    return log.transports(Scope.INTER) - {Transport.SHM}


def _is_efa(log: NcclLog) -> bool:
    return bool(log.providers) and all(name.split(";")[0] == "efa" for name in log.providers)


def _fabric(log: NcclLog, nodes: int) -> Fabric | None:
    """The slowest transport between nodes; on one node the slowest inside it."""
    if nodes > 1:
        outside = _between(log)
        if Transport.SOCKET in outside or (Transport.OFI in outside and not _is_efa(log)):
            return "tcp"
        if Transport.OFI in outside:
            return "efa"
        if Transport.FASTRAK in outside:
            return "fastrak"
        if Transport.GIB in outside:
            return "gib"
        if outside & {Transport.IB, Transport.COLLNET}:
            return "roce" if any("/RoCE" in name for name in log.net_devices) else "ib"
        return "nvlink" if outside == {Transport.P2P} else None  # one NVLink domain over several hosts
    inside = log.transports()
    if inside == {Transport.P2P}:
        return "nvlink"
    return "host" if inside and Transport.UNKNOWN not in inside else None


def _words(log: NcclLog) -> str:
    """`NET/IB between nodes (32 channels, GPU memory direct), P2P/CUMEM inside`."""
    parts: dict[tuple[str, str, bool], int] = {}
    for item in log.carried:
        key = (item.word, str(item.scope), item.gdr)
        parts[key] = parts.get(key, 0) + item.channels
    scopes = {"inter": "between nodes", "intra": "inside a node", "unknown": "somewhere"}
    channels = [
        f"{word} {scopes[scope]} ({count} channel ends{', GPU memory direct' if gdr else ''})"
        for (word, scope, gdr), count in sorted(parts.items(), key=lambda part: -part[1])
    ]
    nvls = "; NVLS is available" if log.nvls else ""
    provider = f"; libfabric provider {', '.join(log.providers)}" if log.providers else ""
    return (", ".join(channels) or "no channel was logged") + provider + nvls
