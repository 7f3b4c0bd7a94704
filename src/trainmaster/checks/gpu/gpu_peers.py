"""GPUs of one model in a node are equal: clocks, memory, BAR1, power limits, boards, and the values they report.

One that may not clock, map or draw as much as its peers slows down each collective; one that reports less is damaged.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from trainmaster.checks import nvidia
from trainmaster.checks.gpu.gpu_power import DEFAULT, LIMIT
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip, warn

LEVEL = 1
GPU = True
EXPECTS = ()
COMPARES = ()
METRICS: dict[str, str] = {}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S
SHARE = 0.98  # of the usual value: page retirement and ECC take parts of a percent of the memory
# Values that come and go with the work of a GPU, or that only some boards of a node have (display, fan).
_VARYING = (
    "utilization/", "encoder_stats/", "fbc_stats/", "inforom_bbx_flush/", "display_", "fan_speed", "pci/tx_util",
    "pci/rx_util", "accounting", "performance_state", "cc_protected_memory_usage/", "retired_pages/",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Number that equal GPUs have in common; one that is lower fails, or warns where an administrator may set it."""

    paths: tuple[str, ...]
    unit: str
    meaning: str
    action: str
    is_setting: bool = False


_RESET = "reset the GPU or reboot the node; replace it if it stays"
LIMITS = (
    Limit(paths=("max_clocks/sm_clock",), unit=" MHz", meaning="highest SM clock", action=_RESET),
    Limit(paths=("max_clocks/graphics_clock",), unit=" MHz", meaning="highest graphics clock", action=_RESET),
    Limit(paths=("max_clocks/mem_clock",), unit=" MHz", meaning="highest memory clock", action=_RESET),
    Limit(paths=("fb_memory_usage/total",), unit=" MiB", meaning="memory", action=_RESET),
    Limit(paths=("bar1_memory_usage/total",), unit=" MiB", meaning="BAR1 memory",
          action="see the BIOS (above 4G decoding, resizable BAR) and the kernel log; reboot the node"),
    Limit(paths=DEFAULT, unit=" W", meaning="default power limit", action="bring every GPU to the same VBIOS",
          is_setting=True),
    Limit(paths=LIMIT, unit=" W", meaning="power limit", action="set it as on the other GPUs: nvidia-smi -pl",
          is_setting=True),
)  # fmt: skip
BOARD = {
    "pci/pci_device_id": "PCI device id",
    "pci/pci_sub_system_id": "PCI subsystem id",
    "inforom_version/img_version": "infoROM version",
}

read = nvidia.read


def judge(gpus: nvidia.Gpus, expect: Expect) -> list[Finding]:
    return nvidia.judge_each(gpus, expect, lambda gpu, device: _judge_one(gpu, device, gpus))


def _judge_one(gpu: nvidia.Gpu, device: str, gpus: nvidia.Gpus) -> Finding:
    if gpu.name is None:
        return error("it reports no product name", action=_RESET, device=device)
    # A GPU in MIG mode reports other values; gpu_modes judges the mode.
    peers = [other for other in nvidia.same_model(gpus, gpu) if nvidia.mig_on(other) == nvidia.mig_on(gpu)]
    if not peers:
        proof = f"it is the only {gpu.name} of the node in its MIG mode ({gpu.text(nvidia.MIG) or 'none'})"
        return skip("no equal GPU to compare with", proof=proof, device=device)
    lower = [(limit, why) for limit in LIMITS if (why := _judge_limit(gpu, peers, limit))]
    grave = [pair for pair in lower if not pair[0].is_setting and len(peers) > 1]
    if grave:
        reason = "; ".join(why for _, why in [*grave, *(pair for pair in lower if pair not in grave)])
        return fail(reason, action=grave[0][0].action, device=device)
    absent = _absent(gpu, peers)
    if absent:
        what = ", ".join(path.replace("/", " ").replace("_", " ") for path in absent[:5])
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        reason = f"it does not report {what}{more}, which its {len(peers)} equal GPUs report"
        return error(reason, action=_RESET, device=device, absent=absent[:50])
    if lower:
        return warn("; ".join(why for _, why in lower), action=lower[0][0].action, device=device)
    other = [why for path, meaning in BOARD.items() if (why := _judge_board(gpu, peers, path, meaning))]
    if other:
        return warn("; ".join(other), action="use boards of one kind and firmware in a node", device=device)
    return ok(f"equal to {len(peers)} GPUs of its model", device=device, peers=len(peers))


def _judge_limit(gpu: nvidia.Gpu, peers: list[nvidia.Gpu], limit: Limit) -> str | None:
    """How a number is lower than that of the peers; None: it is not, or neither reports it."""
    values = [value for peer in peers if (value := peer.find_number(limit.unit, *limit.paths)) is not None]
    if not values and not gpu.reports(*limit.paths):
        return None
    mine = gpu.number(limit.unit, *limit.paths)
    usual = _usual(values)
    if usual is None or mine >= usual * SHARE:
        return None
    return f"its {limit.meaning} is {mine:g}{limit.unit}, where equal GPUs have {usual:g}{limit.unit}"


def _usual(values: list[float]) -> float | None:
    """Value of most peers; the highest where they are divided."""
    if not values:
        return None
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else max(values)


def _judge_board(gpu: nvidia.Gpu, peers: list[nvidia.Gpu], path: str, meaning: str) -> str | None:
    reported = Counter(peer.text(path) for peer in peers if peer.reports(path))
    if not reported or gpu.text(path) in reported:
        return None
    usual, _ = reported.most_common(1)[0]
    return f"its {meaning} is {gpu.text(path)[:40] or '(none)'}, where equal GPUs have {usual[:40]}"


def _absent(gpu: nvidia.Gpu, peers: list[nvidia.Gpu]) -> list[str]:
    """Values that every equal GPU reports and this one does not. One peer alone is no rule."""
    if len(peers) < 2:
        return []
    common = frozenset.intersection(*(peer.reported_paths() for peer in peers))
    return sorted(path for path in common - gpu.reported_paths() if not path.startswith(_VARYING))
