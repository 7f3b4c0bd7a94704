"""The CPUs are free before the work starts. Foreign load starves data loaders, and one slow rank slows every rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trainmaster.checks import system_files
from trainmaster.core.errors import HostError
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, fail, ok, skip, warn
from trainmaster.node.host import Host

LEVEL = 1
GPU = False
EXPECTS = ("load_per_cpu",)
COMPARES = ()
METRICS = {"system.cpu.usage_percent": "usage_percent"}
# CPU times twice, a quarter of a second apart: one question, so that a capture replays the difference.
USAGE = ("sh", "-c", "head -n 1 /proc/stat; sleep 0.25; head -n 1 /proc/stat")
WARN_PER_CPU = 1.0  # every CPU is busy already: the job waits for CPU time


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    one_minute: float
    five_minutes: float
    cpus: int  # online in the whole machine, as the load is the whole machine's
    gpus: bool
    usage_percent: float | None = None  # CPU time that was not idle; None where it could not be asked


def read(host: Host) -> Load:
    text = host.read("/proc/loadavg")
    match = re.match(r"(\d+\.\d+) (\d+\.\d+) \d+\.\d+ ", text, flags=re.ASCII)
    if not match:
        raise HostError(f"/proc/loadavg cannot be understood: {text.strip()[:80]!r}")
    cpus = len(system_files.parse_numbers(host.read("/sys/devices/system/cpu/online")))
    if not cpus:
        raise HostError("the kernel shows no CPU online")
    return Load(
        one_minute=float(match[1]),
        five_minutes=float(match[2]),
        cpus=cpus,
        gpus=system_files.has_gpus(host),
        usage_percent=_read_usage(host),
    )


def _read_usage(host: Host) -> float | None:
    try:
        result = host.run(*USAGE)
    except HostError:
        return None
    rows = [re.fullmatch(r"cpu +((?:\d{1,20} ?){8,10})", line, flags=re.ASCII) for line in result.stdout.splitlines()]
    times = [[int(word) for word in row[1].split()] for row in rows if row is not None]
    if len(times) != 2 or len(rows) != 2 or len(times[0]) != len(times[1]):
        raise HostError(f"the CPU times of /proc/stat cannot be understood: {result.stdout.strip()[:80]!r}")
    # Guest time (the last two) is counted in user time already.
    spent = [after - before for before, after in zip(*times, strict=True)][:8]
    total, idle = sum(spent), spent[3] + spent[4]
    return round(100.0 * (total - idle) / total, 1) if total > 0 and 0 <= idle <= total else None


def judge(load: Load, expect: Expect) -> Finding:
    # The smaller one: neither a burst of this minute nor a job that has just ended is foreign load.
    steady = min(load.one_minute, load.five_minutes)
    summary = f"load {steady:g} on {load.cpus} CPUs"
    values: dict[str, Any] = {"load_1m": load.one_minute, "load_5m": load.five_minutes, "cpus": load.cpus}
    values["usage_percent"] = load.usage_percent
    action = "end what else runs here (`top`), or give the job a node of its own"
    if expect.load_per_cpu is not None:
        if steady > expect.load_per_cpu * load.cpus:
            return fail(f"{summary}, more than {expect.load_per_cpu:g} per CPU", action=action, **values)
        return ok(summary, **values)
    if not load.gpus:
        return skip(f"{summary}; no GPU here and no limit is stated", proof="/dev has no nvidia device", **values)
    if steady > WARN_PER_CPU * load.cpus:
        return warn(f"{summary} before the work starts", action=action, **values)
    return ok(summary, **values)
