"""Whole nodes composed on top of the recorded H200: InfiniBand, RoCE, EFA, a plain VM, containers, a laptop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from machines import PCI, Machine

IB = "/sys/class/infiniband"
NET = "/sys/class/net"
COUNTERS = (
    "symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors", "port_rcv_remote_physical_errors",
    "port_xmit_constraint_errors", "port_rcv_constraint_errors", "local_link_integrity_errors",
    "excessive_buffer_overrun_errors", "port_rcv_data", "port_xmit_wait",
)  # fmt: skip
CHRONYC = "A9FEA97B,169.254.169.123,4,1767323045.1,{offset},0.1,0.1,-5.2,0.0,0.01,0.0003,0.0002,16.2,{leap}\n"


def put(
    machine: Machine, *, files: dict[str, str | None], lists: dict[str, Sequence[str] | None] | None = None
) -> None:
    """Many answers at once. None: it is not there."""
    answers = machine.answers
    for path, text in files.items():
        gone = {"error": "FileMissing", "message": f"{path} is not there"}
        answers["read"][path] = gone if text is None else {}
        if text is not None:
            machine.put_text(f"files{path}", text)
    for path, names in (lists or {}).items():
        gone = {"error": "FileMissing", "message": f"{path} is not there"}
        answers["list"][path] = gone if names is None else list(names)
    machine.put_answers(answers)


def rdma(
    machine: Machine, names: Sequence[str], *, driver: str, layer: str, rate: str, board: str = "MT_0000000838"
) -> None:
    """That many healthy devices of one port each, openable, with their module."""
    files: dict[str, str | None] = {"/proc/uptime": "864000.00 13700000.00\n"}  # ten days
    lists: dict[str, Sequence[str] | None] = {IB: names, "/dev/infiniband": [f"uverbs{n}" for n in range(len(names))]}
    for number, name in enumerate(names):
        port = f"{IB}/{name}/ports/1"
        lists |= {f"{IB}/{name}/ports": ["1"], f"{IB}/{name}/device/net": None, f"{port}/counters": COUNTERS}
        lists[f"{port}/hw_counters"] = ["lifespan"]
        files |= {
            f"{IB}/{name}/device/uevent": f"DRIVER={driver}\nPCI_CLASS=20700\n",
            f"{IB}/{name}/board_id": f"{board}\n",
            f"{port}/state": "4: ACTIVE\n",
            f"{port}/phys_state": "5: LinkUp\n",
            f"{port}/rate": f"{rate}\n",
            f"{port}/link_layer": f"{layer}\n",
            f"/sys/class/infiniband_verbs/uverbs{number}/ibdev": f"{name}\n",
            **{f"{port}/counters/{counter}": "0\n" for counter in COUNTERS},
        }
    lists["/sys/module"] = ["nvidia", "nvidia_uvm", "nvidia_peermem", "ib_core", "ib_uverbs", "mlx5_core", "mlx5_ib"]
    put(machine, files=files, lists=lists)


def infiniband(machine: Machine, ports: int = 8) -> None:
    """A bare-metal node with that many NDR ports, and ibstat."""
    names = [f"mlx5_{n}" for n in range(ports)]
    rdma(machine, names, driver="mlx5_core", layer="InfiniBand", rate="400 Gb/sec (4X NDR)")
    machine.command("ibstat", "".join(ibstat_text(name) for name in names))


def match_ibstat(machine: Machine) -> None:
    """ibstat as it reports the rates and link layers that /sys has now."""
    told = []
    for name in machine.host.list(IB):
        rate, layer = (machine.host.read(f"{IB}/{name}/ports/1/{word}").strip() for word in ("rate", "link_layer"))
        text = ibstat_text(name).replace("Rate: 400", f"Rate: {int(float(rate.split()[0]))}")
        told.append(text.replace("Link layer: InfiniBand", f"Link layer: {layer}"))
    machine.command("ibstat", "".join(told))


def ibstat_text(name: str, *, state: str = "Active", physical: str = "LinkUp") -> str:
    return (
        f"CA '{name}'\n\tCA type: MT4129\n\tNumber of ports: 1\n\tFirmware version: 28.39.3560\n\tHardware version: 0\n"
        "\tNode GUID: 0x946dae0300a5b3c0\n\tSystem image GUID: 0x946dae0300a5b3c0\n\tPort 1:\n"
        f"\t\tState: {state}\n\t\tPhysical state: {physical}\n\t\tRate: 400\n\t\tBase lid: 21\n\t\tLMC: 0\n"
        "\t\tSM lid: 1\n"
        "\t\tCapability mask: 0xa751e848\n\t\tPort GUID: 0x946dae0300a5b3c1\n\t\tLink layer: InfiniBand\n"
    )


def roce(machine: Machine, ports: int = 4) -> None:
    """A node with that many RoCE ports, each with an interface and its GIDs; no ibstat."""
    names = [f"mlx5_{n}" for n in range(ports)]
    rdma(machine, names, driver="mlx5_core", layer="Ethernet", rate="400 Gb/sec (4X NDR)")
    files: dict[str, str | None] = {}
    lists: dict[str, Sequence[str] | None] = {}
    for number, name in enumerate(names):
        port = f"{IB}/{name}/ports/1"
        lists[f"{IB}/{name}/device/net"] = [f"eth{number + 1}"]
        files |= {f"{port}/gids/{place}": "0000:0000:0000:0000:0000:0000:0000:0000\n" for place in range(16)}
        for place, address in enumerate(
            ("fe80:0000:0000:0000:966d:aeff:fea5:b3c0", "0000:0000:0000:0000:0000:ffff:0a00:0111")
        ):
            for offset, kind in ((0, "IB/RoCE v1"), (1, "RoCE v2")):
                files[f"{port}/gids/{2 * place + offset}"] = f"{address}\n"
                files[f"{port}/gid_attrs/types/{2 * place + offset}"] = f"{kind}\n"
        files |= interface(f"eth{number + 1}", index=number + 3)
    lists[NET] = ["lo", "eth0", *(f"eth{n + 1}" for n in range(ports))]
    put(machine, files=files, lists=lists)


def interface(name: str, *, index: int, flags: str = "0x1003", state: str = "up") -> dict[str, str | None]:
    return {
        f"{NET}/{name}/flags": f"{flags}\n",
        f"{NET}/{name}/ifindex": f"{index}\n",
        f"{NET}/{name}/operstate": f"{state}\n",
    }


def efa(machine: Machine, devices: int = 32, *, offered: int | None = None) -> None:
    """A node with that many EFA devices, as p5.48xlarge has; libfabric offers the first `offered`."""
    names = [f"rdmap{n}s0" for n in range(79, 79 + devices)]
    rdma(machine, names, driver="efa", layer="Unspecified", rate="100 Gb/sec (4X EDR)", board="")
    addresses = [f"0000:{n:02x}:00.0" for n in range(79, 79 + devices)]
    files: dict[str, str | None] = {}
    for address in addresses:
        for name, text in (("vendor", "0x1d0f"), ("class", "0x020000"), ("device", "0xefa1")):
            files[f"{PCI}/{address}/{name}"] = f"{text}\n"
    plugin = "/opt/amazon/ofi-nccl/lib"
    files["/etc/ld.so.conf.d/100_ofinccl.conf"] = f"{plugin}\n"
    lists = {PCI: ["0000:00:00.0", "0000:00:06.0", *addresses], plugin: ["libnccl-net.so"]}
    put(machine, files=files, lists={**lists, "/etc/ld.so.conf.d": ["100_ofinccl.conf"]})
    machine.answer("env", "LD_LIBRARY_PATH", None)
    machine.answer("env", "NCCL_NET_PLUGIN", None)
    machine.command("fi_info -p efa", "".join(fi_info_text(name) for name in names[:offered]))


def fi_info_text(name: str) -> str:
    return (
        f"provider: efa\n    fabric: efa\n    domain: {name}-rdm\n    version: 201.0\n"
        "    type: FI_EP_RDM\n    protocol: FI_PROTO_EFA\n"
    )


def bare_metal(machine: Machine) -> None:
    """No container, two NUMA nodes, governors, swap, chrony, storage over NFS and Lustre."""
    node = "/sys/devices/system/node"
    freq = "/sys/devices/system/cpu/cpufreq"
    files: dict[str, str | None] = {
        "/proc/self/cgroup": "0::/user.slice/user-1000.slice/session-1.scope\n",
        "/proc/self/mountinfo": MOUNTS,
        f"{node}/online": "0-1\n",
        "/proc/meminfo": machine.text("files/proc/meminfo").replace(
            "SwapTotal:             0 kB\nSwapFree:              0 kB",
            "SwapTotal:       8388604 kB\nSwapFree:        8300000 kB",
        ),
        "/sys/bus/pci/devices/0000:00:06.0/numa_node": "1\n",
    }  # fmt: skip
    for number, cpus in ((0, "0-7"), (1, "8-15")):
        files[f"{node}/node{number}/cpulist"] = f"{cpus}\n"
        files[f"{node}/node{number}/meminfo"] = f"Node {number} MemTotal:       65945600 kB\n"
    for number in range(16):
        files[f"{freq}/policy{number}/scaling_driver"] = "intel_pstate\n"
        files[f"{freq}/policy{number}/scaling_governor"] = "performance\n"
        files[f"{freq}/policy{number}/energy_performance_preference"] = "performance\n"
    groups = ["/user.slice/user-1000.slice/session-1.scope", "/user.slice/user-1000.slice", "/user.slice", ""]
    for group in groups:
        for name in (
            "cpu.max",
            "memory.max",
            "memory.current",
            "memory.stat",
            "memory.events",
            "pids.max",
            "pids.current",
        ):
            files[f"/sys/fs/cgroup{group}/{name}"] = None
    files["/sys/fs/cgroup/user.slice/user-1000.slice/session-1.scope/pids.max"] = "max\n"
    files["/sys/fs/cgroup/user.slice/user-1000.slice/pids.max"] = "42000\n"
    files["/sys/fs/cgroup/user.slice/user-1000.slice/pids.current"] = "180\n"
    files["/sys/fs/cgroup/user.slice/memory.events"] = "low 0\noom_kill 0\n"
    put(machine, files=files, lists={freq: [f"policy{n}" for n in range(16)]})
    for path in ("/home", "/fsx"):
        machine.command(f"stat -f -c %T {path}", "nfs\n")
    machine.command("chronyc -c tracking", CHRONYC.format(offset="0.000012", leap="Normal"))


MOUNTS = (
    "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n"
    "23 22 0:21 / /proc rw,relatime - proc proc rw\n"
    "24 22 0:22 / /sys rw,relatime - sysfs sysfs rw\n"
    "25 24 0:27 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
    "40 22 0:51 / /home rw,relatime shared:20 - nfs4 10.0.0.5:/home rw,vers=4.2\n"
    "41 22 0:52 / /fsx rw,noatime shared:21 - lustre 10.0.0.9@tcp:/fsx rw,flock\n"
)


def no_gpus(machine: Machine) -> None:
    machine.no_gpus()
    put(machine, files={"/proc/driver/nvidia/version": None}, lists={"/sys/module": ["ext4", "virtio_net"]})


def plain_vm(machine: Machine) -> None:
    """A virtual machine of a cloud, without a GPU: no swap, no governor, its clock steered by the hypervisor."""
    no_gpus(machine)
    put(machine, files={"/proc/loadavg": "31.00 30.00 29.00 33/900 1234\n"})  # a build machine at work


def laptop(machine: Machine) -> None:
    """A laptop on battery: saving power as its driver does, a shell's limits, no PSI, bridges of Docker's."""
    no_gpus(machine)
    bare_metal(machine)
    freq = "/sys/devices/system/cpu/cpufreq"
    files: dict[str, str | None] = {
        "/proc/pressure/memory": None,
        "/proc/self/mountinfo": MOUNTS[: MOUNTS.index("40 22")],
    }
    for number in range(16):
        files[f"{freq}/policy{number}/scaling_governor"] = "powersave\n"
        files[f"{freq}/policy{number}/energy_performance_preference"] = "balance_performance\n"
    files["/proc/self/limits"] = (
        "Limit  Soft Limit  Hard Limit  Units\nMax open files   1024   524288   files\n"
        "Max locked memory   8388608   8388608   bytes\nMax processes   62000   62000   processes\n"
    )
    files |= interface("docker0", index=4, state="down", flags="0x1003") | interface("br-4f", index=1)
    put(machine, files=files, lists={NET: ["br-4f", "docker0", "eth0", "lo"]})
    machine.refuses("getent ahosts h200", "CommandMissing", "getent is not on this machine")


def container_v1(machine: Machine) -> None:
    """Docker with cgroup v1, 8 CPUs and 32 GiB of the node, and Podman's limit of processes."""
    root = "/docker/x"
    mounts = "".join(
        f"{30 + n} 20 0:{30 + n} {root} /sys/fs/cgroup/{name} ro - cgroup cgroup rw,{name}\n"
        for n, name in enumerate(("cpu,cpuacct", "memory", "pids"))
    )
    files: dict[str, str | None] = {
        "/proc/self/cgroup": f"5:pids:{root}\n4:memory:{root}\n2:cpu,cpuacct:{root}\n0::/\n",
        "/proc/self/mountinfo": mounts,
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "800000\n",
        "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{32 << 30}\n",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1 << 30}\n",
        "/sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
        "/sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        "/sys/fs/cgroup/pids/pids.max": "2048\n",
        "/sys/fs/cgroup/pids/pids.current": "3\n",
    }
    put(machine, files=files)


def container_v2(machine: Machine) -> None:
    """A pod with cgroup v2 on a node whose other pods were killed at their own limits: none of our business."""
    put(
        machine,
        files={
            "/proc/vmstat": "oom_kill 41\n",
            "/sys/fs/cgroup/pids.max": "4096\n",
            "/sys/fs/cgroup/pids.current": "9\n",
        },
    )
    machine.command("dmesg", "", exit_code=1, stderr="dmesg: read kernel buffer failed: Operation not permitted\n")


def on_metal(fabric: Callable[[Machine], None]) -> Callable[[Machine], None]:
    def compose(machine: Machine) -> None:
        bare_metal(machine)
        fabric(machine)

    return compose


HEALTHY: dict[str, Callable[[Machine], None]] = {
    "bare metal with InfiniBand": on_metal(infiniband),
    "bare metal with RoCE": on_metal(roce),
    "EFA": efa,
    "plain VM": plain_vm,
    "laptop": laptop,
    "container, cgroup v1": container_v1,
    "container, cgroup v2": container_v2,
    "bare metal without a fabric": bare_metal,
}
