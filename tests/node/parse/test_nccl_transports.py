"""Transports of old NCCL versions and of clouds' plugins, each of its own kind."""

from __future__ import annotations

import pytest

from trainmaster.bench.collectives.transport import prove_nccl
from trainmaster.core.results import Verdict
from trainmaster.node.parse import nccl_debug
from trainmaster.node.parse.nccl_debug import NcclLog, Scope, Transport


def log(via: str, *, old: bool = False, colour: str = "") -> NcclLog:
    """Two ranks on two nodes, connected by one network channel each way."""
    lines = []
    for rank, host in ((0, "node1"), (1, "node2")):
        head = f"{colour}{host}:1{rank}:2{rank} [0] NCCL INFO"
        other = 1 - rank
        here, there = (str(rank), str(other)) if old else (f"{rank}[0]", f"{other}[0]")
        word = "Ring 00" if old else "Channel 00/0"
        lines += [
            f"{head} comm 0x7f rank {rank} nranks 2 cudaDev 0 nvmlDev 0 - Init COMPLETE",
            f"{head} {word} : {here} -> {there} [send] via {via}",
            f"{head} {word} : {there} -> {here} [receive] via {via}",
        ]
    return nccl_debug.parse("\n".join(lines))


@pytest.mark.parametrize(
    ("via", "old", "transport"),
    [
        ("NET/IB/0/GDRDMA", True, Transport.IB),
        ("NET/Socket/0", True, Transport.SOCKET),
        ("NET/gIB/3/GDRDMA", False, Transport.GIB),
        ("NET/FasTrak/0", False, Transport.FASTRAK),
        ("NET/GPUDirectTCPX_v7/0", False, Transport.FASTRAK),
        ("NET/AWS Libfabric/0/GDRDMA", False, Transport.OFI),
        ("NET/Libfabric/0/GDRDMA", False, Transport.OFI),
        ("NET/OFI/0", False, Transport.OFI),
    ],
)
def test_each_network_is_its_own_kind(via: str, old: bool, transport: Transport) -> None:
    found = log(via, old=old)
    assert found.faults == ()
    assert found.transports(Scope.INTER) == {transport}


@pytest.mark.parametrize("via", ["P2P/IPC", "P2P/direct pointer", "direct shared memory"])
def test_rings_of_nccl_2_4_inside_a_node(via: str) -> None:
    text = f"node1:1:2 [0] NCCL INFO Ring 00 : 0[0] -> 1[1] via {via}"
    found = nccl_debug.parse(text)
    assert found.transports() == {Transport.SHM if "shared" in via else Transport.P2P}
    assert found.faults == ()


def test_colours_do_not_hide_a_line() -> None:
    assert log("NET/IB/0", colour="\x1b[32m").transports(Scope.INTER) == {Transport.IB}


@pytest.mark.parametrize(
    ("via", "expected", "fabric", "verdict"),
    [
        ("NET/gIB/3/GDRDMA", "gIB", "gib", Verdict.PASS),
        ("NET/gIB/3/GDRDMA", None, "gib", Verdict.PASS),
        ("NET/gIB/3/GDRDMA", "IB", "gib", Verdict.FAIL),
        ("NET/FasTrak/0", "FasTrak", "fastrak", Verdict.PASS),
        ("NET/Socket/0", "gIB", "tcp", Verdict.FAIL),
        ("NET/Socket/0", "FasTrak", "tcp", Verdict.FAIL),
    ],
)
def test_an_expected_plugin_is_proven_or_refuted(via: str, expected: object, fabric: str, verdict: Verdict) -> None:
    proof = prove_nccl(log(via), expected, nodes=2, world=2)  # type: ignore[arg-type]
    assert (proof.fabric, proof.finding.verdict) == (fabric, verdict)
