"""Whole training nodes whose adapters have several roles, composed from published facts. None of them is a capture.

| node | sources |
|---|---|
| DGX B200, HGX B200, HGX B300 | eight rails and a ConnectX-7 of four functions that manages the NVSwitches: board MT_0000001121, 15b3:1021, PCIe generation 4 with two lanes, InfiniBand ports ACTIVE, IPoIB interfaces down, counters that answer EINVAL (prometheus/node_exporter issues 3265 and 3434, leptonai/gpud issue 1164, siderolabs/extensions issue 893 and pull request 895; NVIDIA Fabric Manager user guide) |
| BlueField rails | Dell XE9680L: B3140H SuperNICs (15b3:a2dc, MT_0000001069, 400GbE, 32 GT/s x16) as rails, a B3220 DPU (MT_0000000884) of which one port carries the node's address and the other has no cable |
| Broadcom | bnxt_re: `counters/` answers EINVAL, the numbers are in `hw_counters/` (prometheus/procfs pull request 675; drivers/infiniband/hw/bnxt_re/hw_counters.c); the PCI driver is bnxt_en, and there is no board_id |
| H100 with two ConnectX-6 for storage and management | imbue-ai/cluster-health issue 4: eight ConnectX-7 and two dual ConnectX-6, second ports without a cable |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gpu_nodes import NODES, shape
from nodes import COUNTERS, IB, NET, bare_metal, ibstat_text, interface, put

from machines import PCI, Machine

EVERY = (*COUNTERS, "port_xmit_data", "port_xmit_discards", "VL15_dropped")
MLX_HARDWARE = ("out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "lifespan")
BNXT_HARDWARE = (
    "active_qps", "rx_pkts", "tx_pkts", "rx_roce_errors", "rx_roce_discards", "to_retransmits", "seq_err_naks_rcvd",
    "max_retry_exceeded", "rnr_naks_rcvd", "missing_resp", "unrecoverable_err", "oos_drop_count", "res_rx_pci_err",
)  # fmt: skip
GEN5, GEN4, GEN3 = "32.0 GT/s PCIe", "16.0 GT/s PCIe", "8.0 GT/s PCIe"
REASONS = {"EINVAL": "Invalid argument", "EIO": "Input/output error", "EACCES": "Permission denied"}


@dataclass(frozen=True, kw_only=True)
class Nic:
    """An RDMA device of one port and its place in the machine."""

    name: str
    address: str
    board: str | None = "MT_0000000838"  # ConnectX-7, 400 Gb/s
    model: str = "0x1021"
    driver: str = "mlx5_core"
    vendor: str = "0x15b3"
    layer: str = "InfiniBand"
    rate: str = "400 Gb/sec (4X NDR)"
    up: bool = True
    numa: int = 0
    lanes: tuple[int, int] = (16, 16)  # current, most
    speed: tuple[str, str] = (GEN5, GEN5)
    net: str | None = None  # its interface
    hardware: Sequence[str] = MLX_HARDWARE
    refuses: bool = False  # its counters answer EINVAL
    traffic: bool = True  # it had a link: its counters of data are not 0
    flags: str = "0x1003"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """GPUs, adapters and the interface of the default route."""

    gpus: str  # of gpu_nodes.NODES
    nics: tuple[Nic, ...]
    default: str = "eth0"
    lower: dict[str, tuple[str, ...]] = field(default_factory=dict)  # interfaces below a bond or a bridge


def refuse(machine: Machine, path: str, reason: str) -> None:
    """A file that the kernel refuses to read, with its errno."""
    message = f"{path} cannot be read: {REASONS[reason]}"
    machine.answer("read", path, {"error": "FileUnreadable", "message": message, "errno": reason})


def compose(machine: Machine, kind: Kind) -> None:
    """A bare-metal node of that kind, openable, with its modules, and ibstat where it speaks InfiniBand."""
    bare_metal(machine)
    shape(machine, NODES[kind.gpus])
    files: dict[str, str | None] = {"/proc/uptime": "864000.00 13700000.00\n"}  # ten days
    names = [nic.name for nic in kind.nics]
    lists: dict[str, Sequence[str] | None] = {
        IB: names,
        "/dev/infiniband": [f"uverbs{number}" for number in range(len(names))],
        PCI: [*machine.host.list(PCI), *(nic.address for nic in kind.nics)],
        NET: ["lo", "eth0", *(nic.net for nic in kind.nics if nic.net), *kind.lower],
        "/sys/module": ["nvidia", "nvidia_uvm", "nvidia_peermem", "ib_core", "ib_uverbs", "mlx5_core", "mlx5_ib"],
        f"{NET}/eth0": ["flags", "operstate"],
    }
    for place, address in enumerate(machine.host.list(PCI)):
        files[f"{PCI}/{address}/numa_node"] = f"{place // 4}\n"
    for place, nic in enumerate(kind.nics):
        files |= _nic_files(nic, place)
        lists |= _nic_lists(nic)
    route = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
    files["/proc/net/route"] = f"{route}{kind.default}\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
    for number, (name, below) in enumerate(kind.lower.items()):
        files |= interface(name, index=90 + number)
        lists[f"{NET}/{name}"] = ["flags", *(f"lower_{one}" for one in below)]
    put(machine, files=files, lists=lists)
    for nic in kind.nics:
        for name in EVERY if nic.refuses else ():
            refuse(machine, f"{IB}/{nic.name}/ports/1/counters/{name}", "EINVAL")
    if any(nic.layer == "InfiniBand" for nic in kind.nics):
        machine.command("ibstat", "".join(_ibstat(nic) for nic in kind.nics if nic.driver == "mlx5_core"))


def _ibstat(nic: Nic) -> str:
    state, physical = ("Active", "LinkUp") if nic.up else ("Down", "Polling")
    text = ibstat_text(nic.name, state=state, physical=physical)
    text = text.replace("Rate: 400", f"Rate: {nic.rate.split()[0]}")
    return text.replace("Link layer: InfiniBand", f"Link layer: {nic.layer}")


def _nic_files(nic: Nic, place: int) -> dict[str, str | None]:
    folder, port, bus = f"{IB}/{nic.name}", f"{IB}/{nic.name}/ports/1", f"{PCI}/{nic.address}"
    data = "8123456789\n" if nic.traffic else "0\n"
    counted = dict.fromkeys(EVERY, "0\n") | dict.fromkeys(("port_rcv_data", "port_xmit_data"), data)
    files: dict[str, str | None] = {
        f"{folder}/device/uevent": f"DRIVER={nic.driver}\nPCI_CLASS=20000\nPCI_SLOT_NAME={nic.address}\n",
        f"{folder}/board_id": nic.board and f"{nic.board}\n",
        f"{port}/state": "4: ACTIVE\n" if nic.up else "1: DOWN\n",
        f"{port}/phys_state": "5: LinkUp\n" if nic.up else "2: Polling\n",
        f"{port}/rate": f"{nic.rate}\n",
        f"{port}/link_layer": f"{nic.layer}\n",
        f"/sys/class/infiniband_verbs/uverbs{place}/ibdev": f"{nic.name}\n",
        f"{bus}/vendor": f"{nic.vendor}\n",
        f"{bus}/class": "0x020700\n" if nic.layer == "InfiniBand" else "0x020000\n",
        f"{bus}/device": f"{nic.model}\n",
        f"{bus}/uevent": f"DRIVER={nic.driver}\nPCI_SLOT_NAME={nic.address}\n",
        f"{bus}/numa_node": f"{nic.numa}\n",
        f"{bus}/current_link_width": f"{nic.lanes[0]}\n",
        f"{bus}/max_link_width": f"{nic.lanes[1]}\n",
        f"{bus}/current_link_speed": f"{nic.speed[0]}\n",
        f"{bus}/max_link_speed": f"{nic.speed[1]}\n",
        **{f"{port}/counters/{name}": text for name, text in counted.items() if not nic.refuses},
        **{f"{port}/hw_counters/{name}": "0\n" for name in nic.hardware},
    }
    if nic.layer == "Ethernet":
        zero = "0000:0000:0000:0000:0000:0000:0000:0000\n"
        files |= {f"{port}/gids/{entry}": zero for entry in range(16)}
        files[f"{port}/gids/3"] = f"0000:0000:0000:0000:0000:ffff:0a00:{place:04x}\n"
        files[f"{port}/gid_attrs/types/3"] = "RoCE v2\n"
    if nic.net is not None:
        files |= interface(nic.net, index=place + 10, flags=nic.flags, state="up" if nic.up else "down")
    return files


def _nic_lists(nic: Nic) -> dict[str, Sequence[str] | None]:
    port = f"{IB}/{nic.name}/ports/1"
    return {
        f"{IB}/{nic.name}/ports": ["1"],
        f"{IB}/{nic.name}/device/net": [nic.net] if nic.net else None,
        f"{port}/counters": EVERY,
        f"{port}/hw_counters": nic.hardware,
        f"{PCI}/{nic.address}/physfn": None,
    }


def rails(first: int = 0, count: int = 8, **more: object) -> tuple[Nic, ...]:
    """That many single-port adapters, half of them on each socket, each with its own bus."""
    buses = (0x18, 0x3A, 0x4D, 0x5D, 0x9B, 0xBA, 0xCA, 0xDB)
    names = range(first, first + count)
    return tuple(
        Nic(name=f"mlx5_{name}", address=f"0000:{buses[place]:02x}:00.0", numa=2 * place // count, **more)  # type: ignore[arg-type]
        for place, name in enumerate(names)
    )


def bridge(first: int, address: str = "0000:81:00") -> tuple[Nic, ...]:
    """The ConnectX-7 that manages NVSwitches."""
    return tuple(
        Nic(name=f"mlx5_{first + number}", address=f"{address}.{number}", board="MT_0000001121", numa=1, lanes=(2, 2),
            speed=(GEN4, GEN4), net=f"ibo{6 + number}", flags="0x1002", refuses=True, traffic=False)
        for number in range(4)
    )  # fmt: skip


def dual(first: int, bus: str, *nets: str, lit: int = 1, **more: object) -> tuple[Nic, ...]:
    """An Ethernet card of two ports, of which the first `lit` have a cable."""
    values: dict[str, object] = {"board": "MT_0000000359", "model": "0x101d", "lanes": (16, 16), "speed": (GEN4, GEN4),
                                 "rate": "100 Gb/sec (4X EDR)", "layer": "Ethernet", **more}  # fmt: skip
    return tuple(
        Nic(name=f"mlx5_{first + number}", address=f"0000:{bus}:00.{number}", net=net, up=number < lit,
            traffic=number < lit, **values)  # type: ignore[arg-type]
        for number, net in enumerate(nets)
    )  # fmt: skip


def broadcom(count: int = 8) -> tuple[Nic, ...]:
    return tuple(
        Nic(name=f"bnxt_re{number}", address=f"0000:{0x20 + 8 * number:02x}:00.0", board=None, model="0x1760",
            vendor="0x14e4", driver="bnxt_en", layer="Ethernet", net=f"ens{number}np0", numa=2 * number // count,
            hardware=BNXT_HARDWARE, refuses=True)
        for number in range(count)
    )  # fmt: skip


SUPERNICS = rails(board="MT_0000001069", model="0xa2dc", layer="Ethernet")
# 800 Gb/s over a PCIe link of generation 6: HGX B300 has a ConnectX-8 for each GPU on its own board.
CONNECTX8 = rails(board="MT_0000001223", model="0x1023", rate="800 Gb/sec (4X XDR)", speed=("64.0 GT/s PCIe",) * 2)
HEALTHY: dict[str, Kind] = {
    "DGX B200": Kind(gpus="8 B200", nics=(*bridge(0, "0000:05:00"), *rails(4), *dual(12, "29", "ens1f0", "ens1f1"))),
    "HGX B200, two functions limited": Kind(
        gpus="8 B200",
        nics=(*rails(), *(replace(nic, refuses=number < 2) for number, nic in enumerate(bridge(8)))),
    ),
    "HGX B300": Kind(gpus="8 B300", nics=(*CONNECTX8, *bridge(8))),
    "BlueField rails and DPU": Kind(
        gpus="8 B200",
        nics=(
            *(SUPERNICS[n] for n in range(8)),
            *dual(8, "bc", "ens33f1", "ens33f0", board="MT_0000000884", model="0xa2dc", rate="200 Gb/sec (4X HDR)",
                  speed=(GEN5, GEN5), numa=1),
        ),
        default="br-ex",
        lower={"br-ex": ("ens33f1",)},
    ),
    "Broadcom": Kind(gpus="8 H100", nics=broadcom()),
    "H100, storage and management": Kind(
        gpus="8 H100",
        nics=(*rails(), *dual(8, "1b", "enp27f0", "enp27f1"), *dual(10, "9d", "enp157f0", "enp157f1", numa=1)),
        default="bond0",
        lower={"bond0": ("enp27f0", "enp157f0")},
    ),
    "management of the rails' board in a narrow slot": Kind(
        gpus="8 H100",
        nics=(*rails(layer="Ethernet"), Nic(name="mlx5_8", address="0000:01:00.0", layer="Ethernet", net="ens9",
                                            rate="100 Gb/sec (4X EDR)", lanes=(8, 16), speed=(GEN4, GEN5))),
        default="ens9",
    ),
}  # fmt: skip


def node(name: str) -> Callable[[Machine], None]:
    return lambda machine: compose(machine, HEALTHY[name])
