"""What is known of the NVIDIA GPUs of a machine: from the PCI bus, from /dev, and from `nvidia-smi -q -x`.

The bus says what is plugged in, nvidia-smi what the driver can use. A GPU that one shows and the other does not is the
fault these checks exist for, so nothing here drops one: `slots` gives one place per GPU that should be there, empty
where there is none.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

from trainmaster.core.errors import CommandMissing, FileMissing, HostError, NotCaptured
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, skip
from trainmaster.node.host import Host
from trainmaster.node.parse.nvidia_smi import Gpu, NotTold, Smi, parse

__all__ = ["Gpu", "NotTold", "Smi"]  # the parser's words, for the checks of this folder

PCI = "/sys/bus/pci/devices"
# 8 GPUs without persistence mode are woken one after the other, a few seconds each.
SMI_TIMEOUT_S = 90.0
CHECK_TIMEOUT_S = 120.0  # of a check that asks nvidia-smi


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """All evidence. `trouble` says why there is no `smi`."""

    bus: tuple[str, ...]  # addresses of NVIDIA display and 3D controllers
    devices: tuple[str, ...]  # nvidia0, nvidia1, … of /dev
    granted: int | None  # how many a container was given, where it was told
    smi: Smi | None
    trouble: str | None
    switches: tuple[str, ...] = ()  # addresses of NVSwitches


def read(host: Host) -> Gpus:
    """Look at the bus, at /dev and at nvidia-smi."""
    smi, trouble = None, None
    try:
        ran = host.run("nvidia-smi", "-q", "-x", timeout_s=SMI_TIMEOUT_S)
        if ran.exit_code:
            said = " ".join((ran.stdout + " " + ran.stderr).split())[:300]
            trouble = f"nvidia-smi ended with {ran.exit_code}: {said}"
        else:
            smi = _parse(ran.stdout)
    except CommandMissing:
        trouble = "nvidia-smi is not installed"
    except NotCaptured:
        raise
    except ValueError as wrong:
        trouble = f"nvidia-smi cannot be understood: {wrong}"
    except HostError as wrong:
        # A hung nvidia-smi is a symptom of a sick GPU; a machine without one cannot have it.
        trouble = str(wrong)
    bus, switches = _on_bus(host)
    return Gpus(
        bus=bus,
        switches=switches,
        devices=tuple(name for name in host.list("/dev") if re.fullmatch(r"nvidia\d+", name)),
        granted=_granted(host.env("NVIDIA_VISIBLE_DEVICES")),
        smi=smi,
        trouble=trouble,
    )


@functools.lru_cache(maxsize=2)
def _parse(text: str) -> Smi:
    """Some twenty checks read the same text."""
    return parse(text)


def expected(gpus: Gpus, expect: Expect) -> int:
    """How many GPUs should be here: as stated, else as granted to the container, else as many as anything shows."""
    if expect.gpus is not None:
        return expect.gpus
    attached = gpus.smi.attached if gpus.smi else 0
    # A privileged container sees more than it was granted; then the grant says nothing about what should be there.
    if gpus.granted is not None and attached <= gpus.granted:
        return gpus.granted
    return max(len(gpus.bus), len(gpus.devices), attached)


def refuse(gpus: Gpus, expect: Expect) -> Finding | None:
    """The finding of a check that cannot look at GPUs: none expected, none there, or nobody to ask. None: go on."""
    count = expected(gpus, expect)
    if expect.gpus == 0:
        return skip("the profile expects no GPU")
    if count == 0:
        return skip("no NVIDIA GPU on this machine and none expected")
    if gpus.smi is not None:
        return None
    if expect.gpus is not None and not gpus.bus and not gpus.devices:
        return fail(
            f"0 of {count} GPUs: {gpus.trouble} and the PCI bus shows no NVIDIA device",
            action="use a GPU node, or give the container its GPUs",
        )
    return error(
        f"{max(len(gpus.bus), len(gpus.devices))} NVIDIA GPUs on the bus, but {gpus.trouble}",
        action="install or reload the NVIDIA driver; if nvidia-smi still fails, reboot the node",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A place where a GPU should be, and the GPU if it is there."""

    device: str  # gpu0: its position by bus address, which is nvidia-smi's index while none is missing
    bus: str | None  # None: missing, and nothing tells which one
    gpu: Gpu | None


def slots(gpus: Gpus, count: int) -> list[Slot]:
    """One per GPU that is listed and per GPU that is missing from `count`."""
    listed = {gpu.bus: gpu for gpu in (gpus.smi.gpus if gpus.smi else ())}
    absent = [address for address in gpus.bus if address not in listed]
    missing = max(0, count - len(listed))
    # Only if as many are unlisted as are missing is it certain which: a container sees the whole bus and few GPUs.
    places = sorted([*listed, *(absent if len(absent) == missing else ())], key=_order)
    unknown = max(0, count - len(places))
    found = [Slot(device=f"gpu{i}", bus=bus, gpu=listed.get(bus)) for i, bus in enumerate(places)]
    return found + [Slot(device=f"gpu{len(found) + i}", bus=None, gpu=None) for i in range(unknown)]


def judge_each(gpus: Gpus, expect: Expect, judge_one: Callable[[Gpu, str], Finding | list[Finding]]) -> list[Finding]:
    """Findings for each GPU that should be here; one that is not listed is an error, never silence."""
    refused = refuse(gpus, expect)
    if refused is not None:
        return [refused]
    found: list[Finding] = []
    for slot in slots(gpus, expected(gpus, expect)):
        judged = _judge_slot(slot, judge_one)
        found += judged if isinstance(judged, list) else [judged]
    return found


def _judge_slot(slot: Slot, judge_one: Callable[[Gpu, str], Finding | list[Finding]]) -> Finding | list[Finding]:
    if slot.gpu is None:
        return missing_gpu(slot)
    try:
        return judge_one(slot.gpu, slot.device)
    except NotTold as wrong:
        if not wrong.applies:
            return skip(str(wrong), device=slot.device)
        return error(str(wrong), action="reset the GPU or reboot the node", device=slot.device)


def missing_gpu(slot: Slot) -> Finding:
    where = f"the GPU at {slot.bus}" if slot.bus else "a GPU that should be here"
    return error(f"{where} is not listed by nvidia-smi", action="see gpu_count", device=slot.device)


def _order(address: str) -> tuple[int, str]:
    domain, _, rest = address.partition(":")
    return int(domain, 16), rest


def _on_bus(host: Host) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Addresses of NVIDIA's GPUs (display 0x0300, 3D 0x0302) and NVSwitches (bridge 0x0680); audio is neither."""
    try:
        addresses = sorted(host.list(PCI), key=str.lower)
    except FileMissing:
        return (), ()  # a machine without a PCI bus
    ours = [address for address in addresses if host.read(f"{PCI}/{address}/vendor").strip() == "0x10de"]
    kinds = {address: host.read(f"{PCI}/{address}/class").strip() for address in ours}
    return (
        tuple(address for address in ours if kinds[address].startswith("0x03")),
        tuple(address for address in ours if kinds[address].startswith("0x0680")),
    )


def _granted(text: str | None) -> int | None:
    """How many whole GPUs NVIDIA_VISIBLE_DEVICES names; None for `all`, `void`, MIG slices or nothing."""
    words = [word.strip() for word in (text or "").split(",")]
    whole = all(re.fullmatch(r"\d+|GPU-[0-9a-fA-F-]+", word) for word in words)
    return len(set(words)) if whole else None
