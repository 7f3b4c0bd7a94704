"""`nvidia-smi -q -x`: the driver, and every GPU it lists. Schemas v11 to v13; a later one is read as far as it agrees.

Damage is refused as a whole: a list of GPUs that contradicts itself says nothing about any of them. A GPU that is lost
may be counted (`attached`) and not listed; a value that is no number is None, and what was said instead is in `texts`.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainmaster.node.parse import ParseError, as_text, shorten
from trainmaster.node.parse.nvidia_smi_text import is_text, to_xml


class NotReported(Exception):
    """nvidia-smi gives no value. `applies`: it should have; otherwise the GPU has no such thing (N/A)."""

    def __init__(self, path: str, text: str, *, applies: bool) -> None:
        super().__init__(f"it does not tell {path.replace('/', ' ').replace('_', ' ')}: {shorten(text) or 'nothing'}")
        self.applies = applies


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that holds a GPU."""

    pid: str
    kind: str  # C compute, G graphics, C+G, M+C
    name: str
    memory: str  # as nvidia-smi writes it; N/A where it may not be known


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
    leaves: Mapping[str, str]  # every text of its entry by its path: ecc_mode/current_ecc
    processes: tuple[Process, ...]
    lost: str | None = None  # the driver's words for a GPU that it cannot reach: "GPU is lost"
    mig_devices: tuple[Mapping[str, str], ...] = ()  # the texts of each MIG device by their paths

    def text(self, *paths: str) -> str:
        """What is written at the first of these paths that has more than N/A, or above it; empty where nothing is.

        Schemas rename things, so a check names the newest path first. A whole part can be N/A.
        """
        texts = [text for text in map(self._at, paths) if text]
        return next((text for text in texts if not _NOT_HERE.fullmatch(text)), texts[0] if texts else "")

    def _at(self, path: str) -> str:
        while path and path not in self.leaves:
            path = path.rpartition("/")[0]
        return self.leaves.get(path, "")

    def reports(self, *paths: str) -> bool:
        """Whether there is anything but N/A; a damaged value is something."""
        text = self.text(*paths)
        return bool(text) and _NOT_HERE.fullmatch(text) is None

    def reported_paths(self) -> frozenset[str]:
        """Paths that hold a value."""
        return frozenset(path for path, text in self.leaves.items() if not _NO_VALUE.fullmatch(text))

    def word(self, *paths: str) -> str:
        """The text there, or NotReported."""
        text = self.text(*paths)
        if not text or _NO_VALUE.fullmatch(text):
            raise NotReported(paths[0], text, applies=not text or _NOT_HERE.fullmatch(text) is None)
        return text

    def number(self, unit: str, *paths: str) -> float:
        """A number that ends in its unit (" W", "x", "" for a count), or NotReported. Temperatures may be negative."""
        text = self.word(*paths)
        match = re.fullmatch(rf"(-?\d{{1,15}}(?:\.\d{{1,9}})?){re.escape(unit)}", text, flags=re.ASCII)
        if match is None or (match[1].startswith("-") and unit != " C"):
            raise NotReported(paths[0], text, applies=True)
        return float(match[1])

    def find_number(self, unit: str, *paths: str) -> float | None:
        """The same; None: there is no such number."""
        try:
            return self.number(unit, *paths)
        except NotReported:
            return None

    def yes(self, *paths: str) -> bool:
        """Whether a field says yes in its own words, or NotReported: a word of another field is no answer."""
        text = self.word(*paths)
        words = next(words for fields, words in _ANSWERS if fields.search(paths[0]))
        if text not in words:
            raise NotReported(paths[0], text, applies=True)
        return text == words[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Smi:
    """What nvidia-smi says of the machine."""

    driver: str | None
    cuda: str | None
    attached: int  # how many the driver counts; may be more than it lists
    gpus: tuple[Gpu, ...]
    broken_inforom: tuple[str, ...] = ()  # addresses of the GPUs it warns of
    remarks: tuple[str, ...] = ()  # text outside the elements: warnings that nvidia-smi prints with exit code 0


# What nvidia-smi writes for what a GPU does not have, and where it has no value for what it has.
_NOT_HERE = re.compile(r"\[?(N/A|Not Supported)\]?|Requested functionality has been deprecated", re.IGNORECASE)
_NO_VALUE = re.compile(
    rf"{_NOT_HERE.pattern}|\[?ERR!\]?|\[?Unknown Error\]?|\[?GPU is lost\]?|\[?GPU requires reset\]?"
    r"|\[?Insufficient Permissions\]?|\(empty\)",
    re.IGNORECASE,
)
# The two words of a field, by its path: reasons of slow clocks, modes, and all others.
_ANSWERS = (
    (re.compile(r"^clocks_(?:event|throttle)_reasons/"), ("Active", "Not Active")),
    (re.compile(r"_mode\b|_ecc$|_mig$"), ("Enabled", "Disabled")),
    (re.compile(r""), ("Yes", "No")),
)
# Long lists that no check reads, and the processes, which are read by themselves.
_LISTS = {"supported_clocks", "processes", "accounted_processes", "mig_devices"}
_INFOROM = re.compile(r"infoROM is corrupted at gpu (?P<address>[0-9A-Fa-f:]{7,16}\.[0-7])", re.IGNORECASE)
_LOST = re.compile(r"\[?(GPU is lost|GPU requires reset)\]?", re.IGNORECASE)
_END = "</nvidia_smi_log>"
_EMPTY = "(empty)"  # an element without text; one that is not there is no leaf
_DEEPEST = 8  # levels; no schema has more than 4


def parse(raw: str | bytes) -> Smi:
    """The XML of `nvidia-smi -q -x`, or the text of `-q`. ParseError where it is damaged or contradicts itself."""
    text = as_text(raw)
    text = to_xml(text) if is_text(text) else text
    start = min((at for mark in ("<?xml", "<nvidia_smi_log") if (at := text.find(mark)) >= 0), default=0)
    body, end, after = text[start:].partition(_END)
    try:
        root = ET.fromstring(body + end)  # noqa: S314 (expat refuses external entities; the text comes from our own machine)
    except (ET.ParseError, ValueError, LookupError) as error:  # the last two: characters and encodings expat refuses
        raise ParseError(f"not whole XML: {error}") from None
    if root.tag != "nvidia_smi_log":
        raise ParseError(f"its root is {root.tag!r:.40}, not nvidia_smi_log")
    remarks = [*_lines(text[:start]), *_between(root), *_lines(after)]
    if any("<" in line or ">" in line for line in remarks):
        raise ParseError(
            f"there is more around it: {shorten(next(line for line in remarks if '<' in line or '>' in line))}"
        )
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
        driver=_word(root, "driver_version"),
        cuda=_word(root, "cuda_version"),
        attached=int(attached),
        gpus=gpus,
        broken_inforom=find_broken_inforom(remarks),
        remarks=tuple(remarks),
    )


def find_broken_inforom(remarks: Iterable[str]) -> tuple[str, ...]:
    """Addresses of the GPUs whose infoROM is corrupted, from nvidia-smi's warnings."""
    return tuple(parse_address(match["address"]) for match in map(_INFOROM.search, remarks) if match)


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _between(node: ET.Element) -> list[str]:
    """Text between the elements below a node: no schema has any, so it is a warning that nvidia-smi printed there."""
    if not len(node):
        return []
    lines = _lines(node.text or "")
    for child in node:
        lines += [*_between(child), *_lines(child.tail or "")]
    return lines


def _gpu(node: ET.Element) -> Gpu:
    address = parse_address(node.get("id", ""))
    inner = _only(node, "pci/pci_bus_id")
    if inner and parse_address(inner) != address:
        raise ParseError(f"a GPU is at {address} and at {inner}")
    uuid, shown = _word(node, "uuid"), _only(node, "uuid")
    leaves = _leaves(node)
    lost = next((text for text in leaves.values() if _LOST.fullmatch(text)), None)
    if uuid is None and _NO_VALUE.fullmatch(shown) and not _NOT_HERE.fullmatch(shown):
        lost = lost or shown
    if uuid is None and lost is None:
        # Every GPU that the driver can talk to has one; without it the entry describes nothing.
        raise ParseError(f"the GPU at {address} has no uuid")
    texts: dict[str, str] = {}

    def number(name: str, path: str, unit: str) -> float | None:
        shown = _only(node, path)
        texts[name] = shown or "nothing"
        match = re.fullmatch(rf"(-?\d{{1,9}}(?:\.\d+)?) {unit}", shown, flags=re.ASCII)
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
        leaves=leaves,
        processes=tuple(_process(item) for item in node.findall("processes/process_info")),
        lost=lost,
        mig_devices=tuple(_leaves(item) for item in node.findall("mig_devices/mig_device")),
    )


def _leaves(node: ET.Element, path: str = "") -> dict[str, str]:
    """Every text below a node by its path. What is said twice is kept as both, which is then no value at all."""
    leaves: dict[str, str] = {}
    for child in node:
        if child.tag in _LISTS or path.count("/") > _DEEPEST:
            continue
        place = f"{path}/{child.tag}" if path else child.tag
        inner = _leaves(child, place) if len(child) else {place: (child.text or "").strip() or _EMPTY}
        for name, text in inner.items():
            leaves[name] = f"{leaves[name]} and {text}" if name in leaves else text
    return leaves


def _process(node: ET.Element) -> Process:
    pid, kind, name, memory = (
        (node.findtext(tag) or "").strip() or "unknown" for tag in ("pid", "type", "process_name", "used_memory")
    )
    return Process(pid=pid, kind=kind, name=name, memory=memory)


def _word(node: ET.Element, path: str) -> str | None:
    text = _only(node, path)
    return None if not text or _NO_VALUE.fullmatch(text) else text


def _only(node: ET.Element, path: str) -> str:
    """The text at a path. Two of them are damage: one may be the value of another GPU whose frame is gone."""
    nodes = node.findall(path)
    if len(nodes) > 1:
        raise ParseError(f"{path} is there {len(nodes)} times")
    return (nodes[0].text or "").strip() if nodes else ""


def parse_address(text: str) -> str:
    """A PCI address as the kernel writes it; nvidia-smi writes the domain with eight digits."""
    match = re.fullmatch(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", text.strip().lower(), flags=re.ASCII)
    if not match:
        raise ParseError(f"{text!r:.40} is no PCI address")
    return f"{int(match[1], 16):04x}:{match[2]}:{match[3]}.{match[4]}"
