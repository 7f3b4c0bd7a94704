"""The log of NVIDIA's Fabric Manager (/var/log/fabricmanager.log): errors since it last started, counted.

    [Jul 23 2024 07:53:55] [ERROR] [tid 841] detected NVSwitch fatal error 20034 on fid 0 on NVSwitch pci bus id …

Each start writes "Fabric Manager version … is running with the following configuration options", so errors before the
last start are of another time. Format: Fabric Manager User Guide, and the log in leptonai/gpud fabric-manager/testdata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainmaster.node.parse import shorten, split_lines
from trainmaster.node.parse.kernel_log import Sxid

_LINE = re.compile(
    r"\[(?P<at>[A-Z][a-z]{2} [ \d]\d \d{4} [\d:]{8})\] \[(?P<level>[A-Z]{3,10})\] (?:\[tid \d+\] )?(?P<text>.*)"
)
_STARTED = re.compile(r"Fabric Manager version .{0,60} is running|is running with the following configuration options")
_SWITCH = re.compile(
    r"detected NVSwitch (?P<non>non-)?fatal error (?P<code>\d{1,6})\b.*?pci bus id "
    r"(?P<domain>[0-9a-fA-F]{4,8}):(?P<bus>[0-9a-fA-F]{2}):(?P<slot>[0-9a-fA-F]{2})(?:.*?\bport (?P<port>\d{1,4}))?"
)
# Fabric Manager gives up on these, or reports a GPU (NVLink 5) whose link is lost: GPUs are then without NVLink.
_GRAVE = re.compile(
    r"don't match with any supported system topology|aborting fabric manager|initialization failed"
    r"|(?<!non-)(?<!non)\b[Ff]atal error"
)
_NO_SWITCH = "NV_WARN_NOTHING_TO_DO"  # a machine without NVSwitches
_MOST = 1000  # different messages that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """An error that is not one of an NVSwitch. `grave`: GPUs are without NVLink."""

    text: str
    grave: bool
    count: int
    last: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricLog:
    """Errors since the last start."""

    sxids: tuple[Sxid, ...]
    messages: tuple[Message, ...]


def parse(raw: str | bytes) -> FabricLog:
    """Any text is a log, mostly without errors."""
    sxids: dict[tuple[str, int, int | None], Sxid] = {}
    messages: dict[str, Message] = {}
    for at, level, text in _read_lines(raw):
        if _STARTED.search(text):
            sxids, messages = {}, {}
        elif level not in ("ERROR", "CRITICAL", "FATAL") or _NO_SWITCH in text:
            continue
        elif (match := _SWITCH.search(text)) is not None:
            made = _sxid(match, at, text)
            key = (made.device, made.code, made.link)
            seen = sxids.get(key, replace(made, count=0))
            if key in sxids or len(sxids) < _MOST:
                sxids[key] = replace(seen, count=seen.count + 1, last=at, fatal=seen.fatal or made.fatal)
        else:
            # Numbers tell two messages of one kind apart, and would make a million of them.
            kind = re.sub(r"\b(?:0x)?[0-9a-fA-F]*\d[0-9a-fA-F]*\b", "0", text)
            grave = level != "ERROR" or _GRAVE.search(text) is not None
            known = messages.get(kind, Message(text=shorten(text), grave=grave, count=0, last=at))
            if kind in messages or len(messages) < _MOST:
                messages[kind] = replace(known, count=known.count + 1, last=at)
    return FabricLog(sxids=tuple(sxids.values()), messages=tuple(messages.values()))


def _read_lines(raw: str | bytes) -> Iterator[tuple[str, str, str]]:
    for line in split_lines(raw):
        if (match := _LINE.match(line)) is not None:
            yield match["at"], match["level"], match["text"]


def _sxid(match: re.Match[str], at: str, text: str) -> Sxid:
    return Sxid(
        device=f"{int(match['domain'], 16):04x}:{match['bus'].lower()}:{match['slot'].lower()}",
        code=int(match["code"]),
        count=1,
        first=at,
        last=at,
        text=shorten(text),
        fatal=not match["non"],
        link=int(match["port"]) if match["port"] else None,
    )
