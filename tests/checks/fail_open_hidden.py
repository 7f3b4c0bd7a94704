"""Machines with a fault beside a missing value, in parts that are all alike, or in a form that was not judged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from fail_open_cases import Case, gpus, log, mig
from gpu_faults import SAMPLES, SMI, make
from nodes import IB, infiniband, put

from machines import Machine


def nvlink(
    option: str, *changes: tuple[str, str], model: str = "NVIDIA H200", gpu: int | None = None
) -> Callable[[Machine], None]:
    """Eight GPUs of a model; `nvidia-smi nvlink` prints other words about one of them or all."""

    def change(machine: Machine) -> None:
        make(machine)
        machine.edit(None, {"product_name": model})
        text = machine.host.run("nvidia-smi", "nvlink", option).stdout
        parts = re.split(r"(?=^GPU \d+:)", text, flags=re.MULTILINE)
        for old, new in changes:
            assert old in text
            parts = [
                part.replace(old, new) if part.startswith(f"GPU {'' if gpu is None else f'{gpu}:'}") else part
                for part in parts
            ]
        machine.command(f"nvidia-smi nvlink {option}", "".join(parts))

    return change


def down(*links: int) -> Sequence[tuple[str, str]]:
    return [(f"Link {link}: 26.562 GB/s", f"Link {link}: <inactive>") for link in links]


def ports(numbers: Sequence[int], **files: str) -> Callable[[Machine], None]:
    """Eight InfiniBand rails on a GPU node, some with another rate or counter."""

    def change(machine: Machine) -> None:
        make(machine)
        infiniband(machine)
        put(machine, files={f"{IB}/mlx5_{number}/ports/1/{name.replace('__', '/')}": f"{text}\n"
                            for number in numbers for name, text in files.items()})  # fmt: skip

    return change


def no_counters(machine: Machine) -> None:
    make(machine)
    infiniband(machine)
    folders = (f"{IB}/mlx5_{number}/ports/1/{name}" for number in range(8) for name in ("counters", "hw_counters"))
    put(machine, files={}, lists=dict.fromkeys(folders))


def dcgm_rows(*rows: dict[str, object], summary: dict[str, object] | None = None) -> Callable[[Machine], None]:
    """DCGM 4's JSON of four GPUs that pass, with rows of other parts or remarks about the first test."""

    def build(machine: Machine) -> None:
        make(machine, 4)
        document = json.loads((SAMPLES / "dcgm-4.2-healthy.json").read_text())
        test = document["DCGM Diagnostic"]["test_categories"][0]["tests"][0]
        test["results"] += rows
        test["test_summary"] |= summary or {}
        machine.command("dcgmi diag -r 1 -j", json.dumps(document))

    return build


def switch(status: str, *, severity: int | None = None) -> dict[str, object]:
    row: dict[str, object] = {"entity_group": "Switch", "entity_group_id": 2, "entity_id": 0, "status": status}
    remark = {"warning": "Switch 0 link 3 down", "error_id": 1, "error_severity": severity}
    return row if severity is None else row | {"warnings": [remark]}


def by_bits(machine: Machine) -> None:
    """A V100 that counts errors of its caches by bits, and neither of the device memory nor in total."""
    make(machine)
    text = machine.host.run(*SMI.split()).stdout.replace(
        "<product_name>NVIDIA H200<", "<product_name>Tesla V100-SXM2-32GB<"
    )
    counts = "".join(f"<{bits}><l1_cache>0</l1_cache><device_memory>N/A</device_memory><total>N/A</total></{bits}>"
                     for bits in ("single_bit", "double_bit"))  # fmt: skip
    machine.smi(re.sub(r"<(volatile|aggregate)>.*?</\1>", rf"<\1>{counts}</\1>", text, flags=re.DOTALL))


def mig_without_rows(machine: Machine) -> None:
    mig(machine)
    machine.edit(None, {"remapped_rows": "N/A"})


def with_callers(machine: Machine) -> None:
    """A kernel that prints the thread of each message."""
    make(machine)
    text = machine.host.run("dmesg").stdout
    machine.command("dmesg", re.sub(r"^(\[ *[\d.]+\]) ", r"\1[    T1] ", text, flags=re.MULTILINE))


def cut_log(machine: Machine) -> None:
    """The only log ends in the middle of a line after a fault."""
    make(machine)
    fault = "[99999.0] NVRM: Xid (PCI:0000:13:00): 79, GPU has fallen off the bus.\n"
    machine.command("dmesg", f"{machine.host.run('dmesg').stdout}{fault}[99999.1] eth")
    machine.refuses("journalctl -k -b --no-pager -o short-monotonic", "CommandMissing", "no journalctl")
    for path in ("/var/log/kern.log", "/var/log/messages"):
        machine.file(path, None)


def smi_exit(code: int, changes: dict[str, str | None]) -> Callable[[Machine], None]:
    def change(machine: Machine) -> None:
        make(machine)
        machine.edit(3, changes)
        machine.command(SMI, machine.host.run(*SMI.split()).stdout, exit_code=code)

    return change


SPENT = "remapped_rows/row_remapper_histogram/row_remapper_histogram_none"
HEAT = "clocks_event_reasons_counters/clocks_event_reasons_counters_hw_therm_slowdown"
CASES = (
    Case(name="0 ib_ports=0 and a rate of its ports", check="ib_ports,cpu", before="PASS", after="INCOMPLETE",
         expect=("ib_ports=0", "ib_rate_gbps=400"), put=make),
    Case(name="1 two links of all GPUs of an unverified model inactive", check="gpu_nvlink", before="PASS",
         after="WARN", put=nvlink("-s", *down(16, 17), model="NVIDIA H20")),
    Case(name="1 two links of all GPUs of an unknown model inactive", check="gpu_nvlink", before="PASS", after="WARN",
         put=nvlink("-s", *down(16, 17), model="NVIDIA Graphics Device")),
    Case(name="1 all links of all GPUs of an unverified model inactive on a fabric", check="gpu_nvlink", before="WARN",
         after="FAIL", put=nvlink("-s", *down(*range(18)), model="NVIDIA H20")),
    Case(name="1 all links of all GPUs at half speed", check="gpu_nvlink", before="PASS", after="FAIL",
         put=nvlink("-s", ("26.562", "13.281"))),
    Case(name="2 NVLink recovery errors N/A on one GPU", check="gpu_nvlink", before="PASS", after="INCOMPLETE",
         put=nvlink("-e", ("Recovery Errors: 0", "Recovery Errors: N/A"), gpu=3)),
    Case(name="2 NVLink recovery and CRC errors N/A on all GPUs", check="gpu_nvlink", before="PASS",
         after="INCOMPLETE", put=nvlink("-e", ("Recovery Errors: 0", "Recovery Errors: N/A"),
                                        ("CRC Errors: 0", "CRC Errors: N/A"))),
    Case(name="2 NVLink recovery errors not listed", check="gpu_nvlink", before="PASS", after="INCOMPLETE",
         put=nvlink("-e", *[(f"\t Link {link}: Recovery Errors: 0\n", "") for link in range(18)])),
    Case(name="5 three of eight rails over one lane", check="ib_ports", before="PASS", after="FAIL",
         put=ports(range(3), rate="100 Gb/sec (1X NDR)")),
    Case(name="5 all rails over one lane", check="ib_ports", before="PASS", after="WARN",
         put=ports(range(8), rate="100 Gb/sec (1X NDR)")),
    Case(name="5 one of eight equal adapters on Ethernet, up", check="ib_ports", before="PASS", after="FAIL",
         put=ports([5], link_layer="Ethernet")),
    Case(name="5 one of eight equal adapters on Ethernet, Disabled", check="ib_ports", before="PASS", after="FAIL",
         put=ports([5], link_layer="Ethernet", state="1: DOWN", phys_state="3: Disabled")),
    Case(name="5 a full counter of link errors", check="ib_counters", before="PASS", after="WARN",
         put=ports([1], counters__local_link_integrity_errors="15")),
    Case(name="5 no counters on any port of an mlx5 driver", check="ib_counters,cpu", before="PASS",
         after="INCOMPLETE", put=no_counters),
    Case(name="3 DCGM: a switch warns with severity isolate", check="dcgm", before="PASS", after="FAIL",
         put=dcgm_rows(switch("Warn", severity=2))),
    Case(name="3 DCGM: a switch passes with a warning", check="dcgm", before="PASS", after="WARN",
         put=dcgm_rows(switch("Pass", severity=1))),
    Case(name="3 DCGM: a switch was not tested", check="dcgm", before="PASS", after="INCOMPLETE",
         put=dcgm_rows(switch("Not Run"))),
    Case(name="3 DCGM: a summary passes with severity isolate", check="dcgm", before="PASS", after="FAIL",
         put=dcgm_rows(summary={"warnings": [{"warning": "GPU 3: DBE", "error_id": 9, "error_severity": 2}]})),
    Case(name="4 a fault in a log that was cut short", check="xid", before="INCOMPLETE", after="FAIL", put=cut_log),
    Case(name="7 uncorrectable errors of the caches alone", check="gpu_ecc", before="PASS", after="INCOMPLETE",
         put=by_bits),
    Case(name="7 a failed remap, and nvidia-smi ends with 14", check="gpu_remap", before="INCOMPLETE", after="FAIL",
         put=smi_exit(14, {"remapped_rows/remapped_row_failure": "Yes"})),
    Case(name="7 no fault, and nvidia-smi ends with 255", check="gpu_remap", before="INCOMPLETE", after="INCOMPLETE",
         put=smi_exit(255, {})),
    Case(name="7 a low power limit beside an unknown default", check="gpu_power", before="INCOMPLETE", after="FAIL",
         expect=("gpu_power_w=700",), put=gpus(3, {"gpu_power_readings/current_power_limit": "100.00 W",
                                                   "gpu_power_readings/default_power_limit": "N/A"})),
    Case(name="7 too little memory beside an unknown use", check="gpu_memory", before="INCOMPLETE", after="FAIL",
         put=gpus(3, {"fb_memory_usage/total": "40960 MiB", "fb_memory_usage/used": "N/A"})),
    Case(name="7 PCIe replays beside unknown rollovers", check="gpu_pcie", before="INCOMPLETE", after="WARN",
         put=gpus(3, {"pci/replay_counter": "5000000", "pci/replay_rollover_counter": "N/A"})),
    Case(name="7 a lower PCIe generation than equal GPUs", check="gpu_pcie", before="WARN", after="FAIL",
         put=gpus(3, {"pci/pci_gpu_link_info/pcie_gen/max_link_gen": "1"})),
    Case(name="7 no spare rows beside an unknown count", check="gpu_remap", before="INCOMPLETE", after="WARN",
         put=gpus(3, {SPENT: "4 bank(s)", "remapped_rows/remapped_row_unc": "N/A"})),
    Case(name="7 900 s of heat beside an unknown slowdown", check="gpu_throttle", before="INCOMPLETE", after="WARN",
         put=gpus(3, {HEAT: "900000000 us", "clocks_event_reasons/clocks_event_reason_hw_slowdown": "N/A"})),
    Case(name="false alarm: no remapped rows reported in MIG mode", check="gpu_remap,gpu_modes", before="INCOMPLETE",
         after="PASS", put=mig_without_rows, expect=("mig=true",)),
    Case(name="false alarm: an adapter with little power", check="xid", before="FAIL", after="WARN",
         put=log("mlx5_core 0000:5e:00.0: mlx5_pcie_event:301:(pid 9): insufficient power on the slot (27W).")),
    Case(name="false alarm: the USB-C port of a board", check="xid", before="FAIL", after="PASS",
         put=log("nvidia-gpu 0000:13:00.3: i2c timeout error e0000000",
                 "nvidia-gpu: probe of 0000:13:00.3 failed with error -110")),
    Case(name="false alarm: a kernel that prints the caller of each message", check="xid", before="INCOMPLETE",
         after="PASS", put=with_callers),
)  # fmt: skip
