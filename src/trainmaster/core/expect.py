"""Expectation of a machine: the profile that its checks are judged against. None means "not stated"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trainmaster.core.errors import Fault, SpecError
from trainmaster.core.schema import build, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """Expected properties of one node. What is not stated is judged by what the machine itself shows."""

    gpus: int | None = field(default=None, ge=0, doc="GPUs per node; not stated: as many as the PCI bus shows")
    gpu_model: str | None = field(default=None, doc="part of the GPU's product name, for example H200")
    gpu_memory_gib: float | None = field(default=None, gt=0, doc="least memory of each GPU")
    gpu_temperature_c: float | None = field(default=None, gt=0, doc="highest temperature of each GPU before work")
    driver: str | None = field(default=None, doc="NVIDIA driver version: whole, or its first part such as 580")
    vbios: str | None = field(default=None, doc="VBIOS version of each GPU, whole")
    gpu_power_w: float | None = field(default=None, gt=0, doc="least power limit of each GPU, in watts")
    gpu_clock_mhz: float | None = field(default=None, gt=0, doc="least clock each GPU is allowed to reach, in MHz")
    pcie_gen: int | None = field(default=None, ge=1, doc="least PCIe generation each GPU can use")
    pcie_width: int | None = field(default=None, ge=1, doc="least PCIe lanes of each GPU; not stated: as its model has")
    nvlinks: int | None = field(default=None, ge=0, doc="NVLinks up on each GPU; not stated: as many as its model has")
    fabric: bool | None = field(default=None, doc="whether each GPU must be registered with an NVSwitch fabric")
    ecc: bool | None = field(default=None, doc="whether ECC must be on; not stated: off is a warning")
    mig: bool | None = field(default=None, doc="whether MIG must be on; not stated: on is a failure")
    persistence: bool | None = field(default=None, doc="whether persistence mode must be on; not stated: off warns")
    dcgm: bool | None = field(default=None, doc="whether DCGM must be installed; not stated: absent skips")
    xids: tuple[str, ...] | None = field(
        default=None, doc="severity of Xid codes at this site, for example 63:fail,31:info (info, warn or fail)"
    )
    gemm_tflops: float | None = field(default=None, gt=0, doc="least bf16 matrix TFLOPS of each GPU")
    hbm_gbps: float | None = field(default=None, gt=0, doc="least GB/s of each GPU's memory, copying, read and written")
    h2d_gbps: float | None = field(default=None, gt=0, doc="least GB/s into each GPU over PCIe")
    d2h_gbps: float | None = field(default=None, gt=0, doc="least GB/s out of each GPU over PCIe")
    p2p_gbps: float | None = field(default=None, gt=0, doc="least GB/s between any two GPUs of a node, each way")
    cpus: int | None = field(default=None, ge=1, doc="least CPUs this process may use")
    ram_gib: float | None = field(default=None, gt=0, doc="least memory of the node (or of its container)")
    ram_free_gib: float | None = field(default=None, gt=0, doc="least memory free before work")
    disk_free_gib: float | None = field(default=None, gt=0, doc="least free space where checkpoints go")
    shm_gib: float | None = field(default=None, gt=0, doc="least size of /dev/shm")
    memlock_gib: float | None = field(default=None, gt=0, doc="least lockable memory; RDMA wants it unlimited")
    clock_offset_s: float | None = field(default=None, gt=0, doc="most seconds the clock may be off its source")
    load_per_cpu: float | None = field(default=None, gt=0, doc="most load per CPU before work")
    governor: str | None = field(default=None, doc="frequency governor of every CPU, for example performance")
    numa_nodes: int | None = field(default=None, ge=1, doc="NUMA nodes that have CPUs")
    swap_used_gib: float | None = field(default=None, ge=0, doc="most swap in use before work")
    memory_pressure: float | None = field(default=None, gt=0, le=100, doc="most percent of time stalled for memory")
    oom_kills: int | None = field(default=None, ge=0, doc="most processes killed for lack of memory since boot")
    disk_write_mib_s: float | None = field(default=None, gt=0, doc="least rate of writing where checkpoints go")
    disk_read_mib_s: float | None = field(default=None, gt=0, doc="least rate of reading there")
    mounts: tuple[str, ...] | None = field(default=None, doc="paths that must be mounted: /fsx or /fsx:lustre")
    open_files: int | None = field(default=None, ge=1, doc="least open files a process may have")
    processes: int | None = field(default=None, ge=1, doc="least processes and threads that may still be started")
    huge_pages: int | None = field(default=None, ge=0, doc="least free huge pages")
    kernel_modules: tuple[str, ...] | None = field(default=None, doc="kernel modules that must be loaded")
    ib_ports: int | None = field(default=None, ge=0, doc="InfiniBand or RoCE ports that must be up; EFA is not counted")
    ib_rate_gbps: float | None = field(default=None, gt=0, doc="least rate of each of those ports, in Gb/s")
    ib_link_layer: Literal["InfiniBand", "Ethernet"] | None = field(default=None, doc="link layer of those ports")
    efa_devices: int | None = field(default=None, ge=0, doc="EFA devices that must be there and offered by libfabric")
    gdr: bool | None = field(default=None, doc="whether the network must reach GPU memory without the CPU")
    collectives: bool | None = field(
        default=None, doc="whether collectives must run between the nodes; not stated: where they have torch"
    )
    busbw_gbps: float | None = field(
        default=None, gt=0, doc="least bus bandwidth of every collective between nodes, at its largest size"
    )
    transport: Literal["EFA", "IB", "NVLS", "P2P", "Socket"] | None = field(
        default=None, doc="what must carry collectives; not stated: EFA or IB where such devices are expected"
    )


# Fields that describe GPUs, or a thing that needs one: each of them stated implies that there is a GPU. A number that
# may be 0 and a flag that may be false imply nothing then.
_OF_GPUS = (
    "gpus", "gpu_model", "gpu_memory_gib", "gpu_temperature_c", "driver", "vbios", "gpu_power_w", "gpu_clock_mhz",
    "pcie_gen", "pcie_width", "nvlinks", "fabric", "ecc", "mig", "persistence", "dcgm", "gemm_tflops", "hbm_gbps",
    "h2d_gbps", "d2h_gbps", "p2p_gbps", "gdr",
)  # fmt: skip

# Fields that collectives between ranks measure; every other field has its check (EXPECTS).
OF_COLLECTIVES = ("collectives", "busbw_gbps", "transport")


def implies_gpu(expect: Expect) -> list[str]:
    """Stated expectations (`gpu_model=H200`) that only a machine with a GPU can meet."""
    stated = {name: getattr(expect, name) for name in _OF_GPUS}
    if expect.transport in ("NVLS", "P2P"):  # carried by GPUs alone
        stated["transport"] = expect.transport
    return [f"{name}={show_value(value)}" for name, value in stated.items() if value]


def implies_rdma(expect: Expect) -> list[str]:
    """Stated expectations that only a machine with InfiniBand or RoCE can meet."""
    stated: dict[str, object] = {name: getattr(expect, name) for name in ("ib_ports", "ib_rate_gbps", "ib_link_layer")}
    if expect.transport == "IB":
        stated["transport"] = expect.transport
    return [f"{name}={show_value(value)}" for name, value in stated.items() if value]


def implies_efa(expect: Expect) -> list[str]:
    """Stated expectations that only a machine with EFA can meet."""
    stated = {"efa_devices": expect.efa_devices, "transport": expect.transport if expect.transport == "EFA" else None}
    return [f"{name}={show_value(value)}" for name, value in stated.items() if value]


def implies_collectives(expect: Expect) -> list[str]:
    """Stated expectations that only collectives between ranks can measure."""
    return [f"{name}={show_value(getattr(expect, name))}" for name in OF_COLLECTIVES if getattr(expect, name)]


def show_value(value: object) -> str:
    """A stated value as people write it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def parse_word(word: str) -> tuple[str, object]:
    """Name and value of a word such as `gpus=8`."""
    name, equals, value = word.partition("=")
    if not equals or not name or not value:
        raise SpecError([Fault(path=f"--expect {word}", message="write it as name=value, for example gpus=8")])
    return name, value.split(",") if name in _LISTS else value if name in _TEXT else _scalar(value)


def build_expect(mapping: Mapping[str, object], faults: Sequence[Fault] = ()) -> Expect:
    """Expect from a mapping; its faults are raised together with the given ones."""
    every_fault = list(faults)
    try:
        expect = build(Expect, mapping)
    except SpecError as error:
        every_fault.extend(Fault(path=f"--expect {fault.path}", message=fault.message) for fault in error.faults)
    if every_fault:
        raise SpecError(every_fault)
    return expect


_TEXT = {"gpu_model", "driver", "vbios"}  # 580 is a number to a shell and a version to us
_LISTS = {"mounts", "kernel_modules", "xids"}  # written with commas
_WORDS = {"true": True, "false": False}


def _scalar(value: str) -> object:
    if value in _WORDS:
        return _WORDS[value]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
