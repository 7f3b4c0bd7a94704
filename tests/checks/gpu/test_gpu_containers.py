"""The whole list of checks in real containers: recorded answers of H100, the container's own rights for the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu_stand_in
import pytest
from gpu_faults import edit, event
from gpu_stand_in import INSIDE, NODE

import containers
import kube_nodes
from containers import Registry
from machines import Machine
from trainmaster.core.results import UNSEEN

pytestmark = pytest.mark.spawns
SOURCE = Path(__file__).parents[3] / "src"
RIGHTS = {
    "default": [],
    "no capability": ["--cap-drop", "ALL"],
    "not root": ["--user", "1000:1000"],
    "read-only root": ["--read-only"],
    "all of it": ["--cap-drop", "ALL", "--user", "1000:1000", "--read-only"],
}
# Of this machine and of podman's defaults, not of the recorded node: load, /dev/shm, and limits that podman sets.
OWN = ("cpu_load", "shm", "memory_pressure", "disk_space", "clock", "swap", "processes", "open_files", "memlock")


def nvlink_down(machine: Machine) -> None:
    line = "nvidia-smi nvlink -s"
    before, head, rest = machine.host.run(*line.split()).stdout.partition("GPU 3:")
    first, _, after = rest.partition("Link 7: ")
    machine.command(line, f"{before}{head}{first}Link 7: <inactive>\n{after.partition(chr(10))[2]}")


SICK: dict[str, tuple[str, Callable[[Machine], None]]] = {
    "a GPU that the driver lost": ("gpu_count", lambda machine: machine.gpus(8, drop=3)),
    "a row remap that is pending": ("gpu_remap", edit(remapped_rows__remapped_row_pending="Yes")),
    "an uncorrectable memory error": ("gpu_ecc", edit(ecc_errors__volatile__dram_uncorrectable="1")),
    "PCIe at half its width": ("gpu_pcie", edit(pci__pci_gpu_link_info__link_widths__current_link_width="8x")),
    "an NVLink that is down": ("gpu_nvlink", nvlink_down),
    "a fabric that is not joined": ("gpu_fabric", edit(fabric__state="In Progress")),
    "a hardware slowdown": ("gpu_throttle", event("hw_slowdown")),
    "MIG on": ("gpu_modes", edit(mig_mode__current_mig="Enabled", mig_mode__pending_mig="Enabled")),
    "a reset that the driver asks for": ("gpu_recovery", edit(gpu_recovery_action="Reset")),
    "a GPU that is too hot": ("gpu_temperature", edit(temperature__gpu_temp="91 C")),
}


def some_always(cases: Iterable[str], *always: str) -> list[Any]:
    """Cases of which `make contract-containers` runs all."""
    return [
        case if case in always else pytest.param(case, marks=pytest.mark.make("contract-containers")) for case in cases
    ]


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    folder = tmp_path_factory.mktemp("podman")
    made = containers.local_podman(folder)
    try:
        made.podman("load", "--quiet", "--input", str(kube_nodes.write_images(folder)))
        made.podman("run", "--rm", "--network", "none", *_mounts(), kube_nodes.BASE_IMAGE, "-c", "true")
    except AssertionError as wrong:
        pytest.skip(f"podman cannot run a container here: {str(wrong)[:300]}")
    yield made
    containers.end_podman(folder)


def _mounts() -> list[str]:
    folders = [*kube_nodes.python_folders(), str(SOURCE)]
    return [word for place in folders for word in ("--volume", f"{place}:{place}:ro")]


def check(podman: Registry, folder: Path, damage: Callable[[Machine], None] | None, rights: Sequence[str]) -> Any:
    """Document of the checks in a container with these rights."""
    place = gpu_stand_in.write(gpu_stand_in.recorded(folder, damage), folder / "recorded")
    words = [
        str(podman.bin / "podman"), "run", "--rm", "--network", "none", *rights, *_mounts(),
        *gpu_stand_in.device_files(folder, NODE.gpus),
        "--volume", f"{place}:{INSIDE}:ro", "--volume", f"{place}/pci:/sys/bus/pci/devices:ro",
        "--env", f"PATH={INSIDE}/bin:/usr/bin:/usr/sbin",
        "--env", f"PYTHONPATH={os.pathsep.join([str(SOURCE), *kube_nodes.packages()])}",
        kube_nodes.BASE_IMAGE, "-c",
        f"exec {os.path.realpath(sys.executable)} -m trainmaster.checks --expect gpus=8 --json",
    ]  # fmt: skip
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.stdout.startswith("{"), ran.stderr[-2000:]
    return json.loads(ran.stdout)


def of(document: Any, *verdicts: str) -> dict[str, str]:
    return {
        result["check"]: finding["reason"]
        for result in document["results"]
        for finding in result["findings"]
        if finding["verdict"] in verdicts and result["check"] not in OWN
    }


@pytest.mark.parametrize("rights", some_always(RIGHTS, "default", "all of it"))
def test_a_healthy_node_is_no_worse_than_a_warning(podman: Registry, tmp_path: Path, rights: str) -> None:
    document = check(podman, tmp_path, None, RIGHTS[rights])
    assert of(document, "error", "fail") == {}
    (closed,) = (one for result in document["results"] if result["check"] == "xid" for one in result["findings"])
    assert (closed["verdict"], "Operation not permitted" in closed["reason"]) == ("warn", True)
    # What /proc and /sys of a container show is seen; a recorded bus has no counters of PCIe errors.
    assert {"nic health", "disk error", "pcie uncorrected"} <= set(closed["values"][UNSEEN])
    assert not {"kernel oops", "machine check", "soft lockup", "gpu crashed"} & set(closed["values"][UNSEEN])


def test_with_the_right_the_log_is_read(podman: Registry, tmp_path: Path) -> None:
    """This machine's own kernel log: whatever it holds, it is judged, and nothing is said to be unseen."""
    document = check(podman, tmp_path, None, ["--cap-add", "SYSLOG"])
    (found,) = (result for result in document["results"] if result["check"] == "xid")
    assert not any(UNSEEN in finding["values"] for finding in found["findings"])


@pytest.mark.parametrize("fault", some_always(SICK, "a reset that the driver asks for"))
def test_a_sick_node_is_refused_by_the_name_of_its_fault(podman: Registry, tmp_path: Path, fault: str) -> None:
    name, damage = SICK[fault]
    document = check(podman, tmp_path, damage, RIGHTS["default"])
    assert document["overall"] == "FAIL" and name in of(document, "fail")
    assert {check for check in of(document, "fail") if check not in (name, "gpu_peers")} == set()
