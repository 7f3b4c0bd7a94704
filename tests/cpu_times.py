"""CPU seconds of each test file, its processes included: `TRAINMASTER_CPU_TIMES=FILE make test`.

One line of JSON for each file as it ends, from every worker; `python tests/cpu_times.py FILE` prints the table. What a
shared fixture starts is charged to the file that runs when it computes. Counted are this process, the children it has
waited for, and every living process that descends from it or carries its mark in the environment (daemons).
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


class Meter:
    """CPU seconds that this process and everything it started has used."""

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


def _ancestors(pid: int, facts: dict[int, tuple[int, int, float]]) -> list[int]:
    line: list[int] = []
    while pid in facts and pid not in line:
        line.append(pid)
        pid = facts[pid][0]
    return [*line[1:], pid]


class Recorder:
    """Writes one line for each file of tests that this process has run."""

    def __init__(self, path: Path) -> None:
        self._path, self._meter = path, Meter()
        self._begun, self._cpu, self._tests = time.monotonic(), 0.0, 0  # the first file pays for the collection

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None):  # type: ignore[no-untyped-def]
        try:
            return (yield)
        finally:
            self._tests += 1
            if nextitem is None or nextitem.path != item.path:
                self._write(item.nodeid.partition("::")[0])

    def _write(self, file: str) -> None:
        cpu, now = self._meter.read(), time.monotonic()
        line = {"file": file, "cpu_s": cpu - self._cpu, "wall_s": now - self._begun, "tests": self._tests}
        with self._path.open("a") as out:  # one short write: lines of several workers do not mix
            out.write(json.dumps(line) + "\n")
        self._begun, self._cpu, self._tests = now, cpu, 0


def pytest_configure(config: pytest.Config) -> None:
    if path := os.environ.get(VARIABLE):
        config.pluginmanager.register(Recorder(Path(path)), "cpu-times")


def table(lines: list[str], *, top: int) -> str:
    """The dearest files and the sum, as rows of Markdown."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    for line in lines:
        one = json.loads(line)
        for place, key in enumerate(("cpu_s", "wall_s", "tests")):
            sums[one["file"]][place] += one[key]
    rows = sorted(sums.items(), key=lambda row: -row[1][0])
    total = [sum(column) for column in zip(*sums.values(), strict=True)]
    shown = [*rows[:top], (f"all {len(rows)} files", total)]
    text = [f"| {name} | {cpu:.0f} | {wall:.0f} | {tests:.0f} |" for name, (cpu, wall, tests) in shown]
    return "\n".join(["| file | CPU s | wall s | tests |", "|---|---|---|---|", *text])


if __name__ == "__main__":
    print(table(Path(sys.argv[1]).read_text().splitlines(), top=int(sys.argv[2]) if len(sys.argv) > 2 else 25))
