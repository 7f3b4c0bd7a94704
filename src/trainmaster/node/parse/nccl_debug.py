"""Logs of NCCL_DEBUG=INFO: the transports of the traffic, the ranks, and NCCL's warnings.

A finished run is no proof of a fabric: NCCL falls back to TCP sockets silently and is then a hundred times slower. The
proof is in the lines of connected channels (src/transport/*.cc of NVIDIA/nccl; names of plugins from their own logs):

    node1:812:950 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [send] via NET/IB/0/GDRDMA

NCCL 2.4 writes `Ring 00 : 7 -> 8 [send] via NET/IB/0/GDRDMA`. Lines are counted, not kept: a log of a large job has
millions of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from trainmaster.core.compat import StrEnum
from trainmaster.node.parse import ParseError, shorten, split_lines
from trainmaster.node.parse.launcher_log import strip_colours


class Transport(StrEnum):
    OFI = "ofi"  # libfabric (AWS OFI plugin); the provider decides between EFA and TCP
    IB = "ib"  # InfiniBand or RoCE
    GIB = "gib"  # Google's RDMA plugin (A3 Ultra, A4)
    FASTRAK = "fastrak"  # Google's GPUDirect-TCPXO plugin (A3 Mega), and GPUDirect-TCPX (A3 High)
    SOCKET = "socket"  # TCP
    P2P = "p2p"  # NVLink or PCIe between GPUs
    SHM = "shm"  # through host memory
    COLLNET = "collnet"  # SHARP, in the switch
    UNKNOWN = "unknown"  # a word of no known NCCL; kept in `word`


class Scope(StrEnum):
    INTER = "inter"
    INTRA = "intra"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """Channels of one kind: how many ends of them were connected."""

    transport: Transport
    word: str  # as NCCL names it, without device numbers: "NET/IB", "P2P/CUMEM"
    scope: Scope
    gdr: bool  # the NIC reads GPU memory by itself
    channels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank of a communicator that said it exists."""

    comm: str  # its id, the same on every rank
    rank: int
    ranks: int  # in that communicator
    host: str
    pid: int
    device: int | None
    ready: bool  # its initialisation completed


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLog:
    """Content of the log of one or many ranks."""

    version: str | None
    networks: tuple[str, ...]  # "Using network X", every X
    providers: tuple[str, ...]  # libfabric's, every one selected
    plugins: tuple[str, ...]
    net_devices: tuple[str, ...]  # "IB mlx5_0:1/RoCE", "Socket eth0"
    gdr: tuple[tuple[str, bool], ...]  # per HCA, as NCCL found it
    nvls: bool | None  # multicast in the NVSwitch; None: not said; False if any GPU lacks it
    carried: tuple[Carried, ...]
    ranks: tuple[Rank, ...]
    hosts: tuple[str, ...]
    warnings: tuple[tuple[str, int], ...]  # text and how often
    faults: tuple[str, ...] = ()

    def transports(self, scope: Scope | None = None) -> frozenset[Transport]:
        """Transports in a scope; UNKNOWN scope counts for both, because it may be either."""
        return frozenset(
            item.transport for item in self.carried if scope is None or item.scope in (scope, Scope.UNKNOWN)
        )


_LINE = re.compile(
    r"(?:^|(?<=[\s:>\]]))(?P<host>[A-Za-z0-9._-]{1,255}):(?P<pid>\d{1,9}):(?P<tid>\d{1,9}) \[(?P<dev>-?\d{1,4})\]"
    r" (?:[\w./]+:\d{1,6} )?NCCL (?P<level>INFO|WARN|TRACE|ABORT|VERSION) ?(?P<text>.*)"
)
_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d{1,4}(?:/\d{1,4})? : (?P<from>\d{1,7})(?:\[[0-9a-f]{1,8}\])?"
    r" -> (?P<to>\d{1,7})(?:\[[0-9a-f]{1,8}\])?(?: \[(?:send|receive)\])? via (?P<via>\S.*)"
)
_NET = re.compile(r"NET/[A-Za-z][\w .-]*/\d{1,4}(?:\(\d{1,7}\))?(?:/GDRDMA(?:\(\w+\))?)?(?:/Shared)?")
_COLLNET = re.compile(r"CollNet \d{1,4}(?:/\d{1,4})? : \d{1,7} \[(?:send|receive)\] via (?P<via>COLLNET/\S.*)")
_INIT = re.compile(
    r"(?:[\w\[\]]+ ){0,4}comm 0x[0-9a-f]+ rank (?P<rank>\d{1,7}) nranks (?P<ranks>\d{1,7})"
    r"(?: (?!commId)[A-Za-z]+ [0-9a-fx]+){0,8}?(?: commId (?P<id>0x[0-9a-f]+))? - Init (?P<how>START|COMPLETE)",
    re.ASCII,
)
_NETWORK = re.compile(r"Using network (?P<name>\S.*)")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is (?P<name>[\w;]+)")
_VERSION = re.compile(r"NCCL version (?P<version>[\w.+-]+)")
_PLUGIN = re.compile(
    r"(?:NET/Plugin: Loaded (?:net|collnet) plugin|NET/Plugin : Plugin load .*:|NET/OFI Initializing) (?P<name>\S+)"
)
_DEVICES = re.compile(r"NET/(?P<net>\w+) : Using(?P<list>(?: ?\[\d{1,3}\]\S+)+)")
_GDR = re.compile(r"GPU Direct RDMA (?P<how>Enabled|Disabled) for HCA \d{1,4} '(?P<name>[^']{1,64})'")
_NVLS = re.compile(r"NVLS multicast support is (?P<how>not )?available")
_LARGEST = 1 << 17  # ranks of one communicator; more is a damaged number
_MOST = 200  # different warnings or faults that are kept; the rest is counted


def parse(raw: str | bytes) -> NcclLog:
    """The log of one rank, or of many mixed together."""
    return parse_lines(split_lines(raw))


def parse_lines(lines: Iterable[str]) -> NcclLog:
    """The same, from a log too large to hold."""
    reader = _Reader()
    for line in lines:
        reader.read(line[:8192])
    if not reader.seen:
        raise ParseError("no line of NCCL_DEBUG in this text")
    return reader.end()


@dataclass(slots=True)
class _Reader:
    seen: int = 0
    version: str | None = None
    networks: dict[str, None] = field(default_factory=dict)
    providers: dict[str, None] = field(default_factory=dict)
    plugins: dict[str, None] = field(default_factory=dict)
    devices: dict[str, None] = field(default_factory=dict)
    hosts: dict[str, None] = field(default_factory=dict)
    gdr: dict[str, bool] = field(default_factory=dict)
    nvls: bool | None = None
    channels: Counter[tuple[int, int, str]] = field(default_factory=Counter)
    ranks: dict[tuple[str, int], Rank] = field(default_factory=dict)
    warnings: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def read(self, raw: str) -> None:
        raw = strip_colours(raw)
        line = _LINE.search(raw)
        if line is None:
            version = _VERSION.match(raw.strip())
            if version:  # the first line of rank 0 carries no prefix
                self.seen += 1
                self.version = self.version or version["version"]
            elif " NCCL " in raw or " via NET/" in raw:
                self._count(self.faults, f"a line of NCCL cannot be read: {shorten(raw)}")
            return
        self.seen += 1
        text = line["text"].strip()
        self._name(self.hosts, line["host"])
        if line["level"] == "WARN":
            self._count(self.warnings, shorten(text))
        elif " via " in text:
            self._via(text)
        else:
            self._other(text, line)

    def _via(self, text: str) -> None:
        channel = _CHANNEL.search(text)
        if channel:
            via = channel["via"].strip()
            self.channels[int(channel["from"]), int(channel["to"]), via] += 1
            if via.startswith("NET") and not _NET.fullmatch(via):
                self._count(self.faults, f"how a channel went out cannot be read: {shorten(via)}")
            return
        collnet = _COLLNET.search(text)
        if collnet:
            self.channels[-1, -1, collnet["via"].strip()] += 1
        elif text.startswith(("Channel", "Ring ", "CollNet")):
            self._count(self.faults, f"the line of a channel cannot be read: {shorten(text)}")

    def _other(self, text: str, line: re.Match[str]) -> None:
        init = _INIT.fullmatch(text)
        if init:
            self._init(init, line)
        elif " - Init " in text:
            self._count(self.faults, f"the line of a rank cannot be read: {shorten(text)}")
        for pattern, where in ((_NETWORK, self.networks), (_PROVIDER, self.providers), (_PLUGIN, self.plugins)):
            match = pattern.search(text)
            if match:
                self._name(where, match["name"].strip())
        version = _VERSION.search(text)
        if version:
            self.version = self.version or version["version"]
        devices = _DEVICES.search(text)
        if devices:
            for name in re.findall(r"\[\d+\](\S+?)(?=;|\s|\[|$)", devices["list"]):
                self._name(self.devices, f"{devices['net']} {name}")
        gdr = _GDR.search(text)
        if gdr and (gdr["name"] in self.gdr or len(self.gdr) < _MOST):
            self.gdr[gdr["name"]] = self.gdr.get(gdr["name"], True) and gdr["how"] == "Enabled"
        nvls = _NVLS.search(text)
        if nvls:
            self.nvls = (self.nvls is not False) and not nvls["how"]

    def _init(self, init: re.Match[str], line: re.Match[str]) -> None:
        # Before 2.19 no id is printed; the address of a communicator then differs from rank to rank.
        comm = init["id"] or f"of {init['ranks']}"
        rank, ranks = int(init["rank"]), int(init["ranks"])
        if rank >= ranks or ranks > _LARGEST:
            self._count(self.faults, f"a rank outside its communicator: {shorten(init[0])}")
            return
        before = self.ranks.get((comm, rank))
        self.ranks[comm, rank] = Rank(
            comm=comm,
            rank=rank,
            ranks=max(ranks, before.ranks if before else 0),
            host=line["host"],
            pid=int(line["pid"]),
            device=int(line["dev"]) if int(line["dev"]) >= 0 else None,
            ready=init["how"] == "COMPLETE" or bool(before and before.ready),
        )

    def _name(self, where: dict[str, None], name: str) -> None:
        if len(where) < 10_000:
            where[name] = None

    def _count(self, where: Counter[str], text: str) -> None:
        where[text if text in where or len(where) < _MOST else "and others"] += 1

    def end(self) -> NcclLog:
        hosts: dict[int, set[str]] = {}
        for rank in self.ranks.values():
            hosts.setdefault(rank.rank, set()).add(rank.host)
        counted: Counter[tuple[Transport, str, Scope, bool]] = Counter()
        for (start, end, via), count in self.channels.items():
            transport, word = _classify(via)
            scope = _scope(hosts.get(start), hosts.get(end), transport, word)
            counted[transport, word, scope, "/GDRDMA" in via] += count
        carried = [
            Carried(transport=transport, word=word, scope=scope, gdr=gdr, channels=count)
            for (transport, word, scope, gdr), count in sorted(counted.items())
        ]
        return NcclLog(
            version=self.version,
            networks=tuple(self.networks),
            providers=tuple(self.providers),
            plugins=tuple(self.plugins),
            net_devices=tuple(self.devices),
            gdr=tuple(self.gdr.items()),
            nvls=self.nvls,
            carried=tuple(carried),
            ranks=tuple(sorted(self.ranks.values(), key=lambda rank: (rank.comm, rank.rank))),
            hosts=tuple(self.hosts),
            warnings=tuple(self.warnings.items()),
            faults=tuple(f"{text} ({count} times)" if count > 1 else text for text, count in self.faults.items()),
        )


# The name a net plugin gives itself. HPC-X calls its own IBext; aws-ofi-nccl dropped the "AWS" in 1.7.
_NETS = {"IB": Transport.IB, "Socket": Transport.SOCKET, "OFI": Transport.OFI, "gIB": Transport.GIB}
_PREFIXES = {"IBext": Transport.IB, "FasTrak": Transport.FASTRAK, "GPUDirectTCPX": Transport.FASTRAK}


def _classify(via: str) -> tuple[Transport, str]:
    kind, _, rest = via.partition("/")
    name = rest.partition("/")[0].strip()
    if kind == "NET":
        for prefix, transport in _PREFIXES.items():
            if name.startswith(prefix):
                return transport, f"NET/{name}"
        if name.removeprefix("AWS ") == "Libfabric":
            return Transport.OFI, f"NET/{name}"
        return _NETS.get(name, Transport.UNKNOWN), f"NET/{shorten(name)}"
    if via.startswith("direct shared memory"):
        return Transport.SHM, "SHM/direct"  # NCCL 2.4
    if kind in ("P2P", "SHM"):
        return Transport(kind.lower()), f"{kind}/{shorten(name)}"
    if kind == "COLLNET":
        return Transport.COLLNET, f"COLLNET/{shorten(name)}"
    return Transport.UNKNOWN, shorten(via)


def _scope(start: set[str] | None, end: set[str] | None, transport: Transport, word: str) -> Scope:
    """Between hosts or within one, where both ends are known; a rank number on two hosts proves nothing."""
    if start and end and len(start) == len(end) == 1:
        return Scope.INTRA if start == end else Scope.INTER
    if transport is Transport.SHM or (transport is Transport.P2P and word != "P2P/MNNVL"):
        return Scope.INTRA  # these cannot leave a host
    return Scope.UNKNOWN
