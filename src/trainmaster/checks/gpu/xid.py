"""The kernel log has no fault of GPU (Xid), NVSwitch (SXid), PCIe, memory, adapter or disk since boot.

Such a device fails again. Events before the last reset of a GPU are noted and do not count.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast, get_args

from trainmaster.checks import nvidia
from trainmaster.core.errors import FileMissing, HostError, NotCaptured
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, Verdict, error, fail, ok, warn
from trainmaster.node.host import Host
from trainmaster.node.parse import ParseError, kernel_log, xid_catalog
from trainmaster.node.parse.kernel_events import KernelEvent, Kind
from trainmaster.node.parse.kernel_log import KernelLog, Sxid, Xid
from trainmaster.node.parse.xid_catalog import Catalog, Meaning, Severity

LEVEL = 1
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S + 60
SITE = "/etc/trainmaster/xid.toml"  # a site's own table, laid over ours
BOOT = "Linux version "  # the kernel's first line
_COMMANDS = (("dmesg",), ("journalctl", "-k", "-b", "--no-pager", "-o", "short-monotonic"))
_FILES = ("/var/log/kern.log", "/var/log/messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Meaning of a kernel message without an Xid, from how many on it counts, and its severity."""

    meaning: str
    action: str
    severity: Severity = "fail"
    least: int = 1


_REBOOT = "drain the node and reboot it; have it repaired if it repeats"
_DISK = "drain the node; check and replace the disk"
_NIC = "drain the node and reset the adapter (mlxfwreset); replace it if it repeats"
EVENTS: dict[Kind, Rule] = {
    "gpu_init_failed": Rule(meaning="the driver could not start a GPU", action=_REBOOT),
    "driver_probe_failed": Rule(meaning="a driver could not bind its device", action=_REBOOT),
    "pcie_uncorrected": Rule(
        meaning="uncorrectable PCIe error", action="reseat the device or its riser; replace it if it repeats"
    ),
    "pcie_corrected": Rule(
        # Ours: a few corrected errors are normal, a marginal slot makes thousands.
        meaning="corrected PCIe errors", action="reseat the device or its riser", severity="warn", least=1000,
    ),
    "pcie_link_down": Rule(meaning="a PCIe link went down", action="reseat the device or its riser", severity="warn"),
    "machine_check": Rule(meaning="machine check", action=_REBOOT),
    "memory_uncorrected": Rule(meaning="uncorrectable memory error", action="replace the module that EDAC names"),
    "memory_corrected": Rule(meaning="corrected memory errors", action="watch the memory module", severity="warn"),
    "nic_health": Rule(meaning="the network adapter reports an internal error", action=_NIC),
    "nic_command_timeout": Rule(meaning="the network adapter's firmware does not answer", action=_NIC),
    "nic_module": Rule(meaning="a cable or module reports an error", action="replace the cable", severity="warn"),
    "soft_lockup": Rule(meaning="a CPU was stuck in the kernel", action=_REBOOT),
    "hard_lockup": Rule(meaning="a CPU was locked up", action=_REBOOT),
    "hung_task": Rule(
        meaning="a process hung in the kernel", action="see what it waits for (a mount, a driver); reboot the node"
    ),
    "filesystem_readonly": Rule(meaning="a file system was remounted read-only", action=_DISK),
    "filesystem_error": Rule(meaning="a file system reports an error", action=_DISK),
    "disk_error": Rule(meaning="a disk reports an error", action=_DISK, severity="warn"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One log. `whole`: it reaches back to the boot. `log` None: none could be read, for the reason in `trouble`."""

    gpus: nvidia.Gpus
    source: str
    log: KernelLog | None
    whole: bool
    trouble: str
    site: str | None


def read(host: Host) -> Evidence:
    gpus = nvidia.read(host)
    source, text, trouble = _read_log(host)
    return Evidence(
        gpus=gpus,
        source=source,
        log=kernel_log.parse(text) if text else None,
        whole=BOOT in text,
        trouble=trouble,
        site=_read_site(host),
    )


def judge(evidence: Evidence, expect: Expect) -> list[Finding]:
    gpus = evidence.gpus
    refused = nvidia.refuse(gpus, expect)
    # Where nvidia-smi hangs, the log is the only evidence left: go on.
    if refused is not None and refused.verdict is not Verdict.ERROR:
        return [refused]
    if evidence.log is None:
        action = "run as root on the node, or let this container read the kernel log; --skip xid leaves it out"
        return [error(f"the kernel log cannot be read: {evidence.trouble}", action=action)]
    try:
        catalog = _catalog(evidence.site, expect)
    except ParseError as wrong:
        return [error(str(wrong), action=f"mend {SITE} or --expect xids=")]
    return list(_judge(evidence, evidence.log, catalog, expect))


def _judge(evidence: Evidence, log: KernelLog, catalog: Catalog, expect: Expect) -> Iterator[Finding]:
    gpus = evidence.gpus
    slots = nvidia.slots(gpus, nvidia.expected(gpus, expect))
    left, events = list(log.xids), list(log.events)
    for slot in slots:
        own = [xid for xid in left if slot.bus is not None and slot.bus.startswith(f"{xid.device}.")]
        left = [xid for xid in left if xid not in own]
        mine = [event for event in events if slot.bus is not None and _same(event.device, slot.bus)]
        events = [event for event in events if event not in mine]
        found = [_judge_xid(xid, catalog.of_xid(xid), slot.device, log) for xid in own]
        found += [one for event in mine if (one := _judge_event(event, slot.device, log)) is not None]
        if found:
            yield from found
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
        if (one := _judge_event(event, event.device, log)) is not None:
            yield one
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


def _judge_xid(xid: Xid, meaning: Meaning, device: str, log: KernelLog) -> Finding:
    values = {"xid": xid.code, "count": xid.count, "first": xid.first, "last": xid.last, "source": meaning.source}
    values |= {"text": xid.text, "pid": xid.pid, "process": xid.process}
    times = f" {xid.count} times" if xid.count > 1 else ""
    reason = f"Xid {xid.code}{times}: {meaning.meaning}"
    if _before_reset(xid.line, xid.device, log):
        return ok(f"{reason} (noted: before the last reset of the GPU)", device=device, **values)
    return _finding(reason, meaning, device, values)


def _before_reset(line: int, device: str | None, log: KernelLog) -> bool:
    """Whether an event is older than the last reset of its GPU, or than the last start of the driver."""
    short = (device or "").partition(".")[0]
    return any(line < reset.line for reset in log.resets if reset.device in (None, short))


def _judge_event(event: KernelEvent, device: str | None, log: KernelLog) -> Finding | None:
    """Finding about a message without an Xid; None: it is of no concern."""
    rule = EVENTS[event.kind]
    if event.kind in ("gpu_init_failed", "pcie_uncorrected") and _before_reset(event.line, event.device, log):
        return None
    if rule.least > event.count:
        return None
    times = f" {event.count} times" if event.count > 1 else ""
    reason = f"{rule.meaning}{times}: {event.text}"
    values = {"kind": event.kind, "count": event.count, "first": event.first, "last": event.last}
    say = warn if rule.severity == "warn" or (event.fatal is False and event.kind == "machine_check") else fail
    return say(reason, action=rule.action, device=device, **values)


def _same(device: str | None, bus: str) -> bool:
    return device is not None and (device == bus or bus.startswith(f"{device}."))


def _judge_sxid(sxid: Sxid, meaning: Meaning) -> Finding:
    values = {"sxid": sxid.code, "count": sxid.count, "first": sxid.first, "last": sxid.last, "source": meaning.source}
    values |= {"text": sxid.text, "link": sxid.link}
    times = f" {sxid.count} times" if sxid.count > 1 else ""
    return _finding(f"SXid {sxid.code}{times}: {meaning.meaning}", meaning, f"nvswitch {sxid.device}", values)


def _finding(reason: str, meaning: Meaning, device: str, values: Mapping[str, object]) -> Finding:
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
        unknown = Meaning(meaning="named by the profile", severity="warn", action="look it up", source="the profile")
        rows[int(code)] = replace(rows.get(int(code), unknown), severity=cast(Severity, severity))
    return Catalog(xids=rows, sxids=catalog.sxids)


def _read_log(host: Host) -> tuple[str, str, str]:
    """First log that reaches back to the boot, else the first readable one: its name, its text, the trouble."""
    best, troubles = ("", ""), []
    for name, ask in _sources(host):
        try:
            raw = ask()
            if raw and not raw.endswith("\n"):
                raise HostError(f"{name} was cut short")  # what followed may be the fault
            text = _since_boot(raw)
        except HostError as wrong:
            troubles.append(str(wrong))
            continue
        if not text:
            troubles.append(f"{name} is empty")
        elif BOOT in text:
            return name, text, ""
        best = best if best[1] else (name, text)
    return best[0], best[1], "; ".join(troubles)


def _sources(host: Host) -> Iterator[tuple[str, Callable[[], str]]]:
    def run(argv: tuple[str, ...]) -> str:
        ran = host.run(*argv)
        if ran.exit_code:
            said = " ".join((ran.stderr or ran.stdout).split())[:120]
            raise HostError(f"{argv[0]} ended with {ran.exit_code}: {said}")
        return ran.stdout

    for argv in _COMMANDS:
        yield argv[0], functools.partial(run, argv)
    for path in _FILES:
        yield path, functools.partial(host.read, path)


def _since_boot(text: str) -> str:
    """A file may hold many boots; only what follows the last one counts. Lines with -- are journalctl's own."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("-- ")]
    start = max((number for number, line in enumerate(lines) if BOOT in line), default=0)
    return "\n".join(lines[start:])


def _read_site(host: Host) -> str | None:
    try:
        return host.read(SITE)
    except (FileMissing, NotCaptured):
        return None
