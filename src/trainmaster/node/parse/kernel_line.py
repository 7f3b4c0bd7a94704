"""One line of a kernel log: its time, and whether the kernel itself wrote its message.

Programs write into the same log (/dev/kmsg, and syslog's own file), and some quote the kernel: a monitor that prints
"NVRM: Xid …" accuses no GPU. A line is the kernel's by its facility (0, where the form has one), by the word `kernel`
where the form names the sender, and otherwise if no program's name and process number stand before the message.
"""

from __future__ import annotations

import re

_CALLER = r"(?:\[\s*[TC]\d{1,10}\])?"  # thread or CPU, with CONFIG_PRINTK_CALLER
_UPTIME = r"\[\s*\d{1,12}\.\d{1,9}\]" + _CALLER
_START = re.compile(
    r"\s*(?:<(?P<priority>\d{1,3})>)?"
    r"(?:(?P<facility>[a-z0-9]{3,8})\s*:(?:emerg|alert|crit|err|warn|notice|info|debug)\s*: )?"  # dmesg --decode
    r"(?:"
    rf"\[\s*(?P<up>\d{{1,12}}\.\d{{1,9}})\]{_CALLER}"
    r"|\[(?P<human>[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4})\]"
    r"|(?P<iso>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?)"
    r"|(?P<old>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d)"
    r"|(?P<record>\d{1,6}),\d{1,18},(?P<kmsg>\d{1,18}),[^;]{1,40};"
    r")?\s*"
)
_KERNEL = re.compile(rf"(?:\S+ )?kernel: (?:{_UPTIME} ?)?")
# The name of a program and its process number, after a host or alone. Of a program that crashed the kernel itself
# writes so (show_signal_msg of arch/x86/mm/fault.c, arm64_show_signal).
_PROGRAM = re.compile(
    r"(?:\S+ )?[^\s:\[\]]{1,64}\[\d{1,10}\]: (?!segfault |trap |general protection|unhandled |undefined |bad frame)"
    r"|\S+ unknown: "  # journald: a record of /dev/kmsg without a name
)
_SENDER = re.compile(r"\S+ [^\s:]{1,64}: ")  # host and program of syslog
_QUOTES = re.compile(r"audit[:\[(]|(?:Kernel c|C)ommand line: ")  # the kernel's own lines that repeat another's words
# The kernel's first line. Its own clock has not started by then: a later line with these words is another program's.
_BOOT = re.compile(
    r"(?:<\d{1,3}>)?(?:\[\s*0\.\d+\](?:\[\s*[TC]\d+\])? (?:\S+ kernel: )?|\[[A-Z][^\]]{20,30}\] "
    r"|\d{1,6},\d{1,18},\d{1,6},[^;]{1,40};"
    r"|(?:[A-Z][a-z]{2} [ \d]\d [\d:]{8}|\d{4}-\d\d-\d\d\S{1,30}) \S+ kernel: (?:\[\s*0\.\d+\] )?)?Linux version \d"
)
# Begins a message, also in a line that another message was cut short in.
HEAD = rf"(?:^|{_UPTIME} ?)"


def is_boot(line: str) -> bool:
    """Whether a line is the first one that a kernel writes."""
    return _BOOT.match(line) is not None


def read_time(line: str) -> str | None:
    """The timestamp of a line, as written; seconds since boot for the forms that count from there."""
    match = _START.match(line)
    if match is None:
        return None
    if match["kmsg"]:
        return f"{int(match['kmsg']) / 1e6:.6f}"
    return match["up"] or match["human"] or match["iso"] or match["old"]


def read_message(line: str) -> str | None:
    """The kernel's own message in a line, without time, host and level; None: another program wrote it."""
    start = _START.match(line)
    assert start is not None  # every part of it is optional
    number = start["priority"] or start["record"]
    # Facility 0 is the kernel's, and no program can write it (devkmsg_write of kernel/printk/printk.c).
    if (number is not None and int(number) >> 3) or start["facility"] not in (None, "kern"):
        return None
    kernel = _KERNEL.match(line, start.end())
    if kernel is not None:
        return line[kernel.end() :]
    syslog = start["old"] or (start["iso"] and "," not in start["iso"])  # dmesg writes ISO times with a comma
    if _PROGRAM.match(line, start.end()) or (syslog and _SENDER.match(line, start.end())):
        return None
    message = line[start.end() :]
    return None if _QUOTES.match(message) else message
