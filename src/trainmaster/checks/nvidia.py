"""NVIDIA GPUs of a machine, from the PCI bus, /dev and `nvidia-smi -q -x`.

The bus shows what is plugged in, nvidia-smi what the driver can use. A GPU that only one of them shows is the fault
these checks exist for, so nothing here drops one: `slots` gives one place per expected GPU, empty where it is missing.

A value that is N/A proves nothing: `judge_each` makes it an error. A check that knows a GPU without the thing (by its
model, its generation or its brand) skips before, with that as its proof.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from trainmaster.checks import system_files
from trainmaster.core.errors import CommandMissing, FileMissing, HostError, NotCaptured
from trainmaster.core.expect import Expect, implies_gpu
from trainmaster.core.gpus import of_gpu
from trainmaster.core.results import Finding, error, fail, skip
from trainmaster.node.host import CommandResult, Host
from trainmaster.node.parse.nvidia_smi import Gpu, NotReported, Smi, find_broken_inforom, parse

__all__ = ["Gpu", "NotReported", "Smi"]  # the parser's types, for the checks of this folder

PCI = "/sys/bus/pci/devices"
NVIDIA = "0x10de"
# Accelerators that no check supports: PCI vendor → name and classes (0x12 processing accelerator, 0x03 display, 0x0b40
# coprocessor, 0x0880 system peripheral). Sources: pci.ids; drivers/accel/habanalabs and drivers/accel/qaic of Linux;
# neuron_pci.c of AWS's Neuron driver. Instinct GPUs of AMD are in three classes, by their generation.
FOREIGN = {
    "0x1002": ("AMD", ("0x03", "0x12", "0x0b40")),
    "0x1da3": ("Intel Gaudi", ("0x12", "0x03", "0x0b40")),
    "0x1d0f": ("AWS Trainium or Inferentia", ("0x0880", "0x12")),
    "0x1ae0": ("Google TPU", ("0x0880", "0x12", "0x00ff")),
    "0x17cb": ("Qualcomm Cloud AI", ("0x12",)),
    "0x19e5": ("Huawei Ascend", ("0x12",)),
    "0xcabc": ("Cambricon", ("0x12",)),
}
FOREIGN_DEVICES = {"neuron": "AWS Trainium or Inferentia", "hl": "Intel Gaudi"}  # in /dev, with a number
# 8 GPUs without persistence mode are woken one after the other, a few seconds each.
SMI_TIMEOUT_S = 90.0
CHECK_TIMEOUT_S = 120.0  # of a check that runs nvidia-smi
MIG = "mig_mode/current_mig"
# A GPU that fell off the bus: NVIDIA's XID catalog asks to restart the machine first (79, RESTART_BM).
POWER_CYCLE = "power-cycle the node; if it returns, replace the GPU"
RESET_OR_REBOOT = "reset the GPU or reboot the node"  # where nvidia-smi tells nothing of it
RESET = "drain the node and reset the GPU"
REPLACE = "take the GPU out of service and have it replaced"
_NEWEST = 100_000
RETIRES_PAGES = ("Kepler", "Maxwell", "Pascal", "Volta", "Turing")  # later ones remap rows (NVIDIA, Row Remapper)
# Boards for desktops: without ECC and row remapping, or sold with ECC off (nvidia-smi's product_brand).
DESKTOP = re.compile(r"\b(GeForce|Titan|Quadro|NVS|RTX)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """All evidence. `trouble` is the reason why there is no `smi`, or why nvidia-smi failed all the same."""

    bus: tuple[str, ...]  # addresses of NVIDIA display and 3D controllers
    devices: tuple[str, ...]  # nvidia0, nvidia1, … of /dev
    granted: int | None  # how many a container was given, where that is known
    smi: Smi | None
    trouble: str | None
    switches: tuple[str, ...] = ()  # addresses of NVSwitches
    warnings: tuple[str, ...] = ()  # what nvidia-smi printed beside its XML, on either stream
    control: bool = False  # /dev/nvidiactl is there: the driver is loaded
    foreign: tuple[str, ...] = ()  # names of the accelerators that no check supports, one each
    proof: str = "no GPU was found"  # what shows that there is no GPU, where there is none


def read(host: Host) -> Gpus:
    """Read the bus, /dev and nvidia-smi."""
    smi, trouble = None, None
    warnings: tuple[str, ...] = ()
    try:
        result = host.run("nvidia-smi", "-q", "-x", timeout_s=SMI_TIMEOUT_S)
        if result.exit_code:
            output = " ".join((result.stdout + " " + result.stderr).split())[:300]
            shown = output if "<nvidia_smi_log" not in output else " ".join(result.stderr.split())[:300]
            trouble = f"nvidia-smi ended with {result.exit_code}: {shown or 'without a message'}"
            warnings = tuple(
                line.strip() for line in (result.stdout + "\n" + result.stderr).splitlines() if line.strip()
            )
            # A document that came all the same may show the fault; the exit code stays an error beside it.
            with contextlib.suppress(ValueError):
                smi, warnings = _read_document(result)
        else:
            smi, warnings = _read_document(result)
    except CommandMissing:
        trouble = "nvidia-smi is not installed"
    except NotCaptured:
        raise
    except ValueError as error:
        trouble = f"nvidia-smi cannot be understood: {error}"
    except HostError as error:
        # A hung nvidia-smi is a symptom of a sick GPU; a machine without one cannot have it.
        trouble = str(error)
    bus = _on_bus(host)
    devices = system_files.list_devices(host)
    return Gpus(
        bus=bus.gpus,
        switches=bus.switches,
        foreign=bus.foreign or _foreign_devices(devices),
        devices=tuple(name for name in devices if re.fullmatch(r"nvidia\d+", name)),
        granted=_granted(host.env("NVIDIA_VISIBLE_DEVICES")),
        smi=smi,
        trouble=trouble,
        control="nvidiactl" in devices,
        warnings=tuple(dict.fromkeys(warnings)),
        proof=f"{bus.proof}; /dev has no nvidia device; {trouble or 'nvidia-smi lists no GPU'}",
    )


def _read_document(result: CommandResult) -> tuple[Smi, tuple[str, ...]]:
    """What nvidia-smi listed, and what it printed beside it."""
    smi, printed = _parse(result.stdout), tuple(line.strip() for line in result.stderr.splitlines() if line.strip())
    smi = replace(smi, broken_inforom=(*smi.broken_inforom, *find_broken_inforom(printed)))
    return smi, (*smi.remarks, *printed)


@functools.lru_cache(maxsize=2)
def _parse(text: str) -> Smi:
    """Cached: some twenty checks read the same text."""
    return parse(text)


def expected(gpus: Gpus, expect: Expect) -> int:
    """Expected number of GPUs: as stated, else as granted to the container, else the most that any source shows."""
    if expect.gpus is not None:
        return expect.gpus
    attached = gpus.smi.attached if gpus.smi else 0
    # A privileged container sees more than it was granted; the grant then does not limit it.
    if gpus.granted is not None and attached <= gpus.granted:
        return gpus.granted
    return max(len(gpus.bus), len(gpus.devices), attached)


def refuse(gpus: Gpus, expect: Expect) -> Finding | None:
    """Finding of a check that cannot read the GPUs: none expected, none there, or no driver. None: go on."""
    count, implied = expected(gpus, expect), implies_gpu(expect)
    if expect.gpus == 0 and not implied:
        return skip("the profile expects no GPU", proof="gpus=0 is stated")
    if expect.gpus == 0:
        action = "state the number of GPUs, or leave the other expectation out"
        return error(f"gpus=0 and {implied[0]} are expected: both cannot hold", action=action)
    if count == 0:
        return _refuse_empty(gpus, implied)
    if gpus.smi is not None:
        return None
    if not gpus.bus and not gpus.devices:
        return fail(
            f"0 of {count} GPUs: {gpus.trouble} and the PCI bus shows no NVIDIA device",
            action="use a GPU node, or give the container its GPUs",
        )
    return error(
        f"{max(len(gpus.bus), len(gpus.devices))} NVIDIA GPUs on the bus, but {gpus.trouble}",
        action="install or reload the NVIDIA driver; if nvidia-smi still fails, reboot the node",
    )


def _refuse_empty(gpus: Gpus, implied: list[str]) -> Finding:
    """Finding for a machine on which nothing shows an NVIDIA GPU."""
    if implied:
        reason = f"there is no NVIDIA GPU, but {', '.join(implied)} is expected: {gpus.proof}"
        return fail(reason, action="use a GPU node, or give the container its GPUs")
    if gpus.foreign:
        reason = f"this machine has accelerators that are not supported: {name_foreign(gpus)}"
        return error(reason, action="check them with the vendor's tools, or state gpus=0")
    if gpus.control or gpus.smi is not None:
        reason = "the NVIDIA driver is loaded and finds no GPU"
        return error(reason, action="see the kernel log for a GPU that fell off the bus; state gpus=0 if none is meant")
    return skip("no NVIDIA GPU on this machine and none expected", proof=gpus.proof)


def name_foreign(gpus: Gpus) -> str:
    """Number and makers of the accelerators that no check supports."""
    return ", ".join(f"{count} {name}" for name, count in Counter(gpus.foreign).items())


def same_model(gpus: Gpus, gpu: Gpu) -> list[Gpu]:
    """Other GPUs of the node with the same product name."""
    others = gpus.smi.gpus if gpus.smi else ()
    return [other for other in others if other is not gpu and other.name == gpu.name and other.lost is None]


def peers_report(gpus: Gpus, gpu: Gpu, *paths: str) -> bool:
    """Whether an equal GPU of the node reports what this one does not."""
    return any(other.reports(*paths) for other in same_model(gpus, gpu))


def most_report(gpus: Gpus, gpu: Gpu, *paths: str) -> bool:
    """Whether more than half of the node's GPUs of this model report it."""
    equal = [gpu, *same_model(gpus, gpu)]
    return sum(other.reports(*paths) for other in equal) * 2 > len(equal)


def driver_major(gpus: Gpus) -> int:
    """Major version of the driver; a high one where it is no number, so that no rule excuses anything."""
    first = (gpus.smi.driver or "" if gpus.smi else "").partition(".")[0]
    return int(first) if first.isascii() and first.isdigit() else _NEWEST


def generation(gpu: Gpu) -> str | None:
    """Architecture of a GPU: by its model, else by the driver's word."""
    model = of_gpu(gpu.name)
    if model is not None and model.generation is not None:
        return model.generation
    return gpu.text("product_architecture") if gpu.reports("product_architecture") else None


def is_desktop(gpu: Gpu) -> bool:
    """Whether a GPU of no known model is a desktop or workstation board."""
    return of_gpu(gpu.name) is None and DESKTOP.search(f"{gpu.text('product_brand')} {gpu.name}") is not None


def has_uuid(gpu: Gpu) -> bool:
    """Whether its UUID has the driver's form; results of probes and links are found by it."""
    return re.fullmatch(r"GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", gpu.uuid or "") is not None


def mig_on(gpu: Gpu) -> bool:
    """Whether the GPU is divided into MIG devices."""
    return gpu.text(MIG) == "Enabled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Place of an expected GPU, and the GPU if nvidia-smi lists it."""

    device: str  # gpu0: its position by bus address, which is nvidia-smi's index while none is missing
    bus: str | None  # None: missing, and nothing tells which one
    gpu: Gpu | None


def slots(gpus: Gpus, count: int) -> list[Slot]:
    """One slot per listed GPU and per GPU that is missing from `count`."""
    listed = {gpu.bus: gpu for gpu in (gpus.smi.gpus if gpus.smi else ())}
    absent = [address for address in gpus.bus if address not in listed]
    missing = max(0, count - len(listed))
    # Only if as many are unlisted as are missing is it certain which: a container sees the whole bus and few GPUs.
    places = sorted([*listed, *(absent if len(absent) == missing else ())], key=_order)
    unknown = max(0, count - len(places))
    placed = [Slot(device=f"gpu{i}", bus=bus, gpu=listed.get(bus)) for i, bus in enumerate(places)]
    return placed + [Slot(device=f"gpu{len(placed) + i}", bus=None, gpu=None) for i in range(unknown)]


def judge_each(gpus: Gpus, expect: Expect, judge_one: Callable[[Gpu, str], Finding | list[Finding]]) -> list[Finding]:
    """Findings for each expected GPU; one that is not listed, or does not report the value, is an error."""
    refused = refuse(gpus, expect)
    if refused is not None:
        return [refused]
    findings: list[Finding] = []
    for slot in slots(gpus, expected(gpus, expect)):
        judged = _judge_slot(slot, judge_one)
        findings += judged if isinstance(judged, list) else [judged]
    return [*findings, *ended_badly(gpus)]


def ended_badly(gpus: Gpus) -> list[Finding]:
    """Error for an nvidia-smi that listed the GPUs and ended with an exit code other than 0."""
    if gpus.smi is None or gpus.trouble is None:
        return []
    return [error(gpus.trouble, action="run nvidia-smi by hand; reset the GPU that it names, or reboot the node")]


def _judge_slot(slot: Slot, judge_one: Callable[[Gpu, str], Finding | list[Finding]]) -> Finding | list[Finding]:
    if slot.gpu is None or slot.gpu.lost is not None:
        return missing_gpu(slot)
    try:
        return judge_one(slot.gpu, slot.device)
    except NotReported as exc:
        return error(str(exc), action=RESET_OR_REBOOT, device=slot.device)


def missing_gpu(slot: Slot) -> Finding:
    """Error for a GPU that no check can read."""
    if slot.gpu is not None:
        reason = f"the GPU at {slot.bus} does not answer: {slot.gpu.lost}"
    else:
        where = f"the GPU at {slot.bus}" if slot.bus else "an expected GPU"
        reason = f"{where} is not listed by nvidia-smi"
    return error(reason, action="see gpu_count", device=slot.device)


def _order(address: str) -> tuple[int, str]:
    domain, _, rest = address.partition(":")
    return int(domain, 16), rest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bus:
    """Devices of the PCI bus that matter here."""

    gpus: tuple[str, ...] = ()  # NVIDIA display (0x0300) and 3D (0x0302) controllers; audio is none
    switches: tuple[str, ...] = ()  # NVSwitches (bridge 0x0680)
    foreign: tuple[str, ...] = ()  # names of other makers' accelerators
    proof: str = "there is no PCI bus"


def _on_bus(host: Host) -> _Bus:
    try:
        addresses = sorted(host.list(PCI), key=str.lower)
    except FileMissing:
        return _Bus()
    vendors = {address: host.read(f"{PCI}/{address}/vendor").strip().lower() for address in addresses}
    unreadable = next(
        (text for text in vendors.values() if not re.fullmatch(r"0x[0-9a-f]{4}", text, re.IGNORECASE)), None
    )
    if unreadable is not None:
        raise HostError(f"the PCI bus is unreadable: {unreadable!r:.40} is no vendor")
    kinds = {address: kind for address in addresses if (kind := _kind(host, address, vendors[address])) is not None}
    ours = [address for address in kinds if vendors[address] == NVIDIA]
    foreign = [FOREIGN[vendors[address]] for address in kinds if vendors[address] != NVIDIA]
    places = [kind for address, kind in kinds.items() if vendors[address] != NVIDIA]
    # The screen of a machine whose work is done by NVIDIA GPUs is often that of an AMD processor.
    screen = "0x0300" if any(kinds[address].startswith("0x03") for address in ours) else None
    return _Bus(
        gpus=tuple(address for address in ours if kinds[address].startswith("0x03")),
        switches=tuple(address for address in ours if kinds[address].startswith("0x0680")),
        foreign=tuple(
            name
            for (name, classes), kind in zip(foreign, places, strict=True)
            if kind.startswith(classes) and not (screen and kind.startswith(screen))
        ),
        proof=f"PCI bus: {len(ours)} of {len(addresses)} devices are NVIDIA's (10de)",
    )


def _kind(host: Host, address: str, vendor: str) -> str | None:
    """Class of a device of a maker of accelerators; None: another's, or not in the capture of an earlier version."""
    if vendor != NVIDIA and vendor not in FOREIGN:
        return None
    try:
        kind = host.read(f"{PCI}/{address}/class").strip().lower()
    except NotCaptured:
        if vendor == NVIDIA:
            raise
        return None
    if not re.fullmatch(r"0x[0-9a-f]{6}", kind):
        raise HostError("the PCI bus is unreadable: a GPU vendor's device has no class")
    return kind


def _foreign_devices(devices: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the accelerators of other makers in /dev, where the bus does not show them."""
    found = [re.fullmatch(r"([a-z]+)\d+", name) for name in devices]
    return tuple(FOREIGN_DEVICES[match[1]] for match in found if match is not None and match[1] in FOREIGN_DEVICES)


def _granted(text: str | None) -> int | None:
    """How many whole GPUs NVIDIA_VISIBLE_DEVICES names; None for `all`, `void`, MIG slices or nothing."""
    words = [word.strip() for word in (text or "").split(",")]
    whole = all(re.fullmatch(r"\d+|GPU-[0-9a-fA-F-]+", word) for word in words)
    return len(set(words)) if whole else None
