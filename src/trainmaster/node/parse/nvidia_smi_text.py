"""`nvidia-smi -q` as text, turned into the XML of `-q -x`, so that one parser reads both.

The text has the same values under other words: sections by indentation, `Key : Value` lines. A key becomes the tag of
the XML by a table, else by its own letters. A line that is neither stays as text between the elements, where the parser
finds warnings.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

_HEAD = "NVSMI LOG"
_GPU = re.compile(r"GPU (?P<address>[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*")
_PAIR = re.compile(r"(?P<indent> *)(?P<key>\S(?:.*?\S)?) +: (?P<value>.*\S)\s*")
_SECTION = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z][\w .,/()-]*?)\s*:?\s*")
_TAGS = {
    "gpu uuid": "uuid",
    "serial number": "serial",
    "pci/bus id": "pci_bus_id",
    "pci/gpu link info": "pci_gpu_link_info",
    "pcie generation": "pcie_gen",
    "pcie generation/max": "max_link_gen",
    "pcie generation/current": "current_link_gen",
    "pcie generation/device current": "device_current_link_gen",
    "pcie generation/device max": "max_device_link_gen",
    "pcie generation/host max": "max_host_link_gen",
    "link width": "link_widths",
    "link width/max": "max_link_width",
    "link width/current": "current_link_width",
    "ecc mode/current": "current_ecc",
    "ecc mode/pending": "pending_ecc",
    "mig mode/current": "current_mig",
    "mig mode/pending": "pending_mig",
    "temperature/gpu current temp": "gpu_temp",
    "temperature/gpu t.limit temp": "gpu_temp_tlimit",
    "remapped rows/correctable error": "remapped_row_corr",
    "remapped rows/uncorrectable error": "remapped_row_unc",
    "remapped rows/pending": "remapped_row_pending",
    "remapped rows/remapping failure occurred": "remapped_row_failure",
}
_REASONS = re.compile(r"clocks (event|throttle) reasons")


def is_text(text: str) -> bool:
    """Whether this is the text form: its banner, and no XML."""
    return _HEAD in text[:4096] and "<nvidia_smi_log" not in text


def to_xml(text: str) -> str:
    """The same document as XML."""
    root = ET.Element("nvidia_smi_log")
    stack: list[tuple[int, str, ET.Element]] = [(-1, "", root)]
    for line in text.splitlines():
        gpu = _GPU.fullmatch(line)
        if gpu is not None:
            node = ET.SubElement(root, "gpu", id=gpu["address"])
            stack = [(-1, "", root), (0, "gpu", node)]
            continue
        if not line.strip() or set(line.strip()) == {"="} or _HEAD in line:
            continue
        pair = _PAIR.fullmatch(line)
        section = None if pair else _SECTION.fullmatch(line)
        match = pair or section
        if match is None:
            root.append(_remark(line))
            continue
        indent, key = len(match["indent"]), match["key"].lower()
        while len(stack) > 1 and stack[-1][0] >= indent and stack[-1][1] != "gpu":
            stack.pop()
        if indent == 0:
            stack = [(-1, "", root)]
        above = stack[-1]
        if pair is None and indent == 0:
            root.append(_remark(line))  # a warning: sections stand below a GPU
            continue
        child = ET.SubElement(above[2], _tag(above[1], key))
        if pair is not None:
            child.text = pair["value"]
        else:
            stack.append((indent, key, child))
    return ET.tostring(root, encoding="unicode")


def _tag(section: str, key: str) -> str:
    known = _TAGS.get(f"{section}/{key}") or _TAGS.get(key)
    if known is not None:
        return known
    slug = re.sub(r"[^a-z0-9]+", "_", key).strip("_") or "unnamed"
    reasons = _REASONS.fullmatch(section)
    if reasons is not None:
        return f"clocks_{reasons[1]}_reason_{'gpu_idle' if slug == 'idle' else slug}"
    return slug if slug[0].isalpha() else f"x_{slug}"


def _remark(line: str) -> ET.Element:
    """A line that is no value, as text after an empty element: the parser reads it as a warning."""
    mark = ET.Element("remark")
    mark.tail = f"\n{line.strip()}\n"
    return mark
