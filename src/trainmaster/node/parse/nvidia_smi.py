"""`nvidia-smi -q -x`: the driver, and every GPU it lists. Schemas v11 to v13; a later one is read as far as it agrees.

Damage is refused as a whole: a list of GPUs that contradicts itself says nothing about any of them. A GPU that is lost
may be counted (`attached`) and not listed; a value that is no number is None, and what was said instead is in `texts`.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass

from trainmaster.node.parse import ParseError, as_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU that nvidia-smi lists. None: it gave no number; `texts` keeps what it gave instead."""

    bus: str  # as the kernel writes it: 0000:3b:00.0
    name: str | None
    uuid: str | None
    memory_total_mib: float | None
    memory_used_mib: float | None
    temperature_c: float | None
    headroom_c: float | None  # degrees left before it slows down, where the GPU tells (Hopper and later)
    texts: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Smi:
    """What nvidia-smi says of the machine."""

    driver: str | None
    cuda: str | None
    attached: int  # how many the driver counts; may be more than it lists
    gpus: tuple[Gpu, ...]


# What nvidia-smi writes where it has no value. Anything else that is no number is treated alike, but shown.
_NO_VALUE = re.compile(r"\[?N/A\]?|ERR!|Requested functionality has been deprecated|\[?Unknown Error\]?", re.IGNORECASE)


def parse(raw: str | bytes) -> Smi:
    """The XML of `nvidia-smi -q -x`. ParseError where it is damaged or contradicts itself."""
    text = as_text(raw)
    try:
        root = ET.fromstring(text)  # noqa: S314 (expat refuses external entities; the text comes from our own machine)
    except (ET.ParseError, ValueError, LookupError) as wrong:  # the last two: characters and encodings expat refuses
        raise ParseError(f"not whole XML: {wrong}") from None
    if root.tag != "nvidia_smi_log":
        raise ParseError(f"its root is {root.tag!r:.40}, not nvidia_smi_log")
    attached = _word(root, "attached_gpus")
    if attached is None or not re.fullmatch(r"\d{1,4}", attached, flags=re.ASCII):
        raise ParseError(f"attached_gpus is {attached!r:.40}")
    gpus = tuple(_gpu(node) for node in root.findall("gpu"))
    for what, values in (("address", [gpu.bus for gpu in gpus]), ("uuid", [gpu.uuid for gpu in gpus if gpu.uuid])):
        if len(set(values)) != len(values):
            raise ParseError(f"two GPUs have the same {what}")
    if len(gpus) > int(attached):
        raise ParseError(f"it lists {len(gpus)} GPUs but counts {attached}")
    return Smi(
        driver=_word(root, "driver_version"), cuda=_word(root, "cuda_version"), attached=int(attached), gpus=gpus
    )


def _gpu(node: ET.Element) -> Gpu:
    address = parse_address(node.get("id", ""))
    inner = _only(node, "pci/pci_bus_id")
    if inner and parse_address(inner) != address:
        raise ParseError(f"a GPU is at {address} and at {inner}")
    uuid = _word(node, "uuid")
    if uuid is None:
        # Every GPU that the driver can talk to has one; without it the entry describes nothing.
        raise ParseError(f"the GPU at {address} has no uuid")
    texts: dict[str, str] = {}

    def number(name: str, path: str, unit: str) -> float | None:
        said = _only(node, path)
        texts[name] = said or "nothing"
        match = re.fullmatch(rf"(-?\d{{1,9}}(?:\.\d+)?) {unit}", said, flags=re.ASCII)
        return float(match[1]) if match else None

    return Gpu(
        bus=address,
        name=_word(node, "product_name"),
        uuid=uuid,
        memory_total_mib=number("memory_total", "fb_memory_usage/total", "MiB"),
        memory_used_mib=number("memory_used", "fb_memory_usage/used", "MiB"),
        temperature_c=number("temperature", "temperature/gpu_temp", "C"),
        headroom_c=number("headroom", "temperature/gpu_temp_tlimit", "C"),
        texts=texts,
    )


def _word(node: ET.Element, path: str) -> str | None:
    said = _only(node, path)
    return None if not said or _NO_VALUE.fullmatch(said) else said


def _only(node: ET.Element, path: str) -> str:
    """The text at a path. Two of them are damage: one may be the value of another GPU whose frame is gone."""
    found = node.findall(path)
    if len(found) > 1:
        raise ParseError(f"{path} is there {len(found)} times")
    return (found[0].text or "").strip() if found else ""


def parse_address(text: str) -> str:
    """A PCI address as the kernel writes it; nvidia-smi writes the domain with eight digits."""
    match = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", text.strip().lower(), flags=re.ASCII)
    if not match:
        raise ParseError(f"{text!r:.40} is no PCI address")
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}"
