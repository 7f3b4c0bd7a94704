"""Machines of the classes of input that were once judged too mildly or accused wrongly: one change each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from gpu_faults import SAMPLES, SMI, kernel, make
from nodes import IB, infiniband, interface, plain_vm, put, roce

from machines import PCI, Machine

ADDRESSES = [f"0000:{16 + n:02x}:00.0" for n in range(8)]
GB = "NVIDIA GB999"
RESET = "NVRM: Xid (PCI:0000:13:00): 154, GPU recovery action changed from 0x{0} ({1}) to 0x{2} ({3})"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A machine, the checks that judge it, what is expected of it, and the verdict before and now."""

    name: str
    check: str
    put: Callable[[Machine], None]
    before: str
    after: str
    expect: tuple[str, ...] = ()


def gpus(gpu: int | None, changes: dict[str, str | None]) -> Callable[[Machine], None]:
    def change(machine: Machine) -> None:
        make(machine)
        machine.edit(gpu, changes)

    return change


def links(model: str, down: int | None) -> Callable[[Machine], None]:
    """Eight GPUs of a model; all links of one GPU, or of all, are down."""

    def change(machine: Machine) -> None:
        make(machine)
        machine.edit(None, {"product_name": model})
        text = machine.host.run("nvidia-smi", "nvlink", "-s").stdout
        if down is None:
            text = text.replace("26.562 GB/s", "<inactive>")
        else:
            before, head, rest = text.partition(f"GPU {down}:")
            mine, split, others = rest.partition(f"GPU {down + 1}:")
            text = before + head + mine.replace("26.562 GB/s", "<inactive>") + split + others
        machine.command("nvidia-smi nvlink -s", text)

    return change


def log(*lines: str) -> Callable[[Machine], None]:
    def change(machine: Machine) -> None:
        make(machine)
        for line in lines:
            kernel(line)(machine)

    return change


def cpu_node(*lines: str) -> Callable[[Machine], None]:
    """A machine without a GPU and with these lines in its kernel log."""

    def change(machine: Machine) -> None:
        plain_vm(machine)
        for line in lines:
            kernel(line)(machine)

    return change


def early(line: str) -> Callable[[Machine], None]:
    """A line of the kernel before the NVIDIA driver is loaded."""

    def change(machine: Machine) -> None:
        make(machine)
        machine.replace("dmesg", "[    0.926822] NVRM: loading", f"[    0.8] {line}\n[    0.926822] NVRM: loading")

    return change


def said(stderr: str = "", after: str = "") -> Callable[[Machine], None]:
    def change(machine: Machine) -> None:
        make(machine)
        machine.command(SMI, machine.host.run(*SMI.split()).stdout + after, stderr=stderr)

    return change


def diag(change: Callable[[dict[str, object]], None]) -> Callable[[Machine], None]:
    """DCGM 4's JSON of four GPUs that pass, changed result by result."""

    def build(machine: Machine) -> None:
        make(machine, 4)
        document = json.loads((SAMPLES / "dcgm-4.2-healthy.json").read_text())
        _walk(document, change)
        machine.command("dcgmi diag -r 1 -j", json.dumps(document))

    return build


def _walk(node: object, change: Callable[[dict[str, object]], None]) -> None:
    if isinstance(node, dict):
        if "entity_id" in node and "status" in node:
            change(node)
        for inner in node.values():
            _walk(inner, change)
    elif isinstance(node, list):
        for inner in node:
            _walk(inner, change)


def lost_beginning(machine: Machine) -> None:
    make(machine)
    machine.command("dmesg", "[99999.0] eth0: link becomes ready\n")
    machine.refuses("journalctl -k -b --no-pager -o short-monotonic", "CommandMissing", "no journalctl")
    for path in ("/var/log/kern.log", "/var/log/messages"):
        machine.file(path, None)


def unbound(machine: Machine) -> None:
    make(machine)
    infiniband(machine, ports=7)
    machine.answer("list", PCI, [*ADDRESSES, "0000:c0:00.0"])
    for name, text in (("vendor", "0x15b3"), ("class", "0x020000"), ("uevent", "PCI_SLOT_NAME=0000:c0:00.0")):
        machine.file(f"{PCI}/0000:c0:00.0/{name}", f"{text}\n")


def dark(machine: Machine) -> None:
    make(machine)
    infiniband(machine)
    names = [f"mlx5_{n}" for n in range(8)]
    put(machine, files={f"{IB}/{name}/ports/1/state": "1: DOWN\n" for name in names})
    put(machine, files={f"{IB}/{name}/ports/1/phys_state": "2: Polling\n" for name in names})
    machine.refuses("ibstat", "CommandMissing", "ibstat is not on this machine")


def rails(*down: int, flags: str | None) -> Callable[[Machine], None]:
    """Eight RoCE rails, some without a link. `flags` of their interfaces; None: in another network namespace."""

    def change(machine: Machine) -> None:
        make(machine)
        roce(machine, ports=8)
        for number in down:
            port = f"{IB}/mlx5_{number}/ports/1"
            put(machine, files={f"{port}/state": "1: DOWN\n", f"{port}/phys_state": "3: Disabled\n"})
            put(machine, files=interface(f"eth{number + 1}", index=number + 3, flags=flags or "0x1003", state="down"),
                lists={f"{IB}/mlx5_{number}/device/net": [] if flags is None else [f"eth{number + 1}"]})  # fmt: skip

    return change


def adapter(kind: str, driver: str) -> Callable[[Machine], None]:
    """Eight ports with their cards on the bus, and a ninth card of that class and driver without an RDMA device."""

    def change(machine: Machine) -> None:
        make(machine)
        (infiniband if kind == "0x020700" else roce)(machine, ports=8)
        cards = [f"0000:{0x80 + number:02x}:00.0" for number in range(8)]
        bus = dict.fromkeys(cards, "mlx5_core") | {"0000:90:00.1": driver}
        for number, card in enumerate(cards):
            text = f"DRIVER=mlx5_core\nPCI_SLOT_NAME={card}\n"
            put(machine, files={f"{IB}/mlx5_{number}/device/uevent": text})
        for address, name in bus.items():
            words = {"vendor": "0x15b3", "class": kind, "device": "0x1021", "uevent": f"DRIVER={name}"}
            put(machine, files={f"{PCI}/{address}/{word}": f"{text}\n" for word, text in words.items()},
                lists={f"{PCI}/{address}/physfn": None})  # fmt: skip
        machine.answer("list", PCI, [*ADDRESSES, *bus])

    return change


def flaps(machine: Machine) -> None:
    make(machine)
    infiniband(machine)
    counters = f"{IB}/mlx5_3/ports/1/counters"
    put(machine, files={f"{counters}/link_downed": "500\n", f"{counters}/symbol_error": "ERR\n"})


def few_counters(machine: Machine) -> None:
    make(machine)
    infiniband(machine)
    put(machine, files={}, lists={f"{IB}/mlx5_3/ports/1/counters": ["port_rcv_errors"]})


def no_rate(machine: Machine) -> None:
    make(machine)
    infiniband(machine)
    put(machine, files={f"{IB}/mlx5_3/ports/1/rate": "\n"})


def offline(master: str | None) -> Callable[[Machine], None]:
    def change(machine: Machine) -> None:
        make(machine)
        machine.file("/sys/class/net/eth0/operstate", "down\n")
        machine.answer("env", "MASTER_ADDR", master)

    return change


def no_route(machine: Machine) -> None:
    make(machine)
    route = "eth0\t0000000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n"
    machine.file("/proc/net/route", f"Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n{route}")
    machine.answer("env", "MASTER_ADDR", "10.9.0.1")


def timeouts(machine: Machine) -> None:
    make(machine)
    infiniband(machine)
    port = f"{IB}/mlx5_3/ports/1/hw_counters"
    put(machine, files={f"{port}/local_ack_timeout_err": "5000000\n"}, lists={port: ["local_ack_timeout_err"]})


def mig(machine: Machine) -> None:
    make(machine)
    machine.edit(None, {"mig_mode/current_mig": "Enabled", "mig_mode/pending_mig": "Enabled"})
    empty, slices = (
        "<mig_devices>\n\t\t\tNone\n\t\t</mig_devices>",
        "".join(
            f"<mig_device><index>{n}</index><gpu_instance_id>{n + 3}</gpu_instance_id></mig_device>" for n in range(2)
        ),
    )
    text = machine.host.run(*SMI.split()).stdout
    assert empty in text
    machine.smi(text.replace(empty, f"<mig_devices>{slices}</mig_devices>"))
    for option in ("-s", "-e"):
        machine.command(f"nvidia-smi nvlink {option}", "", exit_code=3, stderr="Not supported in MIG mode")


def _skip_second(row: dict[str, object]) -> None:
    """Every test of GPU 2."""
    if row["entity_id"] == 2:
        row.update(status="Skip")


def clique(machine: Machine) -> None:
    gpus(None, {"fabric/cliqueId": "1"})(machine)
    machine.edit(3, {"fabric/cliqueId": "2"})


def file(path: str, text: str) -> Callable[[Machine], None]:
    """One other file of a machine with eight GPUs."""

    def change(machine: Machine) -> None:
        make(machine)
        machine.file(path, text)

    return change


def uncounted(machine: Machine) -> None:
    make(machine)
    machine.command("nvidia-smi nvlink -e", "")


VOLATILE = "ecc_errors/volatile"
CASES = (
    Case(name="0 a profile of a GPU on a machine without one", check="gpu_model,cpu", put=plain_vm, before="PASS",
         after="FAIL", expect=("H200",)),
    Case(name="1 links of one GPU of an unknown model down", check="gpu_nvlink", put=links(GB, 3), before="PASS",
         after="FAIL"),
    Case(name="1 all links of an unknown model down, fabric state reported", check="gpu_nvlink", put=links(GB, None),
         before="INCOMPLETE", after="FAIL"),
    Case(name="2 NVLink error counters not given", check="gpu_nvlink", before="PASS", after="INCOMPLETE",
         put=uncounted),
    Case(name="3 DCGM: every test skipped on one GPU", check="dcgm", before="INCOMPLETE", after="INCOMPLETE",
         put=diag(_skip_second)),
    Case(name="3 DCGM: Pass with a warning of severity isolate", check="dcgm", before="PASS", after="FAIL",
         put=diag(lambda row: row.update(warnings=[{"warning": "bad", "error_severity": 2, "error_id": 1}])
                  if row["entity_id"] == 2 else None)),
    Case(name="4 RmInitAdapter failed", check="xid", before="PASS", after="FAIL",
         put=log("NVRM: GPU 0000:13:00.0: RmInitAdapter failed! (0x24:0x72:1568)")),
    Case(name="4 fallen off the bus, in three lines", check="xid", before="PASS", after="FAIL",
         put=log("NVRM: The NVIDIA GPU 0000:13:00.0", "NVRM: (PCI ID: 10de:2335) installed in this system has",
                 "NVRM: fallen off the bus and is not responding to commands.")),
    Case(name="4 AER uncorrected error on a GPU", check="xid", before="PASS", after="FAIL",
         put=log("nvidia 0000:13:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer")),
    Case(name="4 a file system remounted read-only", check="xid", before="PASS", after="FAIL",
         put=log("EXT4-fs (nvme0n1p1): Remounting filesystem read-only")),
    Case(name="4 soft lockup", check="xid", before="PASS", after="FAIL",
         put=log("watchdog: BUG: soft lockup - CPU#3 stuck for 23s! [python:1234]")),
    Case(name="4 kernel oops", check="xid", before="PASS", after="FAIL",
         put=log("BUG: kernel NULL pointer dereference, address: 0000000000000008", "Oops: 0002 [#1] SMP NOPTI")),
    Case(name="4 a memory page lost", check="xid", before="PASS", after="FAIL",
         put=log("Memory failure: 0x1234: recovery action for dirty LRU page: Failed")),
    Case(name="4 a RAID array lost a disk", check="xid", before="PASS", after="FAIL",
         put=log("md/raid1:md0: Disk failure on sda1, disabling device.")),
    Case(name="4 BTRFS errors", check="xid", before="PASS", after="FAIL",
         put=log("BTRFS error (device nvme0n1): bdev /dev/nvme0n1 errs: wr 0, rd 0, flush 0, corrupt 5, gen 0")),
    Case(name="4 IOMMU fault of a GPU", check="xid", before="PASS", after="FAIL",
         put=log("DMAR: [DMA Read NO_PASID] Request device [13:00.0] fault addr 0x0 [fault reason 0x06]")),
    Case(name="4 a device that does not return from its reset", check="xid", before="PASS", after="FAIL",
         put=log("pci 0000:13:00.0: not ready 65535ms after FLR; giving up")),
    Case(name="4 NFS server not responding", check="xid", before="PASS", after="FAIL",
         put=log("nfs: server fs1 not responding, timed out")),
    Case(name="4 NFS server that came back", check="xid", before="PASS", after="WARN",
         put=log("nfs: server fs1 not responding, still trying", "nfs: server fs1 OK")),
    Case(name="4 evicted by Lustre", check="xid", before="PASS", after="FAIL",
         put=log("LustreError: 167-0: fsx-MDT0000-mdc-ff: This client was evicted by fsx-MDT0000; in progress")),
    Case(name="4 suppressed messages of the GPU driver", check="xid", before="PASS", after="INCOMPLETE",
         put=log("NVRM: Xid: 2000 callbacks suppressed")),
    Case(name="4 TX timeout of an adapter", check="xid", before="PASS", after="WARN",
         put=log("mlx5_core 0000:5e:00.0 ens1f0np0: TX timeout detected")),
    Case(name="4 a hot adapter", check="xid", before="PASS", after="WARN",
         put=log("mlx5_core 0000:5e:00.0: temp_warn:192: High temperature on sensors with bit set 0 1")),
    Case(name="4 fatal PCIe error of an adapter before the GPU driver loads", check="xid", before="PASS", after="FAIL",
         put=early("mlx5_core 0000:5e:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer")),
    Case(name="4 Xid 79 before a line that quotes a kernel version", check="xid", before="PASS", after="FAIL",
         put=log("NVRM: Xid (PCI:0000:13:00): 79, GPU has fallen off the bus.", 'audit: comm="uname" Linux version 6')),
    Case(name="4 uncorrectable memory error without a GPU", check="xid,cpu", before="PASS", after="FAIL",
         put=cpu_node("EDAC MC0: 1 UE memory read error on CPU_SrcID#0")),
    Case(name="4 read-only file system, gpus=0 stated", check="xid,cpu", before="PASS", after="FAIL",
         expect=("gpus=0",), put=log("EXT4-fs (sda1): Remounting filesystem read-only")),
    Case(name="4 a log that lost its beginning", check="xid", before="PASS", after="INCOMPLETE", put=lost_beginning),
    Case(name="5 an adapter on the bus without a driver", check="ib_ports", before="PASS", after="FAIL", put=unbound),
    Case(name="5 eight ports without a link", check="ib_ports", before="WARN", after="FAIL", put=dark),
    Case(name="5 a RoCE rail without a link, its interface switched off", check="ib_ports", before="PASS", after="FAIL",
         put=rails(3, flags="0x1002")),
    Case(name="5 a RoCE rail without a link, its interface in another namespace", check="ib_ports", before="PASS",
         after="FAIL", put=rails(3, flags=None)),
    Case(name="5 seven of eight RoCE rails without a link", check="ib_ports", before="PASS", after="FAIL",
         put=rails(*range(1, 8), flags=None)),
    Case(name="5 a bound RoCE adapter without an RDMA device", check="ib_ports", before="PASS", after="FAIL",
         put=adapter("0x020000", "mlx5_core")),
    Case(name="5 the rate of one port unreadable", check="ib_ports", before="WARN", after="INCOMPLETE", put=no_rate),
    Case(name="5 counters absent on one port of eight", check="ib_counters", before="PASS", after="INCOMPLETE",
         put=few_counters),
    Case(name="5 500 link flaps behind an unreadable counter", check="ib_counters", before="INCOMPLETE", after="FAIL",
         put=flaps),
    Case(name="5 the only network interface down", check="nccl_interfaces,cpu", before="PASS", after="FAIL",
         put=offline(None)),
    Case(name="5 MASTER_ADDR set and no network", check="nccl_interfaces,cpu", before="PASS", after="FAIL",
         put=offline("10.0.0.1")),
    Case(name="5 no route to MASTER_ADDR", check="nccl_interfaces", before="PASS", after="FAIL", put=no_route),
    Case(name="5 five million ack timeouts in ten days", check="ib_counters", before="PASS", after="FAIL",
         put=timeouts),
    Case(name="7 ECC mode N/A", check="gpu_ecc", before="PASS", after="INCOMPLETE",
         put=gpus(3, {"ecc_mode/current_ecc": "N/A"})),
    Case(name="7 fabric state N/A on one GPU of eight", check="gpu_fabric", before="PASS", after="INCOMPLETE",
         put=gpus(3, {"fabric/state": "N/A"})),
    Case(name="7 remap N/A on one GPU of eight", check="gpu_remap", before="PASS", after="INCOMPLETE",
         put=gpus(3, {"remapped_rows": "N/A"})),
    Case(name="7 slowdown N/A", check="gpu_throttle", before="PASS", after="INCOMPLETE",
         put=gpus(3, {"clocks_event_reasons/clocks_event_reason_hw_slowdown": "N/A"})),
    Case(name="7 PCIe width N/A", check="gpu_pcie", before="PASS", after="INCOMPLETE",
         put=gpus(3, {"pci/pci_gpu_link_info/link_widths/current_link_width": "N/A"})),
    Case(name="7 a lost GPU", check="gpu_count", before="PASS", after="FAIL",
         put=gpus(3, {"compute_mode": "GPU is lost"})),
    Case(name="7 uncorrectable errors behind a missing SRAM count", check="gpu_ecc", before="INCOMPLETE", after="FAIL",
         put=gpus(3, {f"{VOLATILE}/dram_uncorrectable": "5", f"{VOLATILE}/sram_uncorrectable_parity": "N/A",
                      f"{VOLATILE}/sram_uncorrectable_secded": "N/A"})),
    Case(name="7 HBM at 120 °C", check="gpu_temperature", before="PASS", after="FAIL",
         put=gpus(3, {"temperature/memory_temp": "120 C"})),
    Case(name="7 ECC off after the next reset", check="gpu_ecc", before="PASS", after="WARN",
         put=gpus(3, {"ecc_mode/pending_ecc": "Disabled"})),
    Case(name="7 a lower clock than equal GPUs", check="gpu_clocks,gpu_peers", before="PASS", after="FAIL",
         put=gpus(3, {"max_clocks/sm_clock": "1000 MHz"})),
    Case(name="7 a smaller BAR1 than equal GPUs", check="gpu_memory,gpu_peers", before="PASS", after="FAIL",
         put=gpus(3, {"bar1_memory_usage/total": "256 MiB"})),
    Case(name="7 counters that only equal GPUs report", check="gpu_throttle,gpu_peers", before="PASS",
         after="INCOMPLETE", put=gpus(3, {"clocks_event_reasons_counters": None})),
    Case(name="7 another board than equal GPUs", check="gpu_model,gpu_peers", before="PASS", after="WARN",
         put=gpus(3, {"pci/pci_sub_system_id": "16C110DE"})),
    Case(name="7 uncorrectable SRAM errors by source only", check="gpu_ecc", before="PASS", after="WARN",
         put=gpus(3, {"ecc_errors/aggregate_uncorrectable_sram_sources/sram_l2": "7"})),
    Case(name="7 a power draw of 0 W", check="gpu_power", before="PASS", after="INCOMPLETE",
         put=gpus(3, {"gpu_power_readings/instant_power_draw": "0.00 W"})),
    Case(name="7 mig=true and no MIG device", check="gpu_modes", before="PASS", after="FAIL", expect=("mig=true",),
         put=gpus(None, {"mig_mode/current_mig": "Enabled", "mig_mode/pending_mig": "Enabled"})),
    Case(name="7 PCIe replays", check="gpu_pcie", before="PASS", after="WARN",
         put=gpus(3, {"pci/replay_counter": "250000"})),
    Case(name="7 another clique than the other GPUs", check="gpu_fabric", before="PASS", after="FAIL",
         put=clique),
    Case(name="8 no CPU in any NUMA node", check="numa", before="INCOMPLETE", after="INCOMPLETE",
         put=file("/sys/devices/system/node/node0/cpulist", "\n")),
    Case(name="8 a memory limit without a number", check="ram", before="PASS", after="INCOMPLETE",
         expect=("ram_gib=100",), put=file("/sys/fs/cgroup/memory.max", "\n")),
    Case(name="8 memory.events is garbage", check="oom_kills", before="PASS", after="INCOMPLETE",
         expect=("oom_kills=0",), put=file("/sys/fs/cgroup/memory.events", "garbage\n")),
    Case(name="8 memory.stat is garbage", check="ram", before="PASS", after="INCOMPLETE",
         put=file("/sys/fs/cgroup/memory.stat", "garbage\n")),
    Case(name="8 the control group of the process is garbage", check="ram,cpu", before="PASS", after="INCOMPLETE",
         put=file("/proc/self/cgroup", "garbage\n")),
    Case(name="nvidia-smi warns of a device handle, exit 0", check="gpu_count", before="PASS", after="FAIL",
         put=said(stderr="Unable to determine the device handle for GPU 0000:13:00.0: Unknown Error\n")),
    Case(name="nvidia-smi warns of an infoROM on stderr", check="gpu_vbios", before="PASS", after="FAIL",
         put=said(stderr="WARNING: infoROM is corrupted at gpu 0000:13:00.0\n")),
    Case(name="false alarm: MIG with mig=true", check="gpu_nvlink,gpu_modes", before="INCOMPLETE", after="PASS",
         put=mig, expect=("mig=true",)),
    Case(name="false alarm: an InfiniBand function passed to a VM", check="ib_ports", before="FAIL", after="PASS",
         put=adapter("0x020700", "vfio-pci")),
    Case(name="false alarm: corrected machine checks", check="xid", before="FAIL", after="WARN",
         put=log("mce: [Hardware Error]: Machine check events logged",
                 "[Hardware Error]: Corrected error, no action required.")),
    Case(name="false alarm: Xid 154 cleared to None", check="xid", before="FAIL", after="PASS",
         put=log(RESET.format(0, "None", 1, "GPU Reset Required"), RESET.format(1, "GPU Reset Required", 0, "None"))),
    Case(name="false alarm: Xid before the last reset", check="xid", before="FAIL", after="PASS",
         put=log("NVRM: Xid (PCI:0000:13:00): 48, pid=1, DBE", "NVRM: loading NVIDIA UNIX Open Kernel Module 580.1")),
)  # fmt: skip
