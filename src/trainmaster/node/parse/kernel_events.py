"""Kernel messages about faults other than Xid and SXid, read by the rules of kernel_event_rules.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trainmaster.node.parse import shorten
from trainmaster.node.parse.kernel_event_rules import LUSTRE, NAMES, RULES, WORDS, Kind, Rule

__all__ = ["WORDS", "KernelEvent", "Kind", "read_address", "read_events", "read_recovery"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelEvent:
    """One kind of fault on one device. Times are as in the log; `line` is the number of its last line, from 1."""

    kind: Kind
    device: str | None  # "0000:3b:00.0", "CPU 12", "nvme0n1", a process; None: the message names none
    fatal: bool | None  # None: the message does not tell
    count: int
    first: str | None
    last: str | None
    text: str
    line: int
    recovered: bool = False  # a later line reports the end of the fault


_PCI = (
    r"(?<![0-9a-fA-F:])(?P<domain>[0-9a-fA-F]{4,8}):(?P<bus>[0-9a-fA-F]{2}):(?P<slot>[0-9a-fA-F]{2})"
    r"(?:\.(?P<function>[0-7]))?"
)
_ADDRESS = re.compile(_PCI)
_SOURCE = re.compile(rf"received(?: from|:) {_PCI}")
_SHORT = re.compile(r"device[= ]\[?(?P<bus>[0-9a-fA-F]{2}):(?P<slot>[0-9a-fA-F]{2})\.(?P<function>[0-7])")
_UNCORRECTED = 1 << 61  # the UC bit of IA32_MCi_STATUS (Intel SDM volume 3B, 15.3.2.2)


def read_events(line: str, number: int) -> Iterator[KernelEvent]:
    """The fault that a line reports, if any. Times are filled in by the caller."""
    for rule in RULES:
        match = rule.pattern.search(line) if any(word in line for word in rule.words) else None
        if match is not None:
            yield KernelEvent(
                kind=rule.kind,
                device=_device(rule, match, line),
                fatal=rule.fatal if rule.fatal is not None else _fatal(match, line),
                count=1,
                first=None,
                last=None,
                text=shorten(_message(line)),
                line=number,
            )
            return


_RECOVERED = (
    re.compile(r"\bserver (?P<device>[\w.:\[\]-]{1,80}) OK\b"),
    re.compile(LUSTRE + r"Connection restored to"),
)


def read_recovery(line: str) -> tuple[Kind, str] | None:
    """Kind and device of a fault whose end a line reports."""
    for pattern in _RECOVERED:
        if (match := pattern.search(line)) is not None:
            return "storage_lost", shorten(match.group(1))
    return None


def read_address(line: str) -> str | None:
    """The first PCI address in a line, in the kernel's spelling; with its function where the line has one."""
    match = _ADDRESS.search(line)
    return None if match is None else _spell(match)


def _device(rule: Rule, match: re.Match[str], line: str) -> str | None:
    if rule.device == "pci":
        source = _SOURCE.search(line)
        short = _SHORT.search(line)
        if source is None and read_address(line) is None and short is not None:
            return f"0000:{short['bus']}:{short['slot']}.{short['function']}".lower()
        return _spell(source) if source is not None else read_address(line)
    if rule.device is None:
        return None
    groups = match.groupdict()
    name = next((groups[name] for name in NAMES if groups.get(name)), None)
    return None if name is None else shorten(re.sub(r"^(?:CPU#|cpu )", "CPU ", name.strip()))


def _fatal(match: re.Match[str], line: str) -> bool | None:
    """What the groups of a pattern tell about severity."""
    groups = match.groupdict()
    if groups.get("status"):
        return bool(int(groups["status"], 16) & _UNCORRECTED)
    if groups.get("bad") or groups.get("uncorrected") or groups.get("fatal") is not None:
        return True
    if groups.get("good") or groups.get("corrected") or groups.get("nonfatal"):
        return False
    if "ERR_FATAL" in line:
        return True
    return None


def _spell(match: re.Match[str]) -> str:
    function = f".{match['function']}" if match["function"] else ""
    return f"{int(match['domain'], 16):04x}:{match['bus'].lower()}:{match['slot'].lower()}{function}"


def _message(line: str) -> str:
    """The line without its timestamp and host."""
    rest = line.partition("kernel: ")[2] or line
    return re.sub(r"^\s*(?:<\d{1,3}>)?(?:\[[^\]]{1,40}\]\s*|\d[^;]{1,60};)?", "", rest)
