"""Differences between two readings of a machine, and the fields whose loss changes no verdict.

A field is inert if no check judges it: it is shown beside a finding, identifies a part for a person, or describes an
engine that training does not use. Every other field must be listed nowhere: its loss has to be refused.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

# Leaves of `nvidia-smi -q -x`, by their path under <gpu>.
_SMI = (
    r"(default_)?applications_clocks/.*|accounting_mode.*|clocks/.*|max_clocks/.*|max_customer_boost_clocks/.*",
    r"bar1_memory_usage/.*|cc_protected_memory_usage/.*|fb_memory_usage/(reserved|free)",
    r"(encoder|fbc)_stats/.*|utilization/(memory|encoder|decoder|jpeg|ofa)_util|display_\w+|c2c_mode|voltage/.*",
    r"pci/(pci_(bus|device|domain|sub_system_id|base_class|sub_class|device_id)|[rt]x_util)",
    r"serial|board_id|board_part_number|gpu_part_number|gpu_fru_part_number|gsp_firmware_version|platformInfo/.*",
    r"inforom_version/.*|minor_number|multigpu_board|product_architecture|product_brand",
    r"gpu_power_readings/(average_power_draw|instant_power_draw|min_power_limit|max_power_limit)",
    # Limits that only drivers without T.Limit are judged by, and the place of errors that are counted elsewhere.
    r"temperature/gpu_temp_max_\w+|ecc_errors/aggregate_uncorrectable_sram_sources/.*",
    r"remapped_rows/remapped_row_(corr|unc)_inactive|remapped_rows/row_remapper_histogram/.*",
    r"clocks_event_reasons/clocks_event_reason_(gpu_idle|applications_clocks_setting)",
    r"clocks_event_reasons_counters/clocks_event_reasons_counters_sync_boost",
)
_LEAF = re.compile(r"\.smi\.gpus\[\d+\]\.leaves\[(?P<leaf>.*)\]")
_INERT_LEAF = re.compile("|".join(f"(?:{part})" for part in _SMI))
# Fields of other readings: (check, path).
_FIELDS = (
    # A module that no check asks for.
    ("kernel_modules", r"\.loaded"),
)


def is_inert(check: str, path: str) -> bool:
    """Whether the loss of a field changes nothing that any check judges."""
    leaf = _LEAF.search(path)
    if leaf is not None:
        return _INERT_LEAF.fullmatch(leaf["leaf"]) is not None
    return any(check == name and re.fullmatch(pattern, path) for name, pattern in _FIELDS)


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
    """The document of a text that is JSON; None for anything else."""
    if not isinstance(text, str) or text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None
