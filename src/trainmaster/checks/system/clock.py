"""The clock is synchronised by a time service. Tokens, certificates and the order of log lines depend on it.

The kernel knows whether its clock is synchronised and bounds the error; chrony and ntpd know the offset. An
unsynchronised clock is a warning where a time service is installed. Where none is installed (a container, a sandbox
whose hypervisor sets the clock) the check skips unless an offset is expected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trainmaster.core.errors import CommandMissing, HostError, NotCaptured
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, error, fail, ok, skip, warn
from trainmaster.node.host import Host, KernelClock

LEVEL = 1
GPU = False
EXPECTS = ("clock_offset_s",)
COMPARES = ()
METRICS: dict[str, str] = {}
# A service that works holds milliseconds; above a tenth of a second the lines of two nodes stand in the wrong order.
WARN_S = 0.1
FAIL_S = 300.0  # Kerberos refuses tickets from here on, and object stores signatures soon after
_ACTION = "start chronyd or systemd-timesyncd on the node and let it reach its servers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    kernel: KernelClock | None
    service: str | None  # the time service that answered
    synchronised: bool | None  # by that service's word
    offset_s: float | None
    unread: str | None = None  # a tool that answered with exit code 0 and no readable text
    silent: tuple[str, ...] = ()  # why each tool gave no answer


def read(host: Host) -> Clock:
    kernel = None
    try:
        kernel = host.kernel_clock()
    except NotCaptured:
        raise
    except HostError:
        pass  # seccomp may forbid it; a service may still answer
    silent = []
    for argv, parse in (
        (("chronyc", "-c", "tracking"), parse_chronyc),
        (("ntpq", "-c", "rv"), parse_ntpq),
        (("timedatectl", "show"), parse_timedatectl),
    ):
        text, cause = _run_tool(host, *argv)
        silent += [cause] if cause is not None else []
        state = parse(text) if text is not None else None
        if text is not None and state is None:
            return Clock(kernel=kernel, service=None, synchronised=None, offset_s=None, unread=argv[0])
        if state is not None:
            return Clock(kernel=kernel, service=argv[0], synchronised=state[0], offset_s=state[1])
    return Clock(kernel=kernel, service=None, synchronised=None, offset_s=None, silent=tuple(silent))


def judge(clock: Clock, expect: Expect) -> Finding:
    steered = bool(clock.synchronised or (clock.kernel and clock.kernel.synchronised))
    bound = clock.kernel.max_error_s if clock.kernel and clock.kernel.synchronised else None
    values: dict[str, Any] = {"service": clock.service, "offset_s": clock.offset_s, "max_error_s": bound}
    if clock.unread is not None:
        return error(f"{clock.unread} gives no readable answer", action="run it by hand", **values)
    if not steered:
        if clock.kernel is None and clock.service is None:
            return error(
                "neither the kernel nor a time service reports the state of the clock", action=_ACTION, **values
            )
        if clock.service is None:
            why = ", ".join(clock.silent) or "none was asked"
            reason = f"no time service answers here ({why}), and the kernel's clock is not steered"
            if expect.clock_offset_s is None:
                return skip(reason, proof=f"{why}; the kernel reports an unsynchronised clock (adjtimex)", **values)
            return error(f"{reason}: its offset cannot be known", action=_ACTION, **values)
        reason = f"{clock.service} says that the clock is not synchronised"
        return (warn if expect.clock_offset_s is None else fail)(reason, action=_ACTION, **values)
    if expect.clock_offset_s is None:
        return _judge_offset(clock.offset_s, values)
    # Without a measured offset the kernel's bound may still prove it small enough.
    off = abs(clock.offset_s) if clock.offset_s is not None else bound
    if off is not None and off <= expect.clock_offset_s:
        return ok(f"at most {off:.6f} s off", **values)
    if clock.offset_s is None:
        return error("synchronised, but nothing here tells the offset", action="install chrony", **values)
    return fail(f"{off:.6f} s off, more than {expect.clock_offset_s:g} s", action=_ACTION, **values)


def _judge_offset(offset_s: float | None, values: dict[str, Any]) -> Finding:
    """The offset where no limit is stated."""
    if offset_s is None:
        return ok("synchronised", **values)
    summary = f"synchronised, {abs(offset_s):.6f} s off"
    if abs(offset_s) > WARN_S:
        # A service that is still steering it back, or cannot.
        return (fail if abs(offset_s) > FAIL_S else warn)(summary, action="step it: `chronyc makestep`", **values)
    return ok(summary, **values)


ServiceState = tuple[bool, float | None] | None


def parse_chronyc(text: str) -> ServiceState:
    """`chronyc -c tracking`: comma-separated; field 5 is the clock's offset in seconds, field 14 the leap status."""
    fields = text.strip().split(",")
    offset = _seconds(fields[4]) if len(fields) == 14 else None
    if offset is None or fields[13] not in ("Normal", "Insert second", "Delete second", "Not synchronised"):
        return None
    return (False, None) if fields[13] == "Not synchronised" else (True, offset)


def parse_ntpq(text: str) -> ServiceState:
    """`ntpq -c rv`: name=value pairs; offset in milliseconds, stratum 16 is "not synchronised"."""
    fields = dict(re.findall(r"\b(stratum|offset)=([-+.\d]+)", text))
    if "stratum" not in fields:
        return None
    offset_ms = _seconds(fields.get("offset", ""))
    return (False, None) if fields["stratum"] == "16" else (True, None if offset_ms is None else offset_ms / 1000)


def parse_timedatectl(text: str) -> ServiceState:
    """`timedatectl show`: NTPSynchronized is the kernel's flag; it knows no offset."""
    match = re.search(r"^NTPSynchronized=(yes|no)$", text, flags=re.MULTILINE)
    return (match[1] == "yes", None) if match else None


def _run_tool(host: Host, *argv: str) -> tuple[str | None, str | None]:
    """What a service's tool prints, or why there is no answer: no tool, or no service behind it."""
    try:
        result = host.run(*argv, timeout_s=10.0)
    except CommandMissing:
        return None, f"{argv[0]} is not installed"
    if result.exit_code:
        return None, f"{argv[0]} ended with {result.exit_code}"
    return result.stdout, None


def _seconds(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", text, flags=re.ASCII | re.IGNORECASE) else None
