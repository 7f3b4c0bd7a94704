"""Faults of system and fabric, one change each on a recorded node, with the finding that it must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fabric_nodes import node as fabric_node
from nodes import CHRONYC, IB, MOUNTS, NET, bare_metal, efa, ibstat_text, infiniband, interface, put, roce

from machines import Machine

GIB = 1 << 30
Change = Callable[[Machine], None]

FROZEN = MOUNTS.replace("ext4 /dev/nvme0n1p2 rw", "ext4 /dev/nvme0n1p2 ro,errors=remount-ro")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is broken on which node, and what must be said of it."""

    name: str
    check: str
    verdict: str
    says: str  # part of the reason
    break_it: Change
    node: Change = lambda machine: None
    device: str | None = None
    expect: dict[str, Any] = field(default_factory=dict)


def text(path: str, content: str | None) -> Change:
    return lambda machine: put(machine, files={path: content})


def env(name: str, value: str) -> Change:
    return lambda machine: machine.answer("env", name, value)


def disk(path: str, **answer: int | None) -> Change:
    whole = {"total_bytes": 64 * GIB, "free_bytes": 60 * GIB, "free_files": 1000} | answer
    return lambda machine: machine.answer("disk", path, whole)


def limits(locked: str = "unlimited", files: int = 1048576) -> Change:
    lines = f"Max open files   {files}   1048576   files\nMax locked memory   {locked}   unlimited   bytes\n"
    return text("/proc/self/limits", lines + "Max processes   unlimited   unlimited   processes\n")


def port(device: str, **words: str) -> Change:
    return lambda machine: put(
        machine, files={f"{IB}/{device}/ports/1/{name}": f"{word}\n" for name, word in words.items()}
    )


def gone(device: str) -> Change:
    return lambda machine: put(machine, files={}, lists={IB: [n for n in machine.host.list(IB) if n != device]})


def swapped(machine: Machine) -> None:
    plain = machine.text("files/proc/meminfo").replace("SwapFree:        8300000", "SwapFree:         388604")
    put(machine, files={"/proc/meminfo": plain})


def killed(log: str | None) -> Change:
    def change(machine: Machine) -> None:
        put(machine, files={"/proc/vmstat": "oom_kill 2\n"})
        if log is None:
            machine.command("dmesg", "", exit_code=1, stderr="dmesg: Operation not permitted")
        else:
            machine.command("dmesg", f"[ 99.1] Linux\n[ 9400.0] {log}\n[ 9401.0] {log}\n")

    return change


def governor(driver: str, preference: str | None) -> Change:
    folder = "/sys/devices/system/cpu/cpufreq/policy3"
    return lambda machine: put(machine, files={
        f"{folder}/scaling_driver": f"{driver}\n", f"{folder}/scaling_governor": "powersave\n",
        f"{folder}/energy_performance_preference": preference and f"{preference}\n",
    })  # fmt: skip


def clock(**words: str) -> Change:
    return lambda machine: machine.command("chronyc -c tracking", CHRONYC.format(**words))


def loose_clock(machine: Machine) -> None:
    clock(offset="0.0", leap="Not synchronised")(machine)
    machine.answer("clock", "", {"synchronised": False, "max_error_s": 16.0})


def hung(path: str) -> Change:
    return lambda machine: machine.refuses(f"stat -f -c %T {path}", "CommandTimedOut", "stat gave no answer in 5 s")


def stale(path: str) -> Change:
    said = f"stat: cannot read file system information for '{path}': Stale file handle"
    return lambda machine: machine.command(f"stat -f -c %T {path}", "", exit_code=1, stderr=said)


def panic(machine: Machine) -> None:
    machine.command(
        "ibstat",
        "",
        exit_code=255,
        stderr="ibpanic: [4242] main: stat of IB device 'mlx5_0' failed: No such file or directory\n",
    )


def no_provider(machine: Machine) -> None:
    machine.command("fi_info -p efa", "", exit_code=61, stderr="fi_getinfo: -61 (No data available)\n")


def probe(stdout: str, **more: Any) -> Change:
    return lambda machine: machine.command("python -m trainmaster.node.probe_disk .", stdout, **more)


def roce_linklocal(machine: Machine) -> None:
    zero = "0000:0000:0000:0000:0000:0000:0000:0000\n"
    put(machine, files={f"{IB}/mlx5_1/ports/1/gids/{n}": zero for n in (2, 3)})


def no_gid(machine: Machine) -> None:
    put(machine, files={f"{IB}/mlx5_1/ports/1/gids/{n}": "0000:0000:0000:0000:0000:0000:0000:0000\n" for n in range(4)})


def both(*changes: Change) -> Change:
    def change(machine: Machine) -> None:
        for one in changes:
            one(machine)

    return change


def bridge_first(machine: Machine) -> None:
    routes = "Iface\tDestination\neth0\t00000000\nvirbr0\t007AA8C0\n"
    files = {"/proc/net/route": routes, **interface("virbr0", index=1)}
    put(machine, files=files, lists={NET: ["eth0", "lo", "virbr0"]})


def second_route(machine: Machine) -> None:
    """The network of MASTER_ADDR is behind a second interface, which is down."""
    routes = machine.text("files/proc/net/route")
    routes += "eth1\t0000090A\t00000000\t0001\t0\t0\t100\t0000FFFF\t0\t0\t0\n"
    put(machine, files={"/proc/net/route": routes, **interface("eth1", index=3, state="down")},
        lists={NET: ["eth0", "eth1", "lo"]})  # fmt: skip
    machine.answer("env", "MASTER_ADDR", "10.9.0.1")


def modules(*names: str) -> Change:
    lines = "".join(f"{name} 4096 0 - Live 0x0\n" for name in names)
    return lambda machine: put(machine, files={"/proc/modules": lines}, lists={"/sys/module": names})


def closed_driver(machine: Machine) -> None:
    infiniband(machine)
    modules("nvidia", "nvidia_uvm", "ib_core", "ib_uverbs")(machine)
    put(machine, files={"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54\n"})


def efa_without_driver(machine: Machine) -> None:
    efa(machine)
    put(machine, files={}, lists={IB: machine.host.list(IB)[:30]})


def controllers_without_driver(machine: Machine) -> None:
    pci = "/sys/bus/pci/devices"
    put(machine, files={f"{pci}/0000:9a:00.0/vendor": "0x15b3\n", f"{pci}/0000:9a:00.0/class": "0x020700\n"},
        lists={pci: ["0000:00:00.0", "0000:9a:00.0"]})  # fmt: skip


ROUTES = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
OOM = "Out of memory: Killed process 4321 (python) total-vm:98765432kB, anon-rss:87654321kB, file-rss:1024kB, UID:0"
EIGHT = {"ib_ports": 8, "ib_rate_gbps": 400.0, "ib_link_layer": "InfiniBand"}
NDR200 = "200 Gb/sec (4X HDR)"
FAULTS = [
    Fault(name="disk full", check="disk_space", verdict="fail", says="0.2 of 64.0 GiB free",
          break_it=disk(".", free_bytes=GIB // 5)),
    Fault(name="no inodes", check="disk_space", verdict="fail", says="out of inodes", break_it=disk(".", free_files=0)),
    Fault(name="small /dev/shm", check="shm", verdict="warn", says="0.06 of 0.06 GiB",
          break_it=disk("/dev/shm", total_bytes=64 << 20, free_bytes=64 << 20)),
    Fault(name="memlock small with RDMA", check="memlock", verdict="warn", says="mlx5_0", node=infiniband,
          break_it=limits(locked="8388608")),
    Fault(name="open files 1024", check="open_files", verdict="warn", says="1024 files", break_it=limits(files=1024)),
    Fault(name="open files below the profile", check="open_files", verdict="fail", says="not 65536",
          break_it=limits(files=4096), expect={"open_files": 65536}),
    Fault(name="swap in use", check="swap", verdict="warn", says="7.6 of 8.0 GiB", node=bare_metal, break_it=swapped),
    Fault(name="OOM kill, logged", check="oom_kills", verdict="warn", says="killed 2 processes, last python",
          break_it=killed(OOM)),
    Fault(name="OOM kill, log closed", check="oom_kills", verdict="warn", says="2 processes killed", node=bare_metal,
          break_it=killed(None)),
    Fault(name="OOM kill in our container", check="oom_kills", verdict="warn", says="3 processes of this container",
          break_it=text("/sys/fs/cgroup/memory.events", "oom 9\noom_kill 3\n")),
    Fault(name="OOM kills above the profile", check="oom_kills", verdict="fail", says="2 processes killed",
          break_it=killed("Memory cgroup " + OOM.lower().replace("killed", "Killed")), expect={"oom_kills": 0}),
    Fault(name="memory pressure", check="memory_pressure", verdict="warn", says="42.1 %",
          break_it=text("/proc/pressure/memory", "some avg10=60.00 avg60=42.10 avg300=9.00 total=1\n"
                                                 "full avg10=30.00 avg60=20.00 avg300=4.00 total=1\n")),
    Fault(name="governor powersave", check="cpu_governor", verdict="warn", says="powersave with acpi-cpufreq",
          node=bare_metal, break_it=governor("acpi-cpufreq", None)),
    Fault(name="energy preference power", check="cpu_governor", verdict="warn", says="preference power",
          node=bare_metal, break_it=governor("intel_pstate", "power")),
    Fault(name="energy preference of one CPU group not shown", check="cpu_governor", verdict="error",
          says="policy5 shows no energy preference", node=bare_metal,
          break_it=text("/sys/devices/system/cpu/cpufreq/policy5/energy_performance_preference", None)),
    Fault(name="governor not the profile's", check="cpu_governor", verdict="fail", says="1 of 16", node=bare_metal,
          break_it=governor("intel_pstate", "balance_performance"), expect={"governor": "performance"}),
    Fault(name="foreign load", check="cpu_load", verdict="warn", says="load 61.5 on 16 CPUs",
          break_it=text("/proc/loadavg", "64.10 61.50 40.00 70/900 1234\n")),
    Fault(name="NTP unsynchronised", check="clock", verdict="warn", says="not synchronised", node=bare_metal,
          break_it=loose_clock),
    Fault(name="clock 2 s off", check="clock", verdict="warn", says="2.000000 s off", node=bare_metal,
          break_it=clock(offset="-2.0", leap="Normal")),
    Fault(name="clock 2 s off, stated", check="clock", verdict="fail", says="2.000000 s off", node=bare_metal,
          break_it=clock(offset="2.0", leap="Normal"), expect={"clock_offset_s": 0.1}),
    Fault(name="mount missing", check="mounts", verdict="fail", says="/fsx (lustre) is not mounted", device="/fsx",
          node=bare_metal, break_it=text("/proc/self/mountinfo", MOUNTS[: MOUNTS.index("41 22")]),
          expect={"mounts": ("/fsx:lustre", "/home")}),
    Fault(name="mount of the wrong kind", check="mounts", verdict="fail", says="nfs4 from 10.0.0.5:/home, not lustre",
          device="/home", node=bare_metal, break_it=lambda machine: None, expect={"mounts": ("/home:lustre",)}),
    Fault(name="mount hung", check="mounts", verdict="fail", says="does not answer in 5 s", device="/fsx",
          node=bare_metal, break_it=hung("/fsx"), expect={"mounts": ("/fsx",)}),
    Fault(name="root read-only after an error of its disk", check="mounts", verdict="fail", device="/",
          says="was made read-only by the kernel", node=bare_metal, break_it=text("/proc/self/mountinfo", FROZEN)),
    Fault(name="mount hung, nobody's", check="mounts", verdict="warn", says="does not answer", device="/home",
          node=bare_metal, break_it=hung("/home")),
    Fault(name="mount stale", check="mounts", verdict="warn", says="Stale file handle", device="/home",
          node=bare_metal, break_it=stale("/home")),
    Fault(name="own name unresolvable", check="hostname", verdict="warn", says="h200 does not resolve",
          break_it=lambda machine: machine.command("getent ahosts h200", "", exit_code=2)),
    Fault(name="first node unresolvable", check="hostname", verdict="fail", says="node-0 does not resolve",
          device="node-0", break_it=both(env("MASTER_ADDR", "node-0"),
                                         lambda machine: machine.command("getent ahosts node-0", "", exit_code=2))),
    Fault(name="peer resolves to itself", check="hostname", verdict="fail", says="it would connect to itself",
          device="node-1",
          break_it=both(env("SM_HOSTS", '["h200", "node-1"]'),
                        lambda machine: machine.command("getent ahosts node-1", "127.0.1.1 STREAM node-1\n"))),
    Fault(name="module nvidia missing", check="kernel_modules", verdict="fail", says="nvidia is not loaded",
          device="nvidia", break_it=modules("nvidia_uvm", "ext4")),
    Fault(name="module nvidia_uvm missing", check="kernel_modules", verdict="warn", says="nvidia_uvm",
          device="nvidia_uvm",
          break_it=modules("nvidia", "ext4")),
    Fault(name="expected module missing", check="kernel_modules", verdict="fail", says="nvidia_peermem is not loaded",
          device="nvidia_peermem", break_it=modules("nvidia", "nvidia_uvm"),
          expect={"kernel_modules": ("nvidia-peermem",)}),
    Fault(name="cgroup memory limit", check="ram", verdict="fail", says="16.0 GiB in this container, not 120",
          break_it=both(text("/sys/fs/cgroup/memory.max", f"{16 * GIB}\n"), text("/sys/fs/cgroup/memory.current",
          "0\n")),
          expect={"ram_gib": 120.0}),
    Fault(name="cgroup limit of processes", check="processes", verdict="warn",
          says="88 more may be started in this cont",
          break_it=both(text("/sys/fs/cgroup/pids.max", "100\n"), text("/sys/fs/cgroup/pids.current", "12\n"))),
    Fault(name="huge pages missing", check="huge_pages", verdict="fail", says="not 5128",
          break_it=lambda machine: None, expect={"huge_pages": 5128}),
    Fault(name="a socket's memory is gone", check="numa", verdict="warn", says="8 CPUs and no memory", device="node1",
          node=bare_metal, break_it=text("/sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:       0 kB\n")),
    Fault(name="GPU without a NUMA node", check="numa", verdict="warn", says="belongs to no NUMA node", device="gpu0",
          node=bare_metal, break_it=text("/sys/bus/pci/devices/0000:00:06.0/numa_node", "-1\n")),
    Fault(name="one NUMA node of two", check="numa", verdict="fail", says="1 NUMA nodes with CPUs, not 2",
          break_it=lambda machine: None, expect={"numa_nodes": 2}),
    Fault(name="disk slow", check="disk_io", verdict="warn", says="4 MiB/s written",
          break_it=probe('{"mib": 40, "intact": true, "write_mib_s": 4.0, "read_mib_s": 900.0}\n')),
    Fault(name="disk slower than the profile", check="disk_io", verdict="fail", says="at least 2000 to write",
          break_it=probe('{"mib": 256, "intact": true, "write_mib_s": 900.0, "read_mib_s": 900.0}\n'),
          expect={"disk_write_mib_s": 2000.0}),
    Fault(name="disk gives back other data", check="disk_io", verdict="fail", says="not what was written",
          break_it=probe('{"mib": 256, "intact": false, "write_mib_s": 900.0, "read_mib_s": 900.0}\n')),
    Fault(name="disk read-only", check="disk_io", verdict="fail", says="Read-only file system",
          break_it=probe('{"error": "[Errno 30] Read-only file system"}\n', exit_code=1)),
    Fault(name="disk hangs", check="disk_io", verdict="fail", says="did not finish", break_it=lambda machine:
          machine.refuses("python -m trainmaster.node.probe_disk .", "CommandTimedOut", "gave no answer")),
    Fault(name="port Polling", check="ib_ports", verdict="fail", says="DOWN and Polling", device="mlx5_3:1",
          node=infiniband, break_it=port("mlx5_3", state="1: DOWN", phys_state="2: Polling"), expect=EIGHT),
    Fault(name="port Polling, no profile", check="ib_ports", verdict="fail", says="7 of 8 equal adapters have a link",
          device="mlx5_3:1",
          node=infiniband, break_it=port("mlx5_3", state="1: DOWN", phys_state="2: Polling")),
    Fault(name="port Polling, two ports", check="ib_ports", verdict="warn", says="Polling", device="mlx5_1:1",
          node=lambda machine: infiniband(machine, ports=2),
          break_it=port("mlx5_1", state="1: DOWN", phys_state="2: Polling")),
    Fault(name="port rate unreadable", check="ib_ports", verdict="error", says="its rate cannot be read",
          device="mlx5_3:1", node=infiniband, break_it=port("mlx5_3", rate="")),
    Fault(name="port width unreadable", check="ib_ports", verdict="error", says="its width cannot be read",
          device="mlx5_3:1", node=infiniband, break_it=port("mlx5_3", rate="400 Gb/sec ( NDR)")),
    Fault(name="port Down", check="ib_ports", verdict="fail", says="DOWN", device="mlx5_0:1", node=infiniband,
          break_it=port("mlx5_0", state="1: DOWN", phys_state="6: LinkErrorRecovery"), expect=EIGHT),
    Fault(name="port Disabled", check="ib_ports", verdict="fail", says="Disabled", device="mlx5_7:1", node=infiniband,
          break_it=port("mlx5_7", state="1: DOWN", phys_state="3: Disabled"), expect=EIGHT),
    Fault(name="port Init: no subnet manager", check="ib_ports", verdict="fail", says="INIT", device="mlx5_2:1",
          node=infiniband, break_it=port("mlx5_2", state="2: INIT")),
    Fault(name="rate 200 of 400", check="ib_ports", verdict="fail", says="200 of 400 Gb/s", device="mlx5_5:1",
          node=infiniband, break_it=port("mlx5_5", rate=NDR200), expect=EIGHT),
    Fault(name="rate below its sisters", check="ib_ports", verdict="fail", says="other ports of this board run at 400",
          device="mlx5_5:1",
          node=infiniband, break_it=port("mlx5_5", rate=NDR200)),
    Fault(name="link layer wrong", check="ib_ports", verdict="fail", says="link layer Ethernet, not InfiniBand",
          device="mlx5_1:1", node=infiniband, break_it=port("mlx5_1", link_layer="Ethernet"), expect=EIGHT),
    Fault(name="port missing", check="ib_ports", verdict="fail", says="7 of 8 ports", node=infiniband,
          break_it=gone("mlx5_4"), expect=EIGHT),
    Fault(name="no fabric at all", check="ib_ports", verdict="fail", says="0 of 8 ports", break_it=lambda machine: None,
          expect=EIGHT),
    Fault(name="controller without a driver", check="ib_ports", verdict="fail", says="0000:9a:00.0",
          break_it=controllers_without_driver),
    Fault(name="state unreadable", check="ib_ports", verdict="error", says="cannot be read", device="mlx5_6:1",
          node=infiniband,
          break_it=port("mlx5_6", state="garbage")),
    Fault(name="ibstat sees it down", check="ib_ports", verdict="fail", says="for ibstat", device="mlx5_0:1",
          node=infiniband, break_it=lambda machine: machine.command(
              "ibstat", ibstat_text("mlx5_0", state="Down", physical="Polling"))),
    Fault(name="ibstat ibpanic", check="ib_ports", verdict="error", says="ibpanic", node=infiniband, break_it=panic),
    Fault(name="RoCE port without carrier", check="ib_ports", verdict="fail", says="Disabled", device="mlx5_2:1",
          node=roce, break_it=port("mlx5_2", state="1: DOWN", phys_state="3: Disabled")),
    Fault(name="symbol errors", check="ib_counters", verdict="fail", says="symbol_error", device="mlx5_4:1",
          node=infiniband, break_it=text(f"{IB}/mlx5_4/ports/1/counters/symbol_error", "94967295\n")),
    Fault(name="some symbol errors", check="ib_counters", verdict="warn", says="symbol_error", device="mlx5_4:1",
          node=infiniband, break_it=text(f"{IB}/mlx5_4/ports/1/counters/symbol_error", "9000\n")),
    Fault(name="link flaps", check="ib_counters", verdict="fail", says="went down 40 times", device="mlx5_6:1",
          node=infiniband, break_it=text(f"{IB}/mlx5_6/ports/1/counters/link_downed", "40\n")),
    Fault(name="receive errors", check="ib_counters", verdict="warn", says="port_rcv_errors", device="mlx5_0:1",
          node=infiniband, break_it=text(f"{IB}/mlx5_0/ports/1/counters/port_rcv_errors", "5000\n")),
    Fault(name="link flaps behind an unreadable counter", check="ib_counters", verdict="fail", says="40 times",
          device="mlx5_6:1", node=infiniband, break_it=both(
              text(f"{IB}/mlx5_6/ports/1/counters/link_downed", "40\n"),
              text(f"{IB}/mlx5_6/ports/1/counters/symbol_error", "ERR\n"))),
    Fault(name="counters that equal ports have", check="ib_counters", verdict="error", says="link_downed",
          device="mlx5_0:1", node=infiniband, break_it=lambda machine: put(
              machine, files={}, lists={f"{IB}/mlx5_0/ports/1/counters": ["port_rcv_errors"]})),
    Fault(name="one port of eight without a PMA", check="ib_counters", verdict="error", says="no symbol_error",
          device="mlx5_0:1", node=infiniband,
          break_it=text(f"{IB}/mlx5_0/ports/1/counters/symbol_error", "N/A (no PMA)\n")),
    Fault(name="counter unreadable", check="ib_counters", verdict="error", says="link_downed", device="mlx5_0:1",
          node=infiniband, break_it=text(f"{IB}/mlx5_0/ports/1/counters/link_downed", "?\n")),
    Fault(name="adapter of eight at x8 of generation 3", check="nic_pcie", verdict="fail", device="mlx5_7",
          says="where equal adapters have 16 lanes at 32 GT/s", node=fabric_node("DGX B200"), break_it=both(
              text("/sys/bus/pci/devices/0000:5d:00.0/current_link_width", "8\n"),
              text("/sys/bus/pci/devices/0000:5d:00.0/current_link_speed", "8.0 GT/s PCIe\n"))),
    Fault(name="EFA -61", check="efa", verdict="fail", says="-61", node=efa, break_it=no_provider),
    Fault(name="EFA 31 of 32 devices", check="efa", verdict="fail", says="31 of 32 EFA devices", node=lambda m: efa(m,
          31),
          break_it=lambda machine: None, expect={"efa_devices": 32}),
    Fault(name="EFA without a driver", check="efa", verdict="fail", says="the bus shows 32", node=efa_without_driver,
          break_it=lambda machine: None),
    Fault(name="EFA expected, none there", check="efa", verdict="fail", says="0 of 4 EFA devices",
          break_it=lambda machine: None, expect={"efa_devices": 4}),
    Fault(name="EFA device not offered", check="efa", verdict="fail", says="does not offer", device="rdmap110s0",
          node=lambda machine: efa(machine, offered=31), break_it=lambda machine: None),
    Fault(name="EFA port down", check="efa", verdict="fail", says="DOWN", device="rdmap80s0", node=efa,
          break_it=port("rdmap80s0", state="1: DOWN", phys_state="3: Disabled")),
    Fault(name="EFA rate not shown", check="efa", verdict="error", says="rate cannot be read", device="rdmap80s0",
          node=efa, break_it=text("/sys/class/infiniband/rdmap80s0/ports/1/rate", "N/A\n")),
    Fault(name="EFA not provable", check="efa", verdict="error", says="fi_info is not installed", node=efa,
          break_it=lambda machine: machine.refuses("fi_info -p efa", "CommandMissing", "fi_info is not there")),
    Fault(name="EFA plugin where the loader does not search", check="efa_plugin", verdict="warn",
          says="not in LD_LIBRARY_PATH", node=efa, break_it=text("/etc/ld.so.conf.d/100_ofinccl.conf", "/opt/other\n")),
    Fault(name="EFA without NCCL's plugin", check="efa_plugin", verdict="fail", says="no libnccl-net", node=efa,
          break_it=lambda machine: put(machine, files={}, lists=dict.fromkeys(PLUGIN_PLACES)),
          expect={"efa_devices": 32}),
    Fault(name="container without /dev/infiniband", check="rdma_access", verdict="fail", says="mlx5_0", device="mlx5_0",
          node=infiniband, break_it=lambda machine: put(machine, files={}, lists={"/dev/infiniband": None}),
          expect=EIGHT),
    Fault(name="container without /dev/infiniband, rate stated", check="rdma_access", verdict="fail", says="mlx5_0",
          device="mlx5_0", node=infiniband, expect={"ib_rate_gbps": 400.0},
          break_it=lambda machine: put(machine, files={}, lists={"/dev/infiniband": None})),
    Fault(name="RoCE without a GID", check="roce_gid", verdict="fail", says="no GID at all", device="mlx5_1:1",
          node=roce, break_it=no_gid),
    Fault(name="RoCE GID link-local", check="roce_gid", verdict="warn", says="link-local", device="mlx5_1:1",
          node=roce, break_it=roce_linklocal),
    Fault(name="GID index of RoCE v1", check="roce_gid", verdict="fail", says="NCCL_IB_GID_INDEX=2", device="mlx5_0:1",
          node=roce, break_it=env("NCCL_IB_GID_INDEX", "2")),
    Fault(name="no GPUDirect", check="gdr", verdict="warn", says="no peer-memory module", node=closed_driver,
          break_it=lambda machine: None),
    Fault(name="no GPUDirect, stated", check="gdr", verdict="fail", says="no peer-memory module", node=closed_driver,
          break_it=lambda machine: None, expect={"gdr": True}),
    Fault(name="NCCL_IB_DISABLE", check="nccl_env", verdict="fail", says="TCP", device="NCCL_IB_DISABLE",
          node=infiniband,
          break_it=env("NCCL_IB_DISABLE", "1"), expect=EIGHT),
    Fault(name="NCCL_IB_DISABLE in /etc/nccl.conf", check="nccl_env", verdict="warn", says="/etc/nccl.conf",
          device="NCCL_IB_DISABLE", node=infiniband, break_it=text("/etc/nccl.conf", "# old\nNCCL_IB_DISABLE = 1\n")),
    Fault(name="NCCL_IB_HCA names nobody", check="nccl_env", verdict="warn", says="fits no", device="NCCL_IB_HCA",
          node=infiniband, break_it=env("NCCL_IB_HCA", "ib_rail")),
    Fault(name="NCCL_P2P_DISABLE", check="nccl_env", verdict="warn", says="NVLink", device="NCCL_P2P_DISABLE",
          node=lambda machine: machine.gpus(8), break_it=env("NCCL_P2P_DISABLE", "1")),
    Fault(name="NCCL_NET=Socket", check="nccl_env", verdict="fail", says="keeps NCCL", device="NCCL_NET", node=efa,
          break_it=env("NCCL_NET", "Socket"), expect={"efa_devices": 32}),
    Fault(name="FI_PROVIDER not efa", check="nccl_env", verdict="fail", says="another provider", device="FI_PROVIDER",
          node=efa, break_it=env("FI_PROVIDER", "tcp"), expect={"efa_devices": 32}),
    Fault(name="NCCL_DEBUG=TRACE", check="nccl_env", verdict="warn", says="gigabytes", device="NCCL_DEBUG",
          break_it=env("NCCL_DEBUG", "TRACE")),
    Fault(name="NCCL_SOCKET_IFNAME wrong", check="nccl_interfaces", verdict="fail", says="there are lo, eth0",
          device="NCCL_SOCKET_IFNAME", break_it=env("NCCL_SOCKET_IFNAME", "ens5")),
    Fault(name="NCCL_SOCKET_IFNAME down", check="nccl_interfaces", verdict="fail", says="eth0, which is down",
          device="NCCL_SOCKET_IFNAME", break_it=both(env("NCCL_SOCKET_IFNAME", "eth"),
                                                     text(f"{NET}/eth0/operstate", "down\n"))),
    Fault(name="GLOO_SOCKET_IFNAME wrong", check="nccl_interfaces", verdict="fail",
          says="GLOO_SOCKET_IFNAME names ens5",
          device="GLOO_SOCKET_IFNAME", break_it=env("GLOO_SOCKET_IFNAME", "ens5")),
    Fault(name="the only interface is down", check="nccl_interfaces", verdict="fail", says="eth0 is down",
          device="eth0", break_it=text(f"{NET}/eth0/operstate", "down\n")),
    Fault(name="the only interface has no address", check="nccl_interfaces", verdict="fail", says="eth0 has no address",
          device="eth0", break_it=both(text("/proc/net/route", ROUTES), text("/proc/net/if_inet6", ""))),
    Fault(name="MASTER_ADDR and no network", check="nccl_interfaces", verdict="fail", says="MASTER_ADDR=10.0.0.1",
          device="MASTER_ADDR", break_it=both(env("MASTER_ADDR", "10.0.0.1"), text(f"{NET}/eth0/operstate", "down\n"))),
    Fault(name="no route to MASTER_ADDR", check="nccl_interfaces", verdict="fail", says="no route to",
          device="MASTER_ADDR", break_it=both(
              env("MASTER_ADDR", "10.9.0.1"),
              text("/proc/net/route", ROUTES + "eth0\t0000000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n"))),
    Fault(name="the route to MASTER_ADDR is down", check="nccl_interfaces", verdict="fail", says="leads through eth1",
          device="MASTER_ADDR", break_it=second_route),
    Fault(name="a route without its gateway", check="nccl_interfaces", verdict="error", says="cannot be read whole",
          break_it=text("/proc/net/route", "Iface\tDestination\neth0\t00000000\t\t0003\t0\t0\t100\t00000000\n")),
    Fault(name="a bridge comes first", check="nccl_interfaces", verdict="warn", says="would take virbr0",
          device="virbr0",
          break_it=bridge_first),
]  # fmt: skip
PLUGIN_PLACES = [
    f"{place}{below}"
    for place in ("/opt/amazon/ofi-nccl/lib", "/opt/amazon/aws-ofi-nccl/lib", "/opt/aws-ofi-nccl/lib", "/usr/local/lib")
    for below in ("", "/x86_64-linux-gnu", "/aarch64-linux-gnu")
]
MINE = [
    "clock", "cpu", "cpu_governor", "cpu_load", "disk_space", "efa", "efa_plugin", "gdr", "hostname", "huge_pages",
    "ib_counters", "ib_ports", "kernel_modules", "memlock", "memory_pressure", "mounts", "nccl_env", "nccl_interfaces",
    "nic_pcie", "numa", "oom_kills", "open_files", "processes", "ram", "rdma_access", "roce_gid", "shm", "swap",
]  # fmt: skip
