"""Capabilities of this machine for a run: torch, visible GPUs, reachable address, free ports.

`python -m trainmaster.bench.collectives.capabilities --ports N` prints one JSON object. It runs on a node before any
rank starts there, because a rank that cannot join blocks all others.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

_PORTS = range(20_000, 30_000)  # below the kernel's ephemeral ports, where outgoing connections would take them again

_LIST_S = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m trainmaster.bench.collectives.capabilities", description=__doc__)
    parser.add_argument("--ports", type=int, default=1)
    options = parser.parse_args()
    capabilities = {
        "host": socket.gethostname(),
        "address": _address(),
        "ports": free_ports(options.ports),
        "devices": count_devices(),
        **_torch(),
    }
    sys.stdout.write(json.dumps(capabilities) + "\n")


def _torch() -> dict[str, object]:
    try:
        torch = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        why = "torch is not installed" if error.name == "torch" else f"torch cannot be imported: {error}"
        return {"torch": None, "gpus": 0, "why": why}
    except Exception as error:  # a library that is missing or damaged
        return {"torch": None, "gpus": 0, "why": f"torch cannot be imported: {type(error).__name__}: {error}"[:300]}
    return {"torch": str(torch.__version__), "gpus": int(torch.cuda.device_count()), "why": ""}


def count_devices(pci: Path = Path("/sys/bus/pci/devices")) -> int:
    """NVIDIA GPUs that the driver or the PCI bus lists, whatever torch sees."""
    listed = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_LIST_S, check=False)
        listed = done.stdout
    on_bus = 0
    for device in pci.glob("*"):
        with contextlib.suppress(OSError):
            ours = (device / "vendor").read_text().strip() == "0x10de"
            on_bus += ours and (device / "class").read_text().startswith("0x03")
    return max(on_bus, sum(line.startswith("GPU ") for line in listed.splitlines()))


def _address() -> str | None:
    """The node's own address of the SSH connection: right with several addresses and behind NAT. Else as the program
    was told that started this one."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else os.environ.get("TRAINMASTER_NODE_ADDRESS") or None


def free_ports(count: int) -> list[int]:
    """Free ports."""
    with contextlib.ExitStack() as held:  # all held at once, so that no two are equal
        ports: list[int] = []
        for port in random.sample(_PORTS, len(_PORTS)):
            if len(ports) == count:
                break
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("", port))
                ports.append(port)
        return ports


if __name__ == "__main__":
    main()
