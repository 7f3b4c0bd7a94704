"""The disk of the checkpoints takes and gives back data, whole and fast. A slow one makes every save a pause of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainmaster.core.errors import CommandTimedOut, HostError
from trainmaster.core.expect import Expect
from trainmaster.core.plan import CHECKPOINTS_VARIABLE
from trainmaster.core.results import Finding, fail, ok, warn
from trainmaster.node.host import Host
from trainmaster.node.parse import load_json, read_float

LEVEL = 2
GPU = False
EXPECTS = ("disk_write_mib_s", "disk_read_mib_s")
COMPARES = ()
METRICS: dict[str, str] = {}
TIMEOUT_S = 90.0
PROBE_TIMEOUT_S = 60.0  # the probe stops by itself after 20 s; one that does not hangs in the kernel
# A hard disk writes 100 MiB/s and more, the smallest cloud volume (AWS gp3) 125; below this something is wrong.
WARN_WRITE_MIB_S = 50.0
WARN_READ_MIB_S = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the probe measured, or why it could not."""

    path: str
    trouble: str | None = None
    intact: bool = False
    mib: float = 0.0
    write_mib_s: float = 0.0
    read_mib_s: float = 0.0


def read(host: Host) -> Rates:
    path = host.env(CHECKPOINTS_VARIABLE) or "."
    try:
        result = host.run("python", "-m", "trainmaster.node.probe_disk", path, timeout_s=PROBE_TIMEOUT_S)
    except CommandTimedOut:
        return Rates(path=path, trouble=f"it did not finish in {PROBE_TIMEOUT_S:g} s")
    try:
        report = load_json(result.stdout)
        if "error" in report:
            return Rates(path=path, trouble=str(report["error"]))
        if result.exit_code:
            raise ValueError(f"it ended with {result.exit_code}")
        return Rates(
            path=path,
            intact=report["intact"] is True,
            mib=_positive(report["mib"]),
            write_mib_s=_positive(report["write_mib_s"]),
            read_mib_s=_positive(report["read_mib_s"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        output = " ".join((result.stdout + " " + result.stderr).split())[-200:]
        raise HostError(f"the disk probe cannot be understood ({error}): {output}") from None


def judge(rates: Rates, expect: Expect) -> Finding:
    where = "the working folder" if rates.path == "." else rates.path
    if rates.trouble is not None:
        action = f"write a file there by hand (`dd if=/dev/zero of={rates.path}/x bs=1M count=64 conv=fsync`)"
        return fail(f"{where} cannot be written and read: {rates.trouble}", action=action, path=rates.path)
    values: dict[str, Any] = {
        "path": rates.path,
        "mib": rates.mib,
        "write_mib_s": rates.write_mib_s,
        "read_mib_s": rates.read_mib_s,
    }
    if not rates.intact:
        return fail(
            f"what was read from {where} is not what was written",
            action="replace the disk; trust no data on it",
            **values,
        )
    summary = f"{rates.write_mib_s:.0f} MiB/s written and {rates.read_mib_s:.0f} read at {where}"
    action = "see what else uses that disk (`iostat -x 1`), or put checkpoints on a faster one"
    for rate, least, word in (
        (rates.write_mib_s, expect.disk_write_mib_s, "write"),
        (rates.read_mib_s, expect.disk_read_mib_s, "read"),
    ):
        if least is not None and rate < least:
            return fail(f"{summary}; at least {least:g} to {word} is expected", action=action, **values)
    slow_write = expect.disk_write_mib_s is None and rates.write_mib_s < WARN_WRITE_MIB_S
    slow_read = expect.disk_read_mib_s is None and rates.read_mib_s < WARN_READ_MIB_S
    if slow_write or slow_read:
        return warn(summary, action=action, **values)
    return ok(summary, **values)


def _positive(value: object) -> float:
    number = read_float(value)
    if number is None or number <= 0:
        raise ValueError(f"{value!r:.40} is no rate")
    return number
