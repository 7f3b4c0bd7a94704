"""The kernel log: Xid (GPU), SXid (NVSwitch), OOM-killer and other fault messages, counted per device and kind.

A faulty GPU can write the same line a million times, so lines are counted, not kept: memory grows with the number of
different events, time with the length of the log. Every timestamp form is read (`[ 123.4]`, ISO, `Mon DD HH:MM:SS`,
`dmesg -T`, /dev/kmsg), PCI domains of 4 and 8 digits, with and without pid and name. Only the kernel's own messages
count (kernel_line.py). The meaning of a code is in xid_catalog.py, the messages without a code in kernel_events.py.
"""

from __future__ import annotations

import io
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from trainmaster.node.parse import as_text, shorten
from trainmaster.node.parse.kernel_events import WORDS, KernelEvent, read_address, read_events, read_recovery
from trainmaster.node.parse.kernel_line import HEAD, is_boot, read_message, read_time

NVLINK5 = range(144, 151)  # their text names unit, link and severity
RECOVERY = 154  # its text holds the recovery action that the driver requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvlink:
    """Fields of a line of Xid 144–150 beyond its code."""

    unit: str  # "NETIR_LINK_EVT", "RLW_SRC_TRACK"
    fatal: bool
    link: int | None  # None: the whole GPU
    intr_info: int
    error_status: int

    @property
    def reason(self) -> int:
        """Bits 20–25 of the first word: the cause of a link that went down (NVIDIA's XID catalog)."""
        return (self.intr_info >> 20) & 0x3F


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """One kind of GPU error on one GPU. Times are as the log wrote them."""

    device: str  # "0000:3b:00"
    code: int
    count: int
    first: str | None
    last: str | None
    text: str  # of the first line
    pid: int | None = None
    process: str | None = None
    mig: str | None = None  # the GPU instance, where the line names one
    nvlink: Nvlink | None = None
    recovery: str | None = None  # of code 154: the action the driver asks for now
    implied: bool = False  # "fallen off the bus" without a code is 79
    line: int = 0  # number of its last line in the log, from 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sxid:
    """One kind of NVSwitch error on one switch."""

    device: str
    code: int
    count: int
    first: str | None
    last: str | None
    text: str
    fatal: bool | None  # None: the line does not say
    link: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKill:
    """A process name that the kernel killed for lack of memory, and how often."""

    process: str
    cgroup: bool  # the limit of a container, not the whole machine
    count: int
    last: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """A reset of one GPU, or of all (device None: the driver was loaded). Earlier Xids are from before it."""

    device: str | None  # "0000:3b:00"
    line: int
    at: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLog:
    """Content of a log. An empty log is no proof of health: see `lines` and `from_boot`."""

    xids: tuple[Xid, ...]
    sxids: tuple[Sxid, ...]
    oom_kills: tuple[OomKill, ...]
    oom_events: int  # times the killer was called, also where no victim is named
    lines: int
    recovery: tuple[tuple[str, str], ...]  # per GPU: the last action that code 154 asked for
    faults: tuple[str, ...] = ()
    events: tuple[KernelEvent, ...] = ()
    resets: tuple[Reset, ...] = ()
    from_boot: bool = False  # it holds the kernel's first message; False: its beginning is lost
    lost: int = 0  # messages about kernel messages that were dropped


_WORTH = re.compile(
    rf"X[Ii][Dd]\b|ut of memory|oom[-_]|fallen off|NVRM: The NVIDIA GPU|NVRM: loading|Linux version "
    rf"|resetting|reset done|messages dropped|kernel messages|buffer overrun|{WORDS}",
    re.ASCII,
)
_PCI = r"(?:PCI:)?(?P<domain>[0-9a-fA-F]{4,8}):(?P<bus>[0-9a-fA-F]{2}):(?P<slot>[0-9a-fA-F]{2})(?:\.[0-9a-fA-F])?"
_XID = re.compile(
    rf"NVRM:? Xid \({_PCI}(?: GPU-I:(?P<mig>\w{{1,8}}))?\): (?P<code>\d{{1,5}})(?![\d])(?:, ?(?P<text>.*))?"
)
_SXID = re.compile(rf"SXid \({_PCI}\): (?P<code>\d{{1,6}})(?![\d])(?:, ?(?P<text>.*))?")
_OWN = re.compile(rf"{HEAD}(?:NVRM\b|nvidia-nvswitch|nvswitch)")  # begins a message of NVIDIA's drivers
_BUS = re.compile(rf"{HEAD}NVRM: (?:The NVIDIA )?GPU (?:at )?{_PCI}:? .*fallen off the bus")
_FALLEN = re.compile(rf"{HEAD}(?:NVRM|nvidia)\b.*fallen off")
_ANNOUNCED = re.compile(rf"{HEAD}NVRM: The NVIDIA GPU {_PCI}")
_NEAR = 8  # lines within which the driver's sentence about a lost GPU ends; other messages may come between
_UNKNOWN = "unknown"
_LOADED = re.compile(rf"{HEAD}NVRM: loading NVIDIA UNIX")
_RESET = re.compile(rf"\b(?:nvidia|pci|vfio-pci) {_PCI}: (?:resetting|reset done)")
_LOST = re.compile(
    r"messages dropped|[Mm]issed \d+ kernel messages|buffer overrun, some messages lost|printk: \d+ messages suppressed"
    # The commands that a network adapter refuses are no fault: DGX B200 has functions that refuse some all the time.
    r"|(?:NVRM|nvidia|nvswitch|mlx[45](?!_cmd_out_err)).*\d+ (?:callbacks|messages) suppressed"
)
_PROCESS = re.compile(r"pid='?(?P<pid>\d{1,10}|<unknown>)'?(?:, name=(?P<name>[^,]{1,64}))?(?:, |$)")
_NVLINK = re.compile(
    r"(?P<unit>[A-Z][A-Z0-9_/]{1,60})\s+(?P<how>Fatal|Nonfatal|Non-fatal)\s+XC\d\s+i\d{1,4}\s+Link\s+(?P<link>-?\d{1,4})"
    r"\s+\((?P<intr>0x[0-9a-fA-F]{1,8})\s+(?P<status>0x[0-9a-fA-F]{1,8})"
)
_RECOVERY = re.compile(
    r"GPU recovery action changed from 0x[0-9a-fA-F]+ \([^)]*\) to 0x[0-9a-fA-F]+ \((?P<to>[^)]{1,40})\)"
)
_FATAL = re.compile(r"(?P<non>non-?)?fatal\b", re.IGNORECASE)
_NEARLY = re.compile(r"\bS?Xid \(|\bS?Xid \(?PCI")
_LINK = re.compile(r"\bLink (?P<link>\d{1,4})\b")
_KILL = re.compile(
    r"(?P<cgroup>Memory cgroup )?[Oo]ut of memory.{0,40}?Kill(?:ed)? process \d{1,10} \((?P<name>[^)]{1,64})\)"
)
_INVOKED = re.compile(r"invoked oom-killer:")
_TASK = re.compile(r"oom-kill:constraint=CONSTRAINT_(?P<how>\w+),.{0,2000}?task=(?P<name>[^,]{1,64}),pid=\d")
_LONGEST = 4096  # characters of a line that are looked at
_MOST = 10_000  # different events that are kept


E = TypeVar("E", Xid, Sxid, OomKill, KernelEvent)


def parse(raw: str | bytes) -> KernelLog:
    """The text of dmesg, journalctl -k, /var/log/kern.log or /dev/kmsg. Any text is a log, mostly without events."""
    return parse_lines(io.StringIO(as_text(raw)))


def parse_lines(lines: Iterable[str]) -> KernelLog:
    """The same, from a log too large to hold."""
    reader = _Reader()
    for line in lines:
        reader.lines += 1
        if _WORTH.search(line):
            reader.read(line[:_LONGEST].rstrip())
    return reader.end()


@dataclass(slots=True)
class _Seen:
    """One kind of event: built once from its first line, then only counted."""

    event: Xid | Sxid | OomKill | KernelEvent
    first: str
    last: str
    line: int = 0  # number of the last one
    count: int = 0


@dataclass(slots=True)
class _Reader:
    lines: int = 0
    xids: dict[Hashable, _Seen] = field(default_factory=dict)
    sxids: dict[Hashable, _Seen] = field(default_factory=dict)
    fallen: dict[Hashable, _Seen] = field(default_factory=dict)
    kills: dict[Hashable, _Seen] = field(default_factory=dict)
    tasks: dict[Hashable, _Seen] = field(default_factory=dict)
    repeats: dict[str, _Seen] = field(default_factory=dict)  # by the line without its timestamp
    recovery: dict[str, str] = field(default_factory=dict)
    invoked: int = 0
    dropped: int = 0
    unread: int = 0
    unread_first: str = ""
    events: dict[Hashable, _Seen] = field(default_factory=dict)
    resets: dict[str | None, Reset] = field(default_factory=dict)  # the last one of each GPU
    announced: list[tuple[str, int]] = field(default_factory=list)  # GPUs of which the driver has begun a sentence
    recovered: dict[tuple[str, str], int] = field(default_factory=dict)  # kind and device: the line of its end
    from_boot: bool = False
    lost: int = 0

    def read(self, line: str) -> None:
        message = read_message(line)
        if message is None:
            return
        repeat = self.repeats.get(message)
        if repeat is not None:
            repeat.count, repeat.last, repeat.line = repeat.count + 1, line, self.lines
            return
        # More than one event can share a line that lost its end; none of them may be lost with it.
        own = _OWN.search(message)
        place = own.start() if own else len(message)
        xids = [self._xid(match, line) for match in _XID.finditer(message, place)]
        xids += [self._sxid(match, line) for match in _SXID.finditer(message, place)]
        if not xids and _NEARLY.search(message):
            self.unread += 1
            self.unread_first = self.unread_first or shorten(line)
        if not xids:
            self._fallen(message, line)
            for event in read_events(message, self.lines):
                self._count(self.events, (event.kind, event.device, event.fatal), event, line)
        self._oom(message, line)
        self._state(message, line)
        if len(xids) == 1 and xids[0] is not None and place == 0 and len(self.repeats) < _MOST:
            self.repeats[message] = xids[0]

    def _fallen(self, message: str, line: str) -> None:
        """A GPU that fell off the bus. The driver's sentence has three lines and names the GPU in the first."""
        bus = _BUS.search(message)
        if bus is None and (announced := _ANNOUNCED.search(message)) is not None:
            self.announced.append((_device(announced), self.lines))
        if bus is None and not _FALLEN.search(message):
            return
        self.announced = [announcement for announcement in self.announced if self.lines - announcement[1] <= _NEAR]
        if bus is not None:
            device = _device(bus)
        elif self.announced:
            device = self.announced.pop(0)[0]
        else:
            device = (read_address(message) or _UNKNOWN).partition(".")[0]
        xid = Xid(device=device, code=79, count=1, first=None, last=None, text=shorten(line), implied=True)
        self._count(self.fallen, device, xid, line)

    def _state(self, message: str, line: str) -> None:
        """Boot, resets and lost messages, which decide what the rest of the log proves."""
        self.from_boot |= is_boot(line)
        if (recovery := read_recovery(message)) is not None:
            self.recovered[recovery] = self.lines
        self.lost += bool(_LOST.search(message))
        if (reset := _RESET.search(message)) is not None:
            self._reset(_device(reset), line)
        elif _LOADED.search(message):
            self._reset(None, line)

    def _reset(self, device: str | None, line: str) -> None:
        if device in self.resets or len(self.resets) < _MOST:
            self.resets[device] = Reset(device=device, line=self.lines, at=read_time(line))

    def _count(
        self, where: dict[Hashable, _Seen], key: Hashable, event: Xid | Sxid | OomKill | KernelEvent, line: str
    ) -> _Seen | None:
        seen = where.get(key)
        if seen is None:
            if len(where) >= _MOST:
                self.dropped += 1
                return None
            seen = where[key] = _Seen(event=event, first=line, last=line)
        seen.count, seen.last, seen.line = seen.count + 1, line, self.lines
        return seen

    def _xid(self, match: re.Match[str], line: str) -> _Seen | None:
        device, code, text = _device(match), int(match["code"]), (match["text"] or "").strip()
        process = _PROCESS.match(text)
        rest = text[process.end() :] if process else text
        nvlink = _read_nvlink(rest) if code in NVLINK5 else None
        action = _RECOVERY.search(rest) if code == RECOVERY else None
        if action and (device in self.recovery or len(self.recovery) < _MOST):
            self.recovery[device] = action["to"]
            if action["to"] == "None":
                self._reset(device, line)
        known = process is not None and process["pid"] != "<unknown>"
        name = process["name"] if process else None
        xid = Xid(
            device=device,
            code=code,
            count=1,
            first=None,
            last=None,
            text=shorten(rest),
            pid=int(process["pid"]) if process and known else None,
            process=None if name in (None, "<unknown>") else shorten(name or ""),
            mig=match["mig"],
            nvlink=nvlink,
            recovery=action["to"] if action else None,
        )
        # What NVIDIA asks for depends on reason and status: a grave one is not counted with a mild one.
        unit = nvlink and (nvlink.unit, nvlink.fatal, nvlink.link, nvlink.reason, nvlink.error_status)
        seen = self._count(self.xids, (device, code, xid.mig, unit, xid.recovery), xid, line)
        # The order of recovery actions matters, so each of their lines is read.
        return None if code == RECOVERY else seen

    def _sxid(self, match: re.Match[str], line: str) -> _Seen | None:
        device, code, text = _device(match), int(match["code"]), (match["text"] or "").strip()
        word = _FATAL.match(text)
        fatal = None if word is None else not word["non"]
        link = _LINK.search(text)
        number = int(link["link"]) if link else None
        sxid = Sxid(
            device=device, code=code, count=1, first=None, last=None, text=shorten(text), fatal=fatal, link=number
        )
        return self._count(self.sxids, (device, code, fatal, number), sxid, line)

    def _oom(self, message: str, line: str) -> None:
        self.invoked += bool(_INVOKED.search(message))
        kill, task = _KILL.search(message), _TASK.search(message)
        for match, where in ((kill, self.kills), (task, self.tasks)):
            if match is not None:
                cgroup = bool(match["cgroup"]) if where is self.kills else match["how"] == "MEMCG"
                name = shorten(match["name"])
                self._count(where, (name, cgroup), OomKill(process=name, cgroup=cgroup, count=1, last=None), line)

    def end(self) -> KernelLog:
        explicit = {
            seen.event.device for seen in self.xids.values() if isinstance(seen.event, Xid) and seen.event.code == 79
        }
        explicit |= {_UNKNOWN} if explicit or len(self.fallen) > 1 else set()
        implied = {device: seen for device, seen in self.fallen.items() if device not in explicit}
        # The kernel writes two lines for one kill; either alone is enough.
        kills = _finish(OomKill, {**self.tasks, **self.kills})
        faults = []
        if self.unread:
            faults.append(f"{self.unread} lines about an Xid cannot be parsed; the first: {self.unread_first}")
        if self.dropped:
            faults.append(f"{self.dropped} lines beyond {_MOST} different events were not kept")
        return KernelLog(
            xids=_finish(Xid, self.xids) + _finish(Xid, implied),
            sxids=_finish(Sxid, self.sxids),
            oom_kills=kills,
            oom_events=max(self.invoked, sum(kill.count for kill in kills)),
            lines=self.lines,
            recovery=tuple(self.recovery.items()),
            faults=tuple(faults),
            events=tuple(
                replace(event, recovered=event.line < self.recovered.get((event.kind, event.device or ""), 0))
                for event in _finish(KernelEvent, self.events)
            ),
            resets=tuple(self.resets.values()),
            from_boot=self.from_boot,
            lost=self.lost,
        )


def _finish(kind: type[E], where: Mapping[Hashable, _Seen]) -> tuple[E, ...]:
    made = []
    for seen in where.values():
        assert isinstance(seen.event, kind)
        times: dict[str, Any] = {"count": seen.count, "last": read_time(seen.last)}
        if not isinstance(seen.event, OomKill):
            times["first"] = read_time(seen.first)
        if isinstance(seen.event, (Xid, KernelEvent)):
            times["line"] = seen.line
        made.append(replace(seen.event, **times))
    return tuple(made)


def _device(match: re.Match[str]) -> str:
    """One spelling for every width: 00000000:3B:00.0 and PCI:0000:3b:00 are the same GPU."""
    return f"{int(match['domain'], 16):04x}:{match['bus'].lower()}:{match['slot'].lower()}"


def _read_nvlink(text: str) -> Nvlink | None:
    match = _NVLINK.search(text)
    if match is None:
        return None
    link = int(match["link"])
    return Nvlink(
        unit=match["unit"],
        fatal=match["how"] == "Fatal",
        link=link if link >= 0 else None,
        intr_info=int(match["intr"], 16),
        error_status=int(match["status"], 16),
    )
