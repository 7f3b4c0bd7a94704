"""The kernel log holds no GPU (Xid) or NVSwitch (SXid) error since boot that forbids work. Such a GPU fails again."""

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
from trainmaster.node.parse.kernel_log import KernelLog, Sxid, Xid
from trainmaster.node.parse.xid_catalog import Catalog, Meaning, Severity

LEVEL = 1
TIMEOUT_S = nvidia.CHECK_TIMEOUT_S + 60
SITE = "/etc/trainmaster/xid.toml"  # a site's own table, laid over ours
BOOT = "Linux version "  # the kernel's first line
_COMMANDS = (("dmesg",), ("journalctl", "-k", "-b", "--no-pager", "-o", "short-monotonic"))
_FILES = ("/var/log/kern.log", "/var/log/messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One log. `whole`: it reaches back to the boot. `log` None: none could be read, and `trouble` says why."""

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
    # Where nvidia-smi hangs, the log is the one witness left: read on.
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
    since = "since boot" if evidence.whole else "in what is left of the log"
    left = list(log.xids)
    for slot in slots:
        own = [xid for xid in left if slot.bus is not None and slot.bus.startswith(f"{xid.device}.")]
        left = [xid for xid in left if xid not in own]
        found = [_judge_xid(xid, catalog.of_xid(xid), slot.device) for xid in own]
        if found:
            yield from found
        elif slot.bus is None:
            yield nvidia.missing_gpu(slot)
        else:
            yield ok(f"no Xid {since} ({evidence.source})", device=slot.device, lines=log.lines)
    for xid in left:
        # A container sees the log of the whole node: another's GPU is another's trouble. A lost GPU is ours.
        if gpus.granted is None or any(slot.gpu is None for slot in slots):
            yield _judge_xid(xid, catalog.of_xid(xid), xid.device)
    for sxid in log.sxids:
        yield _judge_sxid(sxid, catalog.of_sxid(sxid))
    if log.faults:
        yield error(log.faults[0], action=f"read the kernel log by hand: {evidence.source}")


def _judge_xid(xid: Xid, meaning: Meaning, device: str) -> Finding:
    values = {"xid": xid.code, "count": xid.count, "first": xid.first, "last": xid.last, "source": meaning.source}
    values |= {"text": xid.text, "pid": xid.pid, "process": xid.process}
    times = f" {xid.count} times" if xid.count > 1 else ""
    return _finding(f"Xid {xid.code}{times}: {meaning.meaning}", meaning, device, values)


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
    """Our table, the site's file over it, and what `--expect xids=` says over both."""
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
    """The first log that reaches back to the boot, else the first that can be read: its name, its text, the trouble."""
    best, troubles = ("", ""), []
    for name, ask in _sources(host):
        try:
            text = _since_boot(ask())
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
