"""Faults of a recorded node of eight H200s, one change each, with the finding that it must give."""

from __future__ import annotations

import shlex
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machines import Machine
from trainmaster import checks
from trainmaster.checks.gpu import gpu_compat

CHECKS = [name for name in checks.names() if name.startswith("gpu_")] + ["xid", "dcgm"]
SAMPLES = Path(__file__).parents[1] / "node" / "parse" / "samples"
SMI = "nvidia-smi -q -x"
FABRIC: dict[str, str | None] = {
    "fabric/state": "Completed",
    "fabric/status": "Success",
    "fabric/health/summary": "Healthy",
    "fabric/health/bandwidth": "Full",
    "fabric/health/route_recovery_in_progress": "False",
    "fabric/health/route_unhealthy": "False",
    "fabric/health/access_timeout_recovery": "False",
    "fabric/health/incorrect_configuration": "None",
}


def make(machine: Machine, gpus: int = 8, **shape: Any) -> None:
    """A node of H200s behind NVSwitches, without DCGM."""
    machine.gpus(gpus, **shape)
    machine.edit(None, FABRIC)
    machine.refuses("dcgmi diag -r 1 -j", "CommandMissing", "dcgmi is not on this machine")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is done to the node, and what must be said of it."""

    name: str
    put: Callable[[Machine], None]
    check: str
    device: str | None = "gpu3"
    verdict: str
    expect: dict[str, Any] = field(default_factory=dict)

    @property
    def overall(self) -> str:
        return {"fail": "FAIL", "warn": "WARN", "error": "INCOMPLETE"}[self.verdict]


def edit(**paths: str | None) -> Callable[[Machine], None]:
    """Other values at GPU 3; `__` stands for the slash of a path."""
    return lambda node: node.edit(3, {path.replace("__", "/"): value for path, value in paths.items()})


def reset_status(required: str, recommended: str) -> Callable[[Machine], None]:
    """A driver without gpu_recovery_action: all GPUs report the older flags, GPU 3 these."""

    def put(node: Machine) -> None:
        root = ET.fromstring(node.host.run(*shlex.split(SMI)).stdout)
        for number, gpu in enumerate(root.findall("gpu")):
            action = gpu.find("gpu_recovery_action")
            assert action is not None
            gpu.remove(action)
            status = ET.SubElement(gpu, "gpu_reset_status")
            ET.SubElement(status, "reset_required").text = required if number == 3 else "No"
            ET.SubElement(status, "drain_and_reset_recommended").text = recommended if number == 3 else "No"
        node.smi(ET.tostring(root, encoding="unicode"))

    return put


def event(name: str, value: str = "Active") -> Callable[[Machine], None]:
    return edit(**{f"clocks_event_reasons__clocks_event_reason_{name}": value})


def spent(name: str, value: str) -> Callable[[Machine], None]:
    return edit(**{f"clocks_event_reasons_counters__clocks_event_reasons_counters_{name}": value})


def link(option: str, old: str, new: str) -> Callable[[Machine], None]:
    """One line of GPU 3 in `nvidia-smi nvlink`."""

    def put(node: Machine) -> None:
        line = f"nvidia-smi nvlink {option}"
        before, head, rest = node.host.run(*line.split()).stdout.partition("GPU 3:")
        assert old in rest
        node.command(line, before + head + rest.replace(old, new, 1))

    return put


def kernel(text: str, *, times: int = 1) -> Callable[[Machine], None]:
    """Lines in the kernel log. GPU 3 stands at 0000:13:00.0."""

    def put(node: Machine) -> None:
        log = node.host.run("dmesg").stdout
        node.command("dmesg", log + "".join(f"[{1000 + n}.5] {text}\n" for n in range(times)))

    return put


def xid(code: int, text: str = "pid=1234, name=python, some text") -> Callable[[Machine], None]:
    return kernel(f"NVRM: Xid (PCI:0000:13:00): {code}, {text}")


def process(node: Machine) -> None:
    tags = {"pid": "4711", "type": "C", "process_name": "python", "used_memory": "900 MiB"}
    row = "".join(f"<{tag}>{value}</{tag}>" for tag, value in tags.items())
    row = f"<process_info>{row}</process_info>"
    text = node.host.run(*SMI.split()).stdout
    place = [at for at in range(len(text)) if text.startswith("<processes>", at)][3] + len("<processes>")
    node.smi(text[:place] + row + text[place:])


def dcgm(sample: str, code: int) -> Callable[[Machine], None]:
    def put(node: Machine) -> None:
        make(node, 4)
        node.command("dcgmi diag -r 1 -j", (SAMPLES / sample).read_text(), exit_code=code)

    return put


def torch(cuda: str) -> Callable[[Machine], None]:
    def put(node: Machine) -> None:
        line = shlex.join(["python3", "-c", gpu_compat.SCRIPT])
        node.command(line, f"__version__ = '2.99.0'\ncuda: Optional[str] = {cuda}\n")

    return put


def broken_inforom(node: Machine) -> None:
    node.smi(node.host.run(*SMI.split()).stdout + "\nWARNING: infoROM is corrupted at gpu 00000000:13:00.0\n")


def retire(node: Machine) -> None:
    counts = {f"retired_pages/{kind}_retirement/retired_count": "1" for kind in ("multiple_single_bit", "double_bit")}
    node.edit(3, {**counts, "retired_pages/pending_retirement": "Yes"})


ECC = "ecc_errors__volatile__"
FAULTS = [
    # The GPU is not there, or not what it should be.
    Fault(name="lost by the driver", put=lambda node: make(node, drop=3), check="gpu_count", verdict="fail"),
    Fault(name="lost by the bus", put=lambda node: make(node, 7), check="gpu_count", device="gpu7", verdict="fail",
          expect={"gpus": 8}),
    Fault(name="counted, not listed", put=lambda node: node.replace(SMI, "<attached_gpus>8<", "<attached_gpus>9<"),
          check="gpu_count", device=None, verdict="fail"),
    Fault(name="a device file too many", put=lambda node: node.answer("list", "/dev", [f"nvidia{n}" for n in range(9)]),
          check="gpu_count", device="gpu8", verdict="fail"),
    Fault(name="wrong model", put=edit(product_name="NVIDIA H100 80GB HBM3", fb_memory_usage__total="81559 MiB"),
          check="gpu_model", verdict="fail", expect={"gpu_model": "H200"}),
    Fault(name="mixed models", put=edit(product_name="NVIDIA H100 80GB HBM3", fb_memory_usage__total="81559 MiB"),
          check="gpu_model", device=None, verdict="warn"),
    Fault(name="no UUID", put=edit(uuid="GPU-1234"), check="gpu_model", verdict="error"),
    Fault(name="memory too small", put=edit(fb_memory_usage__total="71885 MiB"), check="gpu_memory", verdict="fail"),
    Fault(name="wrong driver", put=lambda node: None, check="gpu_driver", device=None, verdict="fail",
          expect={"driver": "570"}),
    Fault(name="wrong VBIOS", put=edit(vbios_version="96.00.99.00.01"), check="gpu_vbios", verdict="fail",
          expect={"vbios": "96.00.A5.00.1A"}),
    Fault(name="one other VBIOS", put=edit(vbios_version="96.00.99.00.01"), check="gpu_vbios", device=None,
          verdict="warn"),
    Fault(name="InfoROM corrupted", put=broken_inforom, check="gpu_vbios", verdict="fail"),
    Fault(name="firmware of another driver", put=edit(gsp_firmware_version="570.1"), check="gpu_vbios", verdict="warn"),
    Fault(name="torch too new for the driver", put=torch("'14.0'"), check="gpu_compat", device=None, verdict="fail"),
    Fault(name="torch without CUDA", put=torch("None"), check="gpu_compat", device=None, verdict="fail"),
    # Memory.
    Fault(name="remap pending", put=edit(remapped_rows__remapped_row_pending="Yes"), check="gpu_remap", verdict="fail"),
    Fault(name="remap failed", put=edit(remapped_rows__remapped_row_failure="Yes"), check="gpu_remap", verdict="fail"),
    Fault(name="no spare rows", check="gpu_remap", verdict="warn",
          put=edit(remapped_rows__row_remapper_histogram__row_remapper_histogram_none="2 bank(s)")),
    Fault(name="few spare rows", check="gpu_remap", verdict="warn",
          put=edit(remapped_rows__row_remapper_histogram__row_remapper_histogram_low="40 bank(s)")),
    Fault(name="512 rows remapped", put=edit(remapped_rows__remapped_row_unc="512"), check="gpu_remap", verdict="warn"),
    Fault(name="uncorrectable SRAM by its source", check="gpu_ecc", verdict="warn",
          put=edit(ecc_errors__aggregate_uncorrectable_sram_sources__sram_l2="7")),
    Fault(name="no power draw", put=edit(gpu_power_readings__instant_power_draw="0.00 W"), check="gpu_power",
          verdict="error"),
    # Less than equal GPUs.
    *(Fault(name=f"peers: {path} {value}", put=edit(**{path: value}), check="gpu_peers", verdict=verdict)
      for path, value, verdict in (
          ("max_clocks__sm_clock", "1000 MHz", "fail"), ("max_clocks__graphics_clock", "900 MHz", "fail"),
          ("max_clocks__mem_clock", "1000 MHz", "fail"), ("bar1_memory_usage__total", "256 MiB", "fail"),
          ("fb_memory_usage__total", "71000 MiB", "fail"),
          ("gpu_power_readings__default_power_limit", "500.00 W", "warn"),
          ("gpu_power_readings__current_power_limit", "400.00 W", "warn"), ("pci__pci_sub_system_id", "0x1", "warn"),
          ("inforom_version__img_version", "G520.0200.00.01", "warn"), ("remapped_rows", "N/A", "error"),
          ("temperature__memory_temp", None, "error"), ("clocks_event_reasons_counters", None, "error"),
          ("serial", "N/A", "error"), ("bar1_memory_usage__total", "ERR!", "error"))),
    Fault(name="uncorrectable DRAM", put=edit(**{ECC + "dram_uncorrectable": "1"}), check="gpu_ecc", verdict="fail"),
    Fault(name="uncorrectable SRAM", put=edit(**{ECC + "sram_uncorrectable_parity": "2"}), check="gpu_ecc",
          verdict="fail"),
    Fault(name="uncorrectable once", put=edit(ecc_errors__aggregate__dram_uncorrectable="4"), check="gpu_ecc",
          verdict="warn"),
    Fault(name="many corrected", put=edit(**{ECC + "dram_correctable": "20000"}), check="gpu_ecc", verdict="warn"),
    Fault(name="SRAM threshold", put=edit(ecc_errors__aggregate__sram_threshold_exceeded="Yes"), check="gpu_ecc",
          verdict="fail"),
    Fault(name="repair pending", put=edit(ecc_errors__channel_repair_pending="Yes"), check="gpu_ecc", verdict="fail"),
    Fault(name="ECC off", put=edit(ecc_mode__current_ecc="Disabled"), check="gpu_ecc", verdict="fail"),
    Fault(name="ECC off, wanted", put=edit(ecc_mode__current_ecc="Disabled"), check="gpu_ecc", verdict="fail",
          expect={"ecc": True}),
    Fault(name="page retirement pending", put=retire, check="gpu_retired", verdict="fail"),
    # Links.
    Fault(name="PCIe x8", put=edit(pci__pci_gpu_link_info__link_widths__current_link_width="8x"), check="gpu_pcie",
          verdict="fail"),
    Fault(name="PCIe generation 4", put=edit(pci__pci_gpu_link_info__pcie_gen__max_link_gen="4"), check="gpu_pcie",
          verdict="fail"),
    Fault(name="PCIe generation 4, 5 stated", put=edit(pci__pci_gpu_link_info__pcie_gen__max_link_gen="4"),
          check="gpu_pcie", verdict="fail", expect={"pcie_gen": 5}),
    Fault(name="PCIe generation 1 of one idle module", check="gpu_pcie", verdict="warn",
          put=edit(pci__pci_gpu_link_info__pcie_gen__current_link_gen="1")),
    Fault(name="PCIe generation 1 while busy", check="gpu_pcie", verdict="warn",
          put=edit(pci__pci_gpu_link_info__pcie_gen__current_link_gen="1", utilization__gpu_util="95 %")),
    Fault(name="NVLink down", put=link("-s", "Link 7: 26.562 GB/s", "Link 7: <inactive>"), check="gpu_nvlink",
          verdict="fail"),
    Fault(name="NVLink not shown", put=link("-s", "\t Link 17: 26.562 GB/s\n", ""), check="gpu_nvlink", verdict="fail"),
    Fault(name="NVLink recovery errors", put=link("-e", "Link 2: Recovery Errors: 0", "Link 2: Recovery Errors: 3"),
          check="gpu_nvlink", verdict="fail"),
    Fault(name="NVLink replays", put=link("-e", "Link 2: Replay Errors: 0", "Link 2: Replay Errors: 50000"),
          check="gpu_nvlink", verdict="warn"),
    Fault(name="NVLink says rubbish", put=link("-s", "Link 7: 26.562 GB/s", "Link 7: ERR!"), check="gpu_nvlink",
          verdict="fail"),
    Fault(name="fabric not joined", put=edit(fabric__state="In Progress"), check="gpu_fabric", verdict="fail"),
    Fault(name="fabric joined badly", put=edit(fabric__status="Insufficient Resources"), check="gpu_fabric",
          verdict="fail"),
    Fault(name="fabric degraded", put=edit(fabric__health__bandwidth="Degraded"), check="gpu_fabric", verdict="fail"),
    # Speed.
    Fault(name="hardware slowdown", put=event("hw_slowdown"), check="gpu_throttle", verdict="fail"),
    Fault(name="thermal slowdown", put=event("hw_thermal_slowdown"), check="gpu_throttle", verdict="fail"),
    Fault(name="power brake", put=event("hw_power_brake_slowdown"), check="gpu_throttle", verdict="fail"),
    Fault(name="software thermal slowdown", put=event("sw_thermal_slowdown"), check="gpu_throttle", verdict="warn"),
    Fault(name="was hot", put=spent("hw_therm_slowdown", "90000000 us"), check="gpu_throttle", verdict="warn"),
    Fault(name="power cap lowered", put=edit(gpu_power_readings__current_power_limit="400.00 W"), check="gpu_power",
          verdict="warn"),
    Fault(name="power cap below what is stated", put=edit(gpu_power_readings__current_power_limit="400.00 W"),
          check="gpu_power", verdict="fail", expect={"gpu_power_w": 700.0}),
    Fault(name="capped by a lowered limit", check="gpu_throttle", verdict="warn",
          put=edit(clocks_event_reasons__clocks_event_reason_sw_power_cap="Active",
                   gpu_power_readings__current_power_limit="400.00 W",
                   gpu_power_readings__instant_power_draw="398.00 W")),
    Fault(name="capped below its peers", check="gpu_throttle", verdict="warn",
          put=edit(clocks_event_reasons__clocks_event_reason_sw_power_cap="Active",
                   gpu_power_readings__current_power_limit="400.00 W",
                   gpu_power_readings__default_power_limit="400.00 W",
                   gpu_power_readings__instant_power_draw="398.00 W")),
    Fault(name="capped without a load", put=event("sw_power_cap"), check="gpu_throttle", verdict="warn"),
    Fault(name="a cap of an unknown word", check="gpu_throttle", verdict="error",
          put=edit(clocks_event_reasons__clocks_event_reason_sw_power_cap="Perhaps")),
    Fault(name="the module's power cap lowered", check="gpu_power", verdict="warn",
          put=edit(module_power_readings__current_power_limit="900.00 W",
                   module_power_readings__default_power_limit="1200.00 W")),
    Fault(name="clock lowered", put=edit(applications_clocks__graphics_clock="1200 MHz"), check="gpu_clocks",
          verdict="warn"),
    Fault(name="memory clock lowered", put=edit(applications_clocks__mem_clock="1593 MHz"), check="gpu_clocks",
          verdict="warn"),
    Fault(name="fabric health unreadable", put=edit(fabric__health__summary="ERR!"), check="gpu_fabric",
          verdict="error"),
    Fault(name="fabric unreadable and degraded", put=edit(fabric__health__summary="ERR!",
                                                          fabric__health__bandwidth="Degraded"), check="gpu_fabric",
          verdict="fail"),
    Fault(name="clock below what is stated", put=edit(applications_clocks__graphics_clock="1200 MHz"),
          check="gpu_clocks", verdict="fail", expect={"gpu_clock_mhz": 1980.0}),
    Fault(name="hot", put=edit(temperature__gpu_temp="91 C"), check="gpu_temperature", verdict="fail"),
    # Somebody else, or closed.
    Fault(name="foreign process", put=process, check="gpu_processes", verdict="warn"),
    Fault(name="memory in use", put=edit(fb_memory_usage__used="60000 MiB"), check="gpu_memory", verdict="warn"),
    Fault(name="busy", put=edit(utilization__gpu_util="97 %", clocks__sm_clock="1980 MHz"), check="gpu_utilisation",
          verdict="warn"),
    Fault(name="MIG on", put=edit(mig_mode__current_mig="Enabled", mig_mode__pending_mig="Enabled"), check="gpu_modes",
          verdict="fail"),
    Fault(name="MIG pending", put=edit(mig_mode__pending_mig="Enabled"), check="gpu_modes", verdict="warn"),
    Fault(name="compute prohibited", put=edit(compute_mode="Prohibited"), check="gpu_modes", verdict="fail"),
    Fault(name="persistence off", put=edit(persistence_mode="Disabled"), check="gpu_modes", verdict="warn"),
    Fault(name="recovery: reset", put=edit(gpu_recovery_action="Reset"), check="gpu_recovery", verdict="fail"),
    Fault(name="recovery: reset required", put=reset_status("Yes", "No"), check="gpu_recovery", verdict="fail"),
    Fault(name="recovery: reset recommended", put=reset_status("No", "Yes"), check="gpu_recovery", verdict="fail"),
    Fault(name="recovery: reset ERR!", put=reset_status("ERR!", "No"), check="gpu_recovery", verdict="error"),
    Fault(name="recovery: not reported", put=edit(gpu_recovery_action=None), check="gpu_recovery", verdict="error"),
    Fault(name="NVLink at 0 GB/s", put=link("-s", "Link 7: 26.562 GB/s", "Link 7: 0 GB/s"), check="gpu_nvlink",
          verdict="fail"),
    Fault(name="NVLink slow", put=link("-s", "Link 7: 26.562 GB/s", "Link 7: 2.5 GB/s"), check="gpu_nvlink",
          verdict="fail"),
    Fault(name="recovery: a new word", put=edit(gpu_recovery_action="Exorcise"), check="gpu_recovery", verdict="fail"),
    # The kernel log.
    *(Fault(name=f"Xid {code}", put=xid(code), check="xid", verdict="fail")
      for code in (46, 48, 62, 64, 74, 79, 95, 119, 120, 140, 143)),
    *(Fault(name=f"Xid {code}", put=xid(code), check="xid", verdict="warn") for code in (13, 31, 63, 94, 99999)),
    Fault(name="Xid 154 asks for a reset", check="xid", verdict="fail",
          put=xid(154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")),
    Fault(name="off the bus, without a number", check="xid", verdict="fail",
          put=kernel("NVRM: GPU at 0000:13:00.0 has fallen off the bus.")),
    Fault(name="Xid 31, which this site fails", put=xid(31), check="xid", verdict="fail",
          expect={"xids": ("31:fail",)}),
    Fault(name="SXid fatal", check="xid", device="nvswitch 0000:c1:00", verdict="fail",
          put=kernel("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 46 LTSSM Fault Up")),
    Fault(name="an Xid that cannot be read", put=kernel("NVRM: Xid (PCI:00"), check="xid", device=None,
          verdict="error"),
    # Nobody can be asked, or the answer is damaged: never a pass.
    Fault(name="nvidia-smi hangs", check="gpu_count", device=None, verdict="error",
          put=lambda node: node.refuses(SMI, "CommandTimedOut", "nvidia-smi gave no answer in 90 s and was killed")),
    Fault(name="nvidia-smi says rubbish", put=lambda node: node.smi("Segmentation fault"), check="gpu_ecc", device=None,
          verdict="error"),
    Fault(name="nvidia-smi fails", check="gpu_pcie", device=None, verdict="error",
          put=lambda node: node.command(SMI, "Unable to determine the device handle: Unknown Error", exit_code=255)),
    Fault(name="ERR! power", put=edit(gpu_power_readings__default_power_limit="ERR!"), check="gpu_power",
          verdict="error"),
    Fault(name="ERR! temperature", put=edit(temperature__gpu_temp="ERR!"), check="gpu_temperature", verdict="error"),
    *(Fault(name=f"ECC: no {path}, which seven report", put=edit(**{f"ecc_errors__{path}": None}), check="gpu_ecc",
            verdict="error")
      for path in ("aggregate__sram_threshold_exceeded", "channel_repair_pending", "tpc_repair_pending",
                   "unrepairable_memory", "volatile__sram_correctable", "aggregate__sram_uncorrectable_parity")),
    Fault(name="ERR! ECC count", put=edit(**{ECC + "dram_uncorrectable": "ERR!"}), check="gpu_ecc", verdict="error"),
    Fault(name="GPU is lost", put=edit(compute_mode="GPU is lost"), check="gpu_count", verdict="fail"),
    Fault(name="a strange remap word", put=edit(remapped_rows__remapped_row_pending="Maybe"), check="gpu_remap",
          verdict="error"),
    Fault(name="a clock without a unit", put=edit(max_clocks__sm_clock="1980"), check="gpu_clocks", verdict="error"),
    Fault(name="a sensor gone mad", put=edit(gpu_power_readings__instant_power_draw="999999.00 W"), check="gpu_power",
          verdict="error"),
    Fault(name="nvlink hangs", check="gpu_nvlink", verdict="error",
          put=lambda node: node.refuses("nvidia-smi nvlink -s", "CommandTimedOut", "it gave no answer in 90 s")),
    Fault(name="no kernel log", check="xid", device=None, verdict="error",
          put=lambda node: node.command("dmesg", "", stderr="dmesg: read kernel buffer failed: Operation not permitted",
                                        exit_code=1)),
    Fault(name="empty kernel log", put=lambda node: node.command("dmesg", "\n"), check="xid", device=None,
          verdict="error"),
    # DCGM.
    Fault(name="DCGM: memory fails", put=dcgm("dcgm-4.2-memory-fails.json", 226), check="dcgm", device="gpu2",
          verdict="fail"),
    Fault(name="DCGM 3: memory fails", put=dcgm("dcgm-3.3.9-memory-fails.json", 226), check="dcgm", device="gpu1",
          verdict="fail"),
    Fault(name="DCGM hangs", check="dcgm", device=None, verdict="error",
          put=lambda node: node.refuses("dcgmi diag -r 1 -j", "CommandTimedOut", "it gave no answer in 180 s")),
    Fault(name="DCGM cannot reach its engine", check="dcgm", device=None, verdict="error",
          put=lambda node: node.command("dcgmi diag -r 1 -j", "Error: unable to connect", exit_code=235)),
    Fault(name="DCGM required and absent", put=lambda node: None, check="dcgm", device=None, verdict="error",
          expect={"dcgm": True}),
]  # fmt: skip
