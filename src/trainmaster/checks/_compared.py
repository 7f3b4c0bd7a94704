"""Which values of findings are compared between nodes: names to agree in, numbers to be alike in, and how far.

A value is found by its name, whichever check tells it. A new check that tells `driver` or `celsius` takes part by
itself; a new name needs one row here.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    none: str = ""  # what None means; empty: it means "not told"
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A number that is alike on equal machines, and the least difference that is worth a person's time."""

    words: str
    unit: str
    bad: Literal["low", "high", "both"]
    least_far: float  # a share of the median, or in the unit itself where `share` is False
    action: str
    share: bool = True
    fail_far: float | None = None  # from here on it fails, to the bad side; None: it only warns

    def least(self, median: float) -> float:
        return self.least_far * abs(median) if self.share else self.least_far

    def matters(self, far: float) -> bool:
        return self.bad == "both" or (far < 0) == (self.bad == "low")

    def fails(self, far: float, median: float) -> bool:
        if self.fail_far is None or (far > 0) != (self.bad == "high"):
            return False
        return abs(far) >= (self.fail_far * abs(median) if self.share else self.fail_far)


# What decides which kernels run: under other software other bits are right.
SOFTWARE = frozenset({"driver", "cuda", "torch", "torch_cuda"})


def _software(words: str) -> Same:
    # Ranks of one job run one software. NCCL refuses or hangs between versions, and a driver of its own makes a node
    # choose other transports than its partners.
    action = f"install on this node the {words} that the others have"
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


SAME = {
    "driver": _software("driver"),
    "cuda": _software("CUDA"),
    "nccl": _software("NCCL"),
    "torch": _software("torch"),
    "torch_cuda": _software("torch's CUDA"),
    "model": Same(
        words="GPU model", verdict=Verdict.FAIL, action="use nodes of one type, or check each type apart"
    ),
    "listed": Same(words="GPU count", verdict=Verdict.FAIL, action="see gpu_count on this node"),
    "kernel": Same(
        words="kernel", verdict=Verdict.WARN, action="boot the kernel that the others run, or update the others"
    ),
    "vbios": _firmware("VBIOS"),
    "firmware": _firmware("firmware"),
    "limit_gib": _setting("locked-memory limit", none="unlimited", unit="GiB"),
    "governor": _setting("CPU governor"),
    "total_gib": _part("memory", "look for a DIMM or a GPU that is not there", tolerance=0.02, unit="GiB"),
    "schedulable": _part("CPU count", "look for CPUs that are offline, and at hyper-threading in the BIOS"),
}  # fmt: skip

_SLOW = "run level 2 again on this node alone; if it repeats, take it out: the whole job runs at its pace"
PEERS = {
    "celsius": Peer(
        words="temperature",
        unit="°C",
        bad="high",
        least_far=12.0,  # intake air differs by some degrees between the bottom and the top of a rack
        share=False,
        action="look at this node's fans, coolant and airflow",
    ),
}
