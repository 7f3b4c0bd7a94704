"""CPU seconds of each test, its processes included: `TRAINMASTER_CPU_TIMES=FILE make test`.

One line of JSON for each test as it ends, from every worker. `python tests/cpu_times.py FILE` prints the table of
files, with `--tests` that of tests, the cases of one added up. What a shared fixture starts is charged to the test that
runs when it computes. Root counts by a control group of its own, which misses containers alone.
Elsewhere counted are this process, the children it has waited for, and every living process that descends from it or
carries its mark in the environment (daemons): what nobody waited for and has ended is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

VARIABLE = "TRAINMASTER_CPU_TIMES"
_MARK = "TRAINMASTER_CPU_TIMES_OF"  # set to this process's number, and inherited by all that it starts
_TICKS = os.sysconf("SC_CLK_TCK")


class Group:
    """CPU seconds of a control group with this process and everything it will start."""

    def __init__(self, parent: Path) -> None:
        folder = parent / f"trainmaster-tests-{os.getpid()}"
        folder.mkdir()
        self._first, self._second = folder / "cpuacct.usage", folder / "cpu.stat"  # version 1 of cgroups, and version 2
        self._before = sum(os.times()[:4])
        (folder / "cgroup.procs").write_text(str(os.getpid()))

    def read(self) -> float:
        if self._first.exists():
            return self._before + int(self._first.read_text()) / 1e9
        return self._before + int(self._second.read_text().split()[1]) / 1e6  # "usage_usec 1234", then others


class Descendants:
    """CPU seconds that this process and everything it started has used, as far as it can be seen."""

    def __init__(self) -> None:
        self._mark = f"{_MARK}={os.getpid()}\0".encode()
        self._gone: dict[tuple[int, int], float] = {}  # daemons that nobody of ours waits for, as last seen
        os.environ[_MARK] = str(os.getpid())

    def read(self) -> float:
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        children, orphans = self._living()
        self._gone |= orphans
        return sum(used.ru_utime + used.ru_stime for used in own) + children + sum(self._gone.values())

    def _living(self) -> tuple[float, dict[tuple[int, int], float]]:
        """Seconds of the living descendants; and of each daemon, by process number and start."""
        facts: dict[int, tuple[int, int, float]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                words = path.read_text(errors="replace").rpartition(")")[2].split()
                facts[int(path.parent.name)] = (int(words[1]), int(words[19]), sum(map(int, words[11:15])) / _TICKS)
        children, orphans = 0.0, {}
        for pid, (_, begun, seconds) in facts.items():
            line = _ancestors(pid, facts)
            if os.getpid() in line:
                children += seconds
            elif pid != os.getpid() and self._is_marked(pid):
                orphans[(pid, begun)] = seconds
        return children, orphans

    def _is_marked(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes()
        return False


def meter() -> Group | Descendants:
    for parent in (Path("/sys/fs/cgroup/cpuacct"), Path("/sys/fs/cgroup")):
        if (parent / "cgroup.procs").exists():
            with contextlib.suppress(OSError):
                return Group(parent)
    return Descendants()


def _ancestors(pid: int, facts: dict[int, tuple[int, int, float]]) -> list[int]:
    line: list[int] = []
    while pid in facts and pid not in line:
        line.append(pid)
        pid = facts[pid][0]
    return [*line[1:], pid]


class Recorder:
    """Writes one line for each test that this process has run, and one for what came before the first."""

    def __init__(self, path: Path) -> None:
        self._path, self._meter = path, meter()
        self._begun, self._cpu = time.monotonic(), 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self._write("imports and collection")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None):  # type: ignore[no-untyped-def]
        try:
            return (yield)
        finally:
            self._write(item.nodeid)

    def _write(self, test: str) -> None:
        cpu, now = self._meter.read(), time.monotonic()
        line = {"test": test, "cpu_s": round(cpu - self._cpu, 3), "wall_s": round(now - self._begun, 3)}
        with self._path.open("a") as out:  # one short write: lines of several workers do not mix
            out.write(json.dumps(line) + "\n")
        self._begun, self._cpu = now, cpu


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get(VARIABLE):
        config.pluginmanager.register(Recorder(Path(path)), "cpu-times")


def table(lines: list[str], *, top: int, end: str) -> str:
    """The dearest files and the sum, as rows of Markdown; a row is named by a test's name up to `end`."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for line in lines:
        one = json.loads(line)
        row = sums[one["test"].partition(end)[0]]
        for place, value in enumerate((one["cpu_s"], one["wall_s"], 1)):
            row[place] += value
    rows = sorted(sums.items(), key=lambda row: -row[1][0])
    total = [sum(column) for column in zip(*sums.values(), strict=True)]
    shown = [*rows[:top], (f"all {len(rows)}", total)]
    text = [f"| {name} | {cpu:.1f} | {wall:.1f} | {count:.0f} |" for name, (cpu, wall, count) in shown]
    return "\n".join(["| where | CPU s | wall s | tests |", "|---|---|---|---|", *text])


if __name__ == "__main__":
    each = "--tests" in sys.argv
    words = [word for word in sys.argv[1:] if word != "--tests"]
    top = int(words[1]) if len(words) > 1 else 25
    print(table(Path(words[0]).read_text().splitlines(), top=top, end="[" if each else "::"))
