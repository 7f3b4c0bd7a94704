"""Answers of the simulated nvidia-smi: generated from the facts of the GPU model, for healthy and idle GPUs."""

from __future__ import annotations

import hashlib
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.core.gpus import GpuModel

DRIVER, CUDA = "580.95.05", "13.0"
# The text of nvidia-smi where the driver does not run, and its exit code.
BROKEN = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n"
)
BROKEN_EXIT = 9
_RESERVED_MIB = 616


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a simulated machine. Serial and UUID belong to the hardware: they return with it."""

    index: int
    model: GpuModel
    serial: str
    uuid: str

    @property
    def name(self) -> str:
        return f"NVIDIA {self.model.names[0]}"

    @property
    def bus_id(self) -> str:
        return f"00000000:{0x10 + self.index:02X}:00.0"

    @property
    def total_mib(self) -> int:
        return int(self.model.memory_gb * 1e9 / 2**20 * 1.03)  # the vendor's gigabytes, as nvidia-smi shows them


def make_gpus(model: GpuModel | None, count: int, hardware: str) -> list[Gpu]:
    """GPUs of the hardware of this name; the same name gives the same serials."""
    gpus = []
    for index in range(count):
        assert model is not None
        digest = hashlib.sha256(f"{hardware} {index}".encode()).hexdigest()
        uuid = f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"
        gpus.append(Gpu(index=index, model=model, serial=f"165{int(digest[:8], 16) % 10**10:010d}", uuid=uuid))
    return gpus


def answers(gpus: list[Gpu]) -> Mapping[str, str]:
    """Text of each answer by the arguments of nvidia-smi."""
    return {
        "-q -x": render_xml(gpus),
        "-L": "".join(f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})\n" for gpu in gpus),
        "nvlink -s": "".join(_nvlinks(gpu, errors=False) for gpu in gpus),
        "nvlink -e": "".join(_nvlinks(gpu, errors=True) for gpu in gpus),
        "": "".join(f"{gpu.index}  {gpu.name}  {gpu.bus_id}  0MiB / {gpu.total_mib}MiB  0%\n" for gpu in gpus),
    }


def rows(gpus: list[Gpu]) -> list[dict[str, str]]:
    """Values of `--query-gpu` by field."""
    return [
        {
            "index": str(gpu.index),
            "name": gpu.name,
            "gpu_name": gpu.name,
            "uuid": gpu.uuid,
            "gpu_uuid": gpu.uuid,
            "serial": gpu.serial,
            "gpu_serial": gpu.serial,
            "pci.bus_id": gpu.bus_id,
            "gpu_bus_id": gpu.bus_id,
            "driver_version": DRIVER,
            "count": str(len(gpus)),
            "memory.total": f"{gpu.total_mib} MiB",
            "memory.used": "0 MiB",
            "memory.free": f"{gpu.total_mib - _RESERVED_MIB} MiB",
            "utilization.gpu": "0 %",
            "utilization.memory": "0 %",
            "temperature.gpu": "38",
            "power.draw": "82.00 W",
            "power.limit": f"{_watts(gpu)} W",
            "ecc.errors.uncorrected.volatile.total": "0",
            "ecc.errors.uncorrected.aggregate.total": "0",
        }
        for gpu in gpus
    ]


_SRAM_SOURCES = ("sram_l2", "sram_sm", "sram_microcontroller", "sram_pcie", "sram_other")


def render_xml(gpus: list[Gpu]) -> str:
    """The document of `nvidia-smi -q -x`, with the parts that checks read."""
    root = ET.Element("nvidia_smi_log")
    _fill(root, {"driver_version": DRIVER, "cuda_version": CUDA, "attached_gpus": str(len(gpus))})
    for gpu in gpus:
        _fill(ET.SubElement(root, "gpu", id=gpu.bus_id), _entry(gpu))
    ET.indent(root, "\t")
    head = '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n'
    return head + ET.tostring(root, encoding="unicode") + "\n"


def _entry(gpu: Gpu) -> dict[str, Any]:
    hbm = (gpu.model.memory_kind or "").startswith("HBM")
    generation, width = str(gpu.model.pcie_gen or 4), f"{gpu.model.pcie_width or 16}x"
    clock = {"graphics_clock": "1980 MHz", "sm_clock": "1980 MHz", "mem_clock": "2619 MHz"}
    return {
        "product_name": gpu.name,
        "product_brand": "NVIDIA",
        "product_architecture": gpu.model.generation or "N/A",
        "persistence_mode": "Enabled",
        "mig_mode": {"current_mig": "Disabled", "pending_mig": "Disabled"},
        "mig_devices": "None",
        "serial": gpu.serial,
        "uuid": gpu.uuid,
        "minor_number": str(gpu.index),
        "vbios_version": "96.00.A5.00.1A",
        "gpu_virtualization_mode": {"virtualization_mode": "Pass-Through"},
        "gpu_recovery_action": "None",
        "pci": {
            "pci_bus": gpu.bus_id[9:11],
            "pci_device": "00",
            "pci_domain": "0000",
            "pci_bus_id": gpu.bus_id,
            "pci_gpu_link_info": {
                "pcie_gen": {
                    "max_link_gen": generation,
                    "current_link_gen": generation,
                    "device_current_link_gen": generation,
                    "max_device_link_gen": generation,
                    "max_host_link_gen": "N/A",
                },
                "link_widths": {"max_link_width": width, "current_link_width": width},
            },
            "replay_counter": "0",
            "replay_rollover_counter": "0",
        },
        "performance_state": "P0",
        "clocks_event_reasons": {
            f"clocks_event_reason_{name}": "Active" if name == "gpu_idle" else "Not Active"
            for name in (
                "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "hw_thermal_slowdown",
                "hw_power_brake_slowdown", "sync_boost", "sw_thermal_slowdown", "display_clocks_setting",
            )
        },
        "fb_memory_usage": {
            "total": f"{gpu.total_mib} MiB",
            "reserved": f"{_RESERVED_MIB} MiB",
            "used": "0 MiB",
            "free": f"{gpu.total_mib - _RESERVED_MIB} MiB",
        },
        "compute_mode": "Default",
        "utilization": {"gpu_util": "0 %", "memory_util": "0 %"},
        "ecc_mode": {"current_ecc": "Enabled", "pending_ecc": "Enabled"},
        "ecc_errors": _ecc_errors(),
        "remapped_rows": {
            "remapped_row_corr": "0",
            "remapped_row_unc": "0",
            "remapped_row_pending": "No",
            "remapped_row_failure": "No",
        },
        "temperature": {
            "gpu_temp": "38 C",
            "gpu_temp_tlimit": "49 C",
            "memory_temp": "38 C" if hbm else "N/A",
        },
        "gpu_power_readings": {
            "power_state": "P0",
            "average_power_draw": "82.00 W",
            "instant_power_draw": "82.00 W",
            "current_power_limit": f"{_watts(gpu)} W",
            "default_power_limit": f"{_watts(gpu)} W",
            "max_power_limit": f"{_watts(gpu)} W",
        },
        "clocks": clock,
        "max_clocks": clock,
        "fabric": {"state": "Completed", "status": "Success"} if gpu.model.fabric else {"state": "N/A"},
    }  # fmt: skip


def _ecc_errors() -> dict[str, Any]:
    none = dict.fromkeys(("sram_correctable", "dram_correctable", "dram_uncorrectable"), "0")
    none |= {"sram_uncorrectable_parity": "0", "sram_uncorrectable_secded": "0"}
    return {
        "volatile": none,
        "aggregate": none | {"sram_threshold_exceeded": "No"},
        "aggregate_uncorrectable_sram_sources": dict.fromkeys(_SRAM_SOURCES, "0"),
    }


def _watts(gpu: Gpu) -> str:
    return f"{gpu.model.power_w or 300:.2f}"


def _nvlinks(gpu: Gpu, *, errors: bool) -> str:
    links = range(gpu.model.nvlinks or 0)
    words = ("Replay Errors", "Recovery Errors", "CRC Errors")
    if errors:
        lines = [f"\t Link {link}: {word}: 0\n" for link in links for word in words]
    else:
        lines = [f"\t Link {link}: {(gpu.model.nvlink_gbps or 25) * 1.0625:.3f} GB/s\n" for link in links]
    return "".join([f"GPU {gpu.index}: {gpu.name} (UUID: {gpu.uuid})\n", *lines]) if lines else ""


def _fill(node: ET.Element, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        child = ET.SubElement(node, name)
        if isinstance(value, Mapping):
            _fill(child, value)
        else:
            child.text = value
