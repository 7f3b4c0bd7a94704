"""The kernel log has no fault of GPU (Xid), NVSwitch (SXid), PCIe, memory, adapter, disk or kernel since boot.

Such a device fails again. Events of a GPU before its last reset are noted and do not count. A machine without a GPU is
judged by the same log. Where rights keep the log from this process, as in every default container, `_closed_log` says
what is seen without it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast, get_args

from trainmaster.checks import nvidia, system_files
from trainmaster.checks.gpu import _closed_log, _kernel_rules
from trainmaster.core.errors import CommandMissing, FileMissing, FileUnreadable, HostError, NotCaptured
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, Verdict, error, fail, ok, warn
from trainmaster.node.host import CommandResult, Host
from trainmaster.node.parse import ParseError, kernel_line, kernel_log, xid_catalog
from trainmaster.node.parse.kernel_events import KernelEvent
from trainmaster.node.parse.kernel_log import KernelLog, Sxid, Xid
from trainmaster.node.parse.xid_catalog import Catalog, Severity, XidEntry

LEVEL = 1
GPU = True
EXPECTS = ("xids",)
COMPARES = ()
METRICS: dict[str, str] = {}
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S + 60
SITE = "/etc/trainmaster/xid.toml"  # a site's own table, laid over ours
_JOURNAL = ("journalctl", "-k", "-b", "--no-pager", "-o", "short-monotonic")
# In a log with times every message has one. Without it, or with another word there, the line is not as it was written.
_TIMELESS = re.compile(r"^\[(?!\s*\d+\.\d+\]|[A-Z][a-z]{2} [A-Z]).{0,60}", re.MULTILINE)
_FILES = ("/var/log/kern.log", "/var/log/messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One log. `whole`: it reaches back to the boot. `log` None: none could be read, for the reason in `trouble`.

    `closed`: each log is absent here or refused to this user, and none was damaged.
    """

    gpus: nvidia.Gpus
    source: str
    log: KernelLog | None
    whole: bool
    trouble: str
    site: str | None
    closed: bool = False
    instead: _closed_log.Instead | None = None  # where each log is closed
    others: tuple[tuple[str, KernelLog], ...] = ()  # cut short, damaged or without its beginning; faults there count


def read(host: Host) -> Evidence:
    gpus = nvidia.read(host)
    source, text, trouble, closed, others = _read_log(host)
    log = kernel_log.parse(text) if text else None
    instead = _closed_log.read(host, gpus) if log is None and closed else None
    return Evidence(
        gpus=gpus,
        source=source,
        log=log,
        whole=log is not None and log.from_boot,
        trouble=trouble,
        site=_read_site(host),
        closed=closed,
        instead=instead,
        others=tuple((name, kernel_log.parse(other)) for name, other in others),
    )


def judge(evidence: Evidence, expect: Expect) -> list[Finding]:
    """Findings of the log, and the faults of each log that proves nothing by its silence."""
    findings = _judge_log(evidence, expect)
    for name, log in evidence.others:
        known = {_event(finding) for finding in findings}
        beside = _judge_log(replace(evidence, source=name, log=log, whole=False, others=()), expect)
        findings += [
            finding
            for finding in beside
            if finding.verdict in (Verdict.WARN, Verdict.FAIL) and _event(finding) not in known
        ]
    return findings


def _event(finding: Finding) -> tuple[object, ...]:
    """What tells two events apart, whatever log reports them and how often."""
    return (finding.device, *(finding.values.get(name) for name in ("xid", "sxid", "kind")))


def _judge_log(evidence: Evidence, expect: Expect) -> list[Finding]:
    refused = nvidia.refuse(evidence.gpus, expect)
    # Where nvidia-smi hangs, the log is the only evidence left: go on.
    hung = refused is not None and refused.verdict is Verdict.ERROR and nvidia.expected(evidence.gpus, expect) > 0
    without = None if hung else refused
    if evidence.log is None:
        if without is not None and evidence.closed:
            proof = f"{without.proof}; kernel log: {evidence.trouble}" if without.verdict is Verdict.SKIP else None
            return [replace(without, proof=proof)]
        if refused is None and evidence.instead and _closed_log.is_refused(evidence.instead, evidence.trouble):
            slots = nvidia.slots(evidence.gpus, nvidia.expected(evidence.gpus, expect))
            devices = {slot.bus: slot.device for slot in slots if slot.bus is not None}
            return _closed_log.judge(evidence.instead, evidence.gpus, devices, evidence.trouble)
        action = "run as root on the node, or let this container read the kernel log; --skip xid leaves it out"
        unread = error(f"the kernel log cannot be read: {evidence.trouble}", action=action)
        return [unread] if without is None else [without, unread]
    try:
        catalog = _catalog(evidence.site, expect)
    except ParseError as exc:
        return [error(str(exc), action=f"mend {SITE} or --expect xids=")]
    if without is not None:
        findings = list(_judge_host(evidence, evidence.log, catalog, expect))
        # What the log shows of the machine is the answer; that there is no GPU is `gpu_count`'s.
        return findings if findings and without.verdict is Verdict.SKIP else [without, *findings]
    return list(_judge(evidence, evidence.log, catalog, expect))


def _judge_host(evidence: Evidence, log: KernelLog, catalog: Catalog, expect: Expect) -> Iterator[Finding]:
    """Findings of a machine without a GPU. Where gpus=0 is stated, GPUs that are there all the same do not count."""
    if expect.gpus != 0:
        yield from (_judge_xid(xid, catalog.of_xid(xid), xid.device, log) for xid in log.xids)
        yield from (_judge_sxid(sxid, catalog.of_sxid(sxid)) for sxid in log.sxids)
    events = [event for event in log.events if expect.gpus != 0 or event.kind not in _kernel_rules.OF_GPUS]
    findings = [finding for event in events if (finding := _judge_event(event, event.device, log)) is not None]
    yield from findings
    if log.faults and expect.gpus != 0:
        yield error(log.faults[0], action=f"read the kernel log by hand: {evidence.source}")
    if not findings and evidence.whole and not log.lost:
        yield ok(f"no fault of this machine since boot ({evidence.source})", lines=log.lines)


def _judge(evidence: Evidence, log: KernelLog, catalog: Catalog, expect: Expect) -> Iterator[Finding]:
    gpus = evidence.gpus
    slots = nvidia.slots(gpus, nvidia.expected(gpus, expect))
    left, events = list(log.xids), list(log.events)
    for slot in slots:
        own = [xid for xid in left if slot.bus is not None and slot.bus.startswith(f"{xid.device}.")]
        left = [xid for xid in left if xid not in own]
        mine = [event for event in events if slot.bus is not None and _same(event.device, slot.bus)]
        events = [event for event in events if event not in mine]
        findings = [_judge_xid(xid, catalog.of_xid(xid), slot.device, log) for xid in own]
        findings += [finding for event in mine if (finding := _judge_event(event, slot.device, log)) is not None]
        if findings:
            yield from findings
        elif slot.bus is None:
            yield nvidia.missing_gpu(slot)
        else:
            yield _judge_quiet(evidence, log, slot.device)
    for xid in left:
        # A container reads the log of the whole node: GPUs of others are not judged here. A lost GPU is.
        if gpus.granted is None or any(slot.gpu is None for slot in slots):
            yield _judge_xid(xid, catalog.of_xid(xid), xid.device, log)
    for sxid in log.sxids:
        yield _judge_sxid(sxid, catalog.of_sxid(sxid))
    for event in events:
        if (finding := _judge_event(event, event.device, log)) is not None:
            yield finding
    if log.faults:
        yield error(log.faults[0], action=f"read the kernel log by hand: {evidence.source}")


def _judge_quiet(evidence: Evidence, log: KernelLog, device: str) -> Finding:
    """Finding of a GPU without an event. A log that lost messages proves nothing about it."""
    action = "read the node's persistent log (journalctl -k -b), or enlarge the ring buffer: log_buf_len=16M"
    if not evidence.whole:
        reason = f"no Xid in {evidence.source}, which does not reach back to the boot"
        return error(reason, action=action, device=device, lines=log.lines)
    if log.lost:
        reason = f"no Xid in {evidence.source}, which lost messages ({log.lost} gaps)"
        return error(reason, action=action, device=device, lines=log.lines)
    return ok(f"no Xid since boot ({evidence.source})", device=device, lines=log.lines)


def _judge_xid(xid: Xid, meaning: XidEntry, device: str, log: KernelLog) -> Finding:
    values = {"xid": xid.code, "count": xid.count, "first": xid.first, "last": xid.last, "source": meaning.source}
    values |= {"text": xid.text, "pid": xid.pid, "process": xid.process}
    times = f" {xid.count} times" if xid.count > 1 else ""
    reason = f"Xid {xid.code}{times}: {meaning.meaning}"
    if _before_reset(xid.line, xid.device, log):
        return ok(f"{reason} (noted: before the last reset of the GPU)", device=device, **values)
    return _finding(reason, meaning, device, values)


def _before_reset(line: int, device: str | None, log: KernelLog, *, loads: bool = True) -> bool:
    """Whether an event is older than the last reset of its GPU, or (`loads`) than the last start of the driver."""
    if device is None:  # the message names no GPU; an Xid beside it does
        return any(line < reset.line for reset in log.resets)
    places = (None, device.partition(".")[0]) if loads else (device.partition(".")[0],)
    return any(line < reset.line for reset in log.resets if reset.device in places)


def _judge_event(event: KernelEvent, device: str | None, log: KernelLog) -> Finding | None:
    """Finding about a message without an Xid; None: it is of no concern."""
    rule = _kernel_rules.EVENTS[event.kind]
    # The driver of the GPUs says nothing about other devices, and its start does not mend a link.
    if event.kind in _kernel_rules.ENDED_BY_RESET and _before_reset(
        event.line, event.device, log, loads=event.kind != "pcie_uncorrected"
    ):
        return None
    severity = _kernel_rules.severity(rule, event)
    if severity is None:
        return None
    times = f" {event.count} times" if event.count > 1 else ""
    ended = " (it ended later)" if event.recovered else ""
    reason = f"{rule.meaning}{times}{ended}: {event.text}"
    values = {"kind": event.kind, "count": event.count, "first": event.first, "last": event.last}
    say = warn if severity == "warn" else fail
    return say(reason, action=rule.action, device=device, **values)


def _same(device: str | None, bus: str) -> bool:
    return device is not None and (device == bus or bus.startswith(f"{device}."))


def _judge_sxid(sxid: Sxid, meaning: XidEntry) -> Finding:
    values = {"sxid": sxid.code, "count": sxid.count, "first": sxid.first, "last": sxid.last, "source": meaning.source}
    values |= {"text": sxid.text, "link": sxid.link}
    times = f" {sxid.count} times" if sxid.count > 1 else ""
    return _finding(f"SXid {sxid.code}{times}: {meaning.meaning}", meaning, f"nvswitch {sxid.device}", values)


def _finding(reason: str, meaning: XidEntry, device: str, values: Mapping[str, object]) -> Finding:
    if meaning.severity == "info":
        return ok(f"{reason} (noted)", device=device, **values)
    say = fail if meaning.severity == "fail" else warn
    return say(reason, action=meaning.action, device=device, **values)


def _catalog(site: str | None, expect: Expect) -> Catalog:
    """Our table, then the site's file, then `--expect xids=`; later ones win."""
    catalog = xid_catalog.load()
    if site is not None:
        catalog = catalog.overlay(xid_catalog.parse(site))
    rows = dict(catalog.xids)
    for word in expect.xids or ():
        code, colon, severity = word.partition(":")
        if not colon or not re.fullmatch(r"\d{1,6}", code, flags=re.ASCII) or severity not in get_args(Severity):
            raise ParseError(f"{word[:40]!r} is no Xid with its severity; write for example 63:fail")
        unknown = XidEntry(meaning="named by the profile", severity="warn", action="look it up", source="the profile")
        rows[int(code)] = replace(rows.get(int(code), unknown), severity=cast(Severity, severity))
    return replace(catalog, xids=rows)


def _read_log(host: Host) -> tuple[str, str, str, bool, list[tuple[str, str]]]:
    """First log that reaches back to the boot, else the first readable one: name, text, trouble, whether all closed.

    The last are the other logs with their names: cut short, damaged or without their beginning.
    """
    late: list[tuple[str, str]] = []
    damaged: list[tuple[str, str]] = []
    troubles, closed = [], True
    for name, read_log in _sources(host):
        raw = ""
        try:
            raw = read_log()
            if raw and not raw.endswith("\n"):
                raise HostError(f"{name} was cut short")  # what followed may be the fault
            text = _since_boot(raw)
            if text and not kernel_line.is_boot(text) and not any(map(kernel_line.read_time, text.splitlines())):
                raise HostError(f"{name} holds no message of a kernel: {text[:40]!r}")
            if text.startswith("[") and (line := _TIMELESS.search(text)):
                raise HostError(f"{name} holds a damaged line: {line[0]}")
        except HostError as error:
            troubles.append(str(error))
            closed = closed and _is_closed(error)
            damaged += [(name, _since_boot(raw))] if raw else []
            continue
        if not text:
            troubles.append(f"{name} is empty")
            # A container may have journalctl and no journal; the ring buffer of a running kernel is never empty.
            closed = closed and name == "journalctl"
        elif kernel_line.is_boot(text):
            return name, text, "", False, [*late, *damaged]
        else:
            late.append((name, text))
    name, text = late[0] if late else ("", "")
    return name, text, "; ".join(troubles), closed, [*late[1:], *damaged]


def _is_closed(failure: HostError) -> bool:
    """Whether a log is not there or is kept from this user."""
    refused = isinstance(failure, (CommandMissing, FileMissing, FileUnreadable)) and not isinstance(
        failure, NotCaptured
    )
    return refused or re.search(r"not permitted|denied", str(failure), re.IGNORECASE) is not None


def _sources(host: Host) -> Iterator[tuple[str, Callable[[], str]]]:
    def run(name: str, command: Callable[[], CommandResult]) -> str:
        result = command()
        if result.exit_code:
            output = " ".join((result.stderr or result.stdout).split())[:120]
            raise HostError(f"{name} ended with {result.exit_code}: {output}")
        return result.stdout

    yield "dmesg", functools.partial(run, "dmesg", functools.partial(system_files.run_dmesg, host))
    yield _JOURNAL[0], functools.partial(run, _JOURNAL[0], functools.partial(host.run, *_JOURNAL))
    for path in _FILES:
        yield path, functools.partial(host.read, path)


def _since_boot(text: str) -> str:
    """A file may hold many boots; only what follows the last one counts. Lines with -- are journalctl's own."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("-- ")]
    start = max((number for number, line in enumerate(lines) if kernel_line.is_boot(line)), default=0)
    return "\n".join(lines[start:])


def _read_site(host: Host) -> str | None:
    try:
        return host.read(SITE)
    except (FileMissing, NotCaptured):
        return None
