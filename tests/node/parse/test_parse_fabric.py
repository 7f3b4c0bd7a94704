"""NCCL's log, ibstat and fi_info: what carried the traffic, which port is up, which NIC is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.node.parse import ParseError, fi_info, ibstat, nccl_debug
from trainmaster.node.parse.nccl_debug import NcclLog, Scope, Transport

SAMPLES = Path(__file__).parent / "samples"


def text(name: str) -> str:
    return (SAMPLES / name).read_text()


def unready(log: NcclLog) -> list[int]:
    """Ranks that a communicator expects and that never completed their initialisation."""
    ready = {(rank.comm, rank.rank) for rank in log.ranks if rank.ready}
    sizes = {rank.comm: rank.ranks for rank in log.ranks}
    return [number for comm, size in sizes.items() for number in range(size) if (comm, number) not in ready]


@pytest.mark.parametrize(
    ("name", "transport", "word", "gdr"),
    [
        ("ib", Transport.IB, "NET/IB", True),
        ("efa", Transport.OFI, "NET/Libfabric", True),
        ("socket", Transport.SOCKET, "NET/Socket", False),
    ],
)
def test_the_transport_between_nodes_is_proven(name: str, transport: Transport, word: str, gdr: bool) -> None:
    log = nccl_debug.parse(text(f"nccl-debug-{name}.txt"))
    assert log.transports(Scope.INTER) == {transport}
    assert log.transports(Scope.INTRA) == {Transport.P2P}
    (between,) = [item for item in log.carried if item.scope is Scope.INTER]
    assert (between.word, between.gdr, between.channels) == (word, gdr, 8)
    assert (log.version, log.nvls, log.faults, unready(log)) == ("2.27.3+cuda12.9", True, (), [])


def test_what_nccl_chose_and_what_it_warned_of() -> None:
    ib, efa, socket = (nccl_debug.parse(text(f"nccl-debug-{name}.txt")) for name in ("ib", "efa", "socket"))
    assert ib.gdr == (("mlx5_0", True),)
    assert ib.net_devices == ("IB mlx5_0:1/IB", "IB mlx5_1:1/IB")
    assert (efa.providers, efa.networks, efa.plugins[0]) == (("efa",), ("Libfabric",), "aws-ofi-nccl")
    assert socket.warnings == (("NET/Socket : peer closed the connection", 1),)
    assert socket.hosts == ("node1", "node2")


@pytest.mark.parametrize(
    ("via", "transport"),
    [
        ("P2P/IPC", Transport.P2P),
        ("P2P/direct pointer", Transport.P2P),
        ("SHM/direct/direct", Transport.SHM),
        ("NET/AWS Libfabric/0/GDRDMA", Transport.OFI),
        ("NET/IBext_v8/3/GDRDMA", Transport.IB),
        ("NET/Socket/0", Transport.SOCKET),
        ("NET/UCX/0", Transport.UNKNOWN),
        ("CARRIER/pigeon", Transport.UNKNOWN),
    ],
)
def test_every_way_a_channel_can_go(via: str, transport: Transport) -> None:
    log = nccl_debug.parse(f"n:1:2 [0] NCCL INFO Channel 00 : 0[1b0] -> 1[1c0] via {via}\n")
    assert log.transports() == {transport}


def test_a_rank_that_never_was_ready_is_missing() -> None:
    lines = text("nccl-debug-ib.txt").splitlines()
    cut = [line for line in lines if not ("rank 2 " in line and "COMPLETE" in line)]
    assert unready(nccl_debug.parse("\n".join(cut))) == [2]


def test_every_port_of_every_adapter_is_read() -> None:
    found = ibstat.parse(text("ibstat-healthy.txt"))
    ports = [(ca.name, port.number, port.up, port.rate_gbps) for ca in found.adapters for port in ca.ports]
    assert ports == [
        ("mlx5_0", 1, True, 400),
        ("mlx5_1", 1, True, 400),
        ("mlx5_1", 2, True, 400),
        ("mlx5_2", 1, True, 100),
    ]
    assert found.faults == ()
    assert [ca.ports[0].link_layer for ca in found.adapters] == ["InfiniBand", "InfiniBand", "Ethernet"]
    assert found.adapters[0].firmware == "28.39.3560"


def test_a_port_that_polls_is_down() -> None:
    found = ibstat.parse(text("ibstat-polling.txt"))
    port = found.adapters[1].ports[0]
    assert (port.state, port.physical_state, port.up) == ("Down", "Polling", False)


def test_ibpanic_is_an_error_and_no_adapter() -> None:
    found = ibstat.parse("ibpanic: [812] main: stat of IB device 'mlx5_9' failed: (No such file or directory)\n")
    assert found.adapters == () and len(found.errors) == 1


@pytest.mark.parametrize("lost", ["CA 'mlx5_1'", "\tPort 2:", "\tNumber of ports: 2", "\t\tState: Active"])
def test_a_lost_line_of_ibstat_shows(lost: str) -> None:
    whole = text("ibstat-healthy.txt")
    assert ibstat.parse(whole.replace(lost + "\n", "", 1)).faults != ()


def test_two_states_of_one_port_are_not_active() -> None:
    whole = text("ibstat-healthy.txt").replace("\t\tState: Active\n", "\t\tState: Active\n\t\tState: Down\n", 1)
    assert ibstat.parse(whole).adapters[0].ports[0].state == "Active|Down"


def test_the_same_words_in_sys() -> None:
    assert (ibstat.parse_counter("17\n"), ibstat.parse_counter("N/A (no PMA)\n")) == (17, None)
    assert (ibstat.parse_state("4: ACTIVE\n"), ibstat.parse_state("ACTIVE")) == ("ACTIVE", None)
    assert (ibstat.parse_rate("400 Gb/sec (4X NDR)\n"), ibstat.parse_rate("2.5 Gb/sec"), ibstat.parse_rate("fast")) == (
        400,
        2.5,
        None,
    )


def test_a_nic_is_counted_once_for_all_its_domains() -> None:
    found = fi_info.parse(text("fi-info-4-nics.txt"))
    assert found.devices("efa") == ("rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0")
    assert (len(found.entries), found.faults, found.error) == (12, (), None)


def test_no_provider_is_libfabrics_own_error() -> None:
    found = fi_info.parse(text("fi-info-none.txt"))
    assert (found.error, found.error_text, found.entries) == (fi_info.NO_DATA, "No data available", ())


def test_an_entry_without_its_provider_is_not_counted_for_the_one_before() -> None:
    found = fi_info.parse("provider: efa\n    domain: a0-rdm\n    domain: b0-rdm\n    type: FI_EP_RDM\n")
    assert found.devices("efa") == () and found.faults != ()


@pytest.mark.parametrize("parse", [nccl_debug.parse, ibstat.parse, fi_info.parse])
def test_what_is_none_of_it_is_refused(parse: object) -> None:
    assert callable(parse)
    for raw in ("", "hello\n", b"\x80\x81"):
        with pytest.raises(ParseError):
            parse(raw)
