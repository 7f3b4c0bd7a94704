"""Values of findings that are compared between nodes: equal settings, similar numbers, and their tolerances.

A value is found by its name in any check, or by `check.name` where the name alone is ambiguous. A new check that
reports `driver` or `celsius` is compared automatically; a new name needs one row here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from trainmaster.core.results import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Same:
    """A value that is equal on equal nodes. `alike`: only nodes with the same GPUs are compared."""

    words: str
    verdict: Verdict
    action: str
    alike: bool = False
    tolerance: float = 0.0  # share by which numbers may differ: firmware keeps some memory for itself
    none: str = ""  # meaning of None; empty: not reported
    unit: str = ""
    fewer: Verdict | None = None  # verdict where a number is below that of the majority; None: `verdict`

    def judge(self, value: object, common: object) -> Verdict:
        """Verdict on a value that is not the majority's. Of devices that differ within a node the lowest counts."""
        values = value if isinstance(value, frozenset) else (value,)
        numbers = isinstance(common, (int, float)) and all(isinstance(one, (int, float)) for one in values)
        lower = numbers and min(values) < common
        return self.fewer if self.fewer is not None and lower else self.verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A number that is similar on equal machines, and the smallest difference worth reporting."""

    words: str
    unit: str
    bad: Literal["low", "high", "both"]
    least_far: float  # a share of the median, or in the unit itself where `share` is False
    action: str
    share: bool = True
    fail_far: float | None = None  # distance to the bad side from which it fails; None: it only warns

    def least(self, median: float) -> float:
        return self.least_far * abs(median) if self.share else self.least_far

    def matters(self, far: float) -> bool:
        return self.bad == "both" or (far < 0) == (self.bad == "low")

    def beyond(self, far: float, best: float) -> bool:
        """Whether a distance from the best quarter is a fault, however far the others scatter."""
        least = self.fail_far if self.fail_far is not None else 2 * self.least_far
        return self.bad != "both" and self.matters(far) and abs(far) >= (least * abs(best) if self.share else least)

    def fails(self, far: float, median: float) -> bool:
        if self.fail_far is None or (far > 0) != (self.bad == "high"):
            return False
        return abs(far) >= (self.fail_far * abs(median) if self.share else self.fail_far)


# Software that selects kernels: digests are comparable only where it is equal.
SOFTWARE = frozenset({"driver", "cuda", "torch", "torch_cuda"})


def _software(words: str) -> Same:
    # All ranks of a job need the same software: NCCL refuses or hangs across versions, and another driver makes a node
    # choose other transports than its peers.
    action = f"install the same {words} on this node as on the others"
    return Same(words=words, verdict=Verdict.FAIL, action=action)


def _firmware(words: str) -> Same:
    return Same(words=words, verdict=Verdict.WARN, action="bring its firmware to the others' version", alike=True)


def _setting(words: str, *, alike: bool = False, none: str = "", unit: str = "", tolerance: float = 0.0) -> Same:
    action = "set it on this node as it is on the others"
    return Same(
        words=words, verdict=Verdict.WARN, action=action, alike=alike, none=none, unit=unit, tolerance=tolerance
    )


def _part(words: str, action: str, *, tolerance: float = 0.0, unit: str = "") -> Same:
    return Same(words=words, verdict=Verdict.WARN, action=action, alike=True, tolerance=tolerance, unit=unit)


def _hardware(words: str, action: str, *, tolerance: float = 0.0, unit: str = "") -> Same:
    # The GPUs of a node agree with each other, so no check of the node sees it; the slowest node sets the pace of all.
    return Same(
        words=words, verdict=Verdict.WARN, fewer=Verdict.FAIL, action=action, alike=True, tolerance=tolerance, unit=unit
    )


def _adapters(words: str) -> Same:
    # A rail that one node lacks slows every collective of the job; one too many may serve storage.
    action = "look for a missing network card; in a container, give it the devices"
    return Same(words=words, verdict=Verdict.WARN, fewer=Verdict.FAIL, action=action, alike=True)


SAME = {
    "driver": _software("driver"),
    "cuda": _software("CUDA"),
    "nccl": _software("NCCL"),
    "torch": _software("torch"),
    "torch_cuda": _software("torch's CUDA"),
    "model": Same(
        words="GPU model", verdict=Verdict.FAIL, action="use nodes of one type, or check each type separately"
    ),
    "listed": Same(words="GPU count", verdict=Verdict.FAIL, action="see gpu_count on this node"),
    "kernel": Same(
        words="kernel", verdict=Verdict.WARN, action="boot the kernel that the others run, or update the others"
    ),
    "vbios": _firmware("VBIOS"),
    "firmware": _firmware("firmware"),
    "gsp": _firmware("GSP firmware"),
    "inforom": _firmware("InfoROM"),
    "gpu_clocks.max_mhz": _hardware("highest GPU clock", "reset the GPUs or reboot the node", unit="MHz"),
    "gpu_clocks.allowed_mhz": _setting("allowed GPU clock", alike=True, unit="MHz"),
    "gpu_power.limit_w": _setting("GPU power limit", alike=True, unit="W"),
    "gpu_modes.mig": _setting("MIG mode", alike=True),
    "gpu_modes.compute": _setting("compute mode", alike=True),
    "gpu_modes.persistence": _setting("persistence mode", alike=True),
    "gpu_ecc.ecc": _hardware("ECC mode", "switch ECC on as on the others (nvidia-smi -e 1), then reset the GPUs"),
    "gpu_pcie.max_gen": _hardware("PCIe generation", "check the PCIe setting in this node's BIOS"),
    "gpu_pcie.width": _hardware("PCIe lanes", "reseat the GPU or its riser; power-cycle the node"),
    "gpu_nvlink.up": _hardware("NVLinks up", "see gpu_nvlink on this node"),
    "ib_ports.ports": _adapters("fabric ports"),
    "efa.device_count": _adapters("EFA devices"),
    "ib_ports.rate_gbps": _hardware("rate of the fabric ports", "reseat or replace the cable", unit="Gb/s"),
    "memlock.limit_gib": _setting("locked-memory limit", none="unlimited", unit="GiB"),
    "governor": _setting("CPU governor"),
    "open_files.limit": _setting("open-files limit"),
    "ram.total_gib": _part("memory", "look for a missing DIMM", tolerance=0.02, unit="GiB"),
    "gpu_memory.total_gib": _hardware("GPU memory", "check this GPU's ECC and MIG modes", tolerance=0.02, unit="GiB"),
    "numa.nodes": _part("NUMA nodes", "set the BIOS of this node as on the others"),
    "cpu.schedulable": _part("CPU count", "check for offline CPUs, and hyper-threading in the BIOS"),
}  # fmt: skip

_SLOW = "run level 2 again on this node alone; if it repeats, drain it: the whole job runs at its speed"
# Equal GPUs differ by some 3 % in clock at one power limit; 7 % is beyond that, 20 % is a fault of any cause.
PEERS = {
    "tflops": Peer(words="", unit="TFLOPS", bad="low", least_far=0.07, fail_far=0.20, action=_SLOW),
    "gbps": Peer(words="", unit="GB/s", bad="low", least_far=0.07, fail_far=0.20, action=_SLOW),
    "bf16_gflops_per_w": Peer(
        words="of bf16 work", unit="GFLOPS/W", bad="low", least_far=0.10, action="check cooling; see gpu_power and gemm"
    ),
    "celsius": Peer(
        words="temperature",
        unit="°C",
        bad="high",
        least_far=12.0,  # intake air differs by some degrees between the bottom and the top of a rack
        share=False,
        action="check this node's fans, coolant and airflow",
    ),
}


def same(check: str, name: str) -> Same | None:
    """The rule for a value that should be equal, if there is one."""
    return SAME.get(f"{check}.{name}") or SAME.get(name.rpartition(".")[2])


def peer(check: str, name: str) -> Peer | None:
    """The rule for a number that should be alike, if there is one."""
    if same(check, name):
        return None  # a rate that is a setting, such as a port's
    last = name.rpartition(".")[2]
    rule = PEERS.get(last) or PEERS.get(last.rpartition("_")[2])  # bf16_tflops counts TFLOPS
    return rule if rule is None or rule.words else replace(rule, words=f"of {check} {name}")
