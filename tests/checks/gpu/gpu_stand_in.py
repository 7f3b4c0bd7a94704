"""A recorded GPU node inside a real container: programs that print its answers, its PCI bus and its device files.

Everything else is the container's own: its rights decide about the kernel log, /proc, /sys and its file systems.
"""

from __future__ import annotations

import os
import shlex
import stat
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from test_gpu_healthy import H100, shape

from machines import H200, PCI, Machine
from trainmaster.checks.gpu import gpu_compat

NODE = replace(H100, schema="v13", driver="580.95.05", cuda="13.0")
INSIDE = "/recorded"
_ASKED = ("nvidia-smi -q -x", "nvidia-smi nvlink -s", "nvidia-smi nvlink -e")
_QUEUE = (
    "nvidia-smi -L",
    "nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv,noheader,nounits",
    "nvidia-smi --query-gpu=uuid,memory.used --format=csv,noheader,nounits",
)  # as remote/devices.py asks
_TORCH = shlex.join(["python3", "-c", gpu_compat.SCRIPT])


def recorded(folder: Path, damage: Callable[[Machine], None] | None = None) -> Machine:
    """Eight healthy H100, or with one fault."""
    machine = Machine(folder / "machine", of=H200)
    shape(machine, NODE)
    if damage is not None:
        damage(machine)
    return machine


def write(machine: Machine, folder: Path, *, python: str = os.path.realpath(sys.executable)) -> Path:
    """`bin/` with programs that print the machine's answers, and `pci/` with its bus. `python` is the container's."""
    (folder / "bin").mkdir(parents=True)
    _answer_the_queue(machine)
    _write_program(folder, "nvidia-smi", machine, (*_ASKED, *_QUEUE), otherwise="echo unknown >&2; exit 6")
    # torch in the container has no CUDA; the recorded node's has. Anything else goes to the real interpreter.
    _write_program(folder, "python3", machine, (_TORCH,), otherwise=f'exec {python} "$@"')
    for address in machine.host.list(PCI):
        (folder / "pci" / address).mkdir(parents=True)
        for name in ("vendor", "class", "device", "numa_node"):
            answer = machine.answers["read"].get(f"{PCI}/{address}/{name}")
            text = machine.host.read(f"{PCI}/{address}/{name}") if answer == {} else "-1\n"
            (folder / "pci" / address / name).write_text(text)
    return folder


def _answer_the_queue(machine: Machine) -> None:
    """What the queue asks before it gives GPUs to a job: the GPUs, their memory, no process."""
    gpus = ET.fromstring(machine.host.run("nvidia-smi", "-q", "-x").stdout).findall("gpu")
    rows = [[gpu.findtext(name, "[N/A]") for name in ("product_name", "uuid", "fb_memory_usage/used")] for gpu in gpus]
    listed = [f"GPU {number}: {model} (UUID: {uuid})\n" for number, (model, uuid, _) in enumerate(rows)]
    used = [f"{uuid}, {memory.removesuffix(' MiB')}\n" for _, uuid, memory in rows]
    for line, answer in zip(_QUEUE, (listed, [], used), strict=True):
        machine.command(line, "".join(answer))


def _write_program(folder: Path, name: str, machine: Machine, lines: Sequence[str], *, otherwise: str) -> None:
    cases = []
    for number, line in enumerate(lines):
        words = shlex.split(line)
        answer = machine.host.run(*words)
        place = f"bin/.{name}-{number}"
        (folder / place).write_text(answer.stdout)
        chosen = shlex.quote(" ".join(words[1:]))
        cases.append(f"{chosen}) /bin/cat {INSIDE}/{place}; exit {answer.exit_code} ;;")
    program = folder / "bin" / name
    program.write_text("#!/bin/sh\n" + 'case "$*" in\n' + "\n".join(cases) + f"\n*) {otherwise} ;;\nesac\n")
    program.chmod(0o755)


def device_files(folder: Path, gpus: int) -> list[str]:
    """Options of `podman run` for the device files, as NVIDIA's runtime adds them."""
    words = []
    for name, minor in [*((f"nvidia{number}", number) for number in range(gpus)), ("nvidiactl", 255)]:
        os.mknod(folder / name, 0o666 | stat.S_IFCHR, os.makedev(195, minor))
        words += ["--device", f"{folder / name}:/dev/{name}"]
    return words
