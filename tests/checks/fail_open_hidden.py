"""Machines with a fault beside a missing value, in parts that are all alike, or in a form that was not judged."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from fail_open_cases import Case
from gpu_faults import make
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
    Case(name="5 a full counter of link errors", check="ib_counters", before="PASS", after="WARN",
         put=ports([1], counters__local_link_integrity_errors="15")),
    Case(name="5 no counters on any port of an mlx5 driver", check="ib_counters,cpu", before="PASS",
         after="INCOMPLETE", put=no_counters),
)  # fmt: skip
