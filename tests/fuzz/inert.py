"""Differences between two readings of a machine, and the fields whose loss changes no verdict.

A field is inert if no check judges it: it is shown beside a finding, identifies a part for a person, or describes an
engine that training does not use. Every other field must be listed nowhere: its loss has to be refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

PROBES = ("burn", "corruption", "cuda_init", "gemm", "hbm", "memory_pattern", "memory_whole", "p2p", "pcie_copy")
# Leaves of `nvidia-smi -q -x`, by their path under <gpu>.
_SMI = (
    r"(default_)?applications_clocks/mem_clock|accounting_mode.*|(max_)?clocks/(?!sm_clock).*|max_customer_boost_clocks/.*",
    r"bar1_memory_usage/.*|cc_protected_memory_usage/.*|fb_memory_usage/(reserved|free)",
    r"(encoder|fbc)_stats/.*|utilization/(memory|encoder|decoder|jpeg|ofa)_util|display_\w+|voltage/.*",
    r"gpu_memory_power_readings/.*|sparse_operation_mode|pci/pci_gpu_link_info/pcie_gen/\w*(device|host)_\w+",
    r"pci/(pci_(bus|bus_id|device|domain|sub_system_id|base_class|sub_class|device_id)|[rt]x_util)",
    r"serial|pdi|board_id|board_part_number|gpu_part_number|gpu_fru_part_number|gsp_firmware_version|platformInfo/.*",
    r"inforom_version/.*|minor_number|multigpu_board|product_architecture|product_brand",
    r"gpu_power_readings/(average_power_draw|instant_power_draw|requested_power_limit|min_power_limit|max_power_limit)",
    # Limits that only drivers without T.Limit are judged by, and the place of errors that are counted elsewhere.
    r"temperature/gpu_temp_(max_(?!mem_threshold)\w+|slow_tlimit_threshold)|ecc_errors/aggregate_uncorrectable_sram_sources/.*",
    r"remapped_rows/remapped_row_(corr|unc)_inactive|remapped_rows/row_remapper_histogram/row_remapper_histogram_(max|high|partial)",
    r"clocks_event_reasons/clocks_event_reason_(gpu_idle|sync_boost|(applications|display)_clocks_setting)",
    r"clocks_event_reasons_counters/clocks_event_reasons_counters_(sync_boost|sw_power_cap)",
)
_C2C = "c2c_mode"  # of a superchip gpu_pcie judges it; others have none
_LEAF = re.compile(r"\.smi\.gpus\[\d+\]\.leaves\[(?P<leaf>.*)\]")
_INERT_LEAF = re.compile("|".join(f"(?:{part})" for part in _SMI))
_RUN = r"\.answer\.stdout\[report\]"
# Fields of other readings: (check, path).
_FIELDS = (
    # A module that no check asks for, a line of version.py that states no version, a mount that is no network mount.
    ("kernel_modules", r"\.loaded"),
    ("cpu_load", r"\.usage_percent"),  # shown; the load is judged
    ("gpu_compat", r"\.torch"),
    ("mounts", r"|\[\d+\].*"),
    # Firmware is shown; the link layer of EFA is "Unspecified".
    ("ib_ports", r"\.second\.adapters\[\d+\]\.firmware"),
    ("efa", r"\.devices\[\d+\]\.ports\[\d+\]\.link_layer"),
    # Resets are ordered by line; their times are shown.
    ("xid", r"\.log\.resets\[\d+\]\.at"),
    # Names of memory patterns, whose number is judged; versions and CPUs of a probe.
    ("memory_pattern", r"\.answers\[.*\]\.stdout\[results\]\[patterns\]\[\d+\]"),
    ("pcie_copy", r"\.answers\[.*\]\.stdout\[results\]\[cpus\]"),
    # Sentences, processes and times of a run of collectives; bandwidths, sizes, ranks and verdicts are judged.
    ("nccl", _RUN + r"\[(sweep|members|notes|timings|transport|took_s|overall|exit_code)\].*"),
    ("nccl", _RUN + r"\[results\]\[\d+\](\[took_s\]|\[findings\]\[\d+\]\[(reason|action|values)\].*)"),
    ("nccl", _RUN + r"\[rows\]\[\d+\]\[(seq|repeats|time_us|algbw_gbps|median_us|p95_us|slowest_rank|ranks)\]"),
    *((probe, r"\.answers\[.*\]\.stdout\[device\]\[(torch|cuda|name|capability)\]") for probe in PROBES),
)
# Values of a finding that are shown and not judged: (check, name).
_SHOWN = (
    ("mounts", "source"),
    ("pcie_copy", "cpus"),
    *((probe, name) for probe in PROBES for name in ("torch", "torch_cuda")),
)


def is_inert(check: str, path: str, *, superchip: bool) -> bool:
    """Whether the loss of a field changes nothing that any check judges."""
    leaf = _LEAF.search(path)
    if leaf is not None and leaf["leaf"] == _C2C:
        return not superchip
    if leaf is not None:
        return _INERT_LEAF.fullmatch(leaf["leaf"]) is not None
    return any(check == name and re.fullmatch(pattern, path) for name, pattern in _FIELDS)


def judged_values(check: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a finding without those that are only shown."""
    return {name: value for name, value in values.items() if (check, name) not in _SHOWN}


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Paths of the fields that differ."""
    if type(before) is not type(after):
        yield path
    elif dataclasses.is_dataclass(before):
        for field in dataclasses.fields(before):
            yield from differences(getattr(before, field.name), getattr(after, field.name), f"{path}.{field.name}")
    elif isinstance(before, Mapping):
        for key in {**before, **after}:
            if key in before and key in after:
                yield from differences(before[key], after[key], f"{path}[{key}]")
            else:
                yield f"{path}[{key}]"
    elif isinstance(before, (list, tuple)):
        if len(before) != len(after):
            yield path
        else:
            for index, (one, other) in enumerate(zip(before, after, strict=True)):
                yield from differences(one, other, f"{path}[{index}]")
    elif before != after:
        documents = _json(before), _json(after)
        if None in documents:
            yield path
        else:
            yield from differences(*documents, path)


def _json(text: Any) -> Any:
    """The document of a text that is JSON, or of its last line, the report of a run; None for anything else."""
    if not isinstance(text, str) or text.lstrip()[:1] not in ("{", "["):
        return None
    for part in (text, text.strip().rpartition("\n")[2]):
        with contextlib.suppress(ValueError):
            return json.loads(part)
    return None
