"""Processes of simulated instances, found by their environment, and those that a killed simulator left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

# In the environment of every process of an instance, with the instance's id.
MARK = "TRAINMASTER_SIM_INSTANCE"
_KILL_S = 10.0


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot: with the pid it names one process for ever. None: it is gone."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    return [child for child in _pids() if (fields := _stat(child)) and int(fields[1]) == pid]


def marked(ids: Iterable[str]) -> set[int]:
    """Live processes of these instances: those that carry the mark, their sshd, and all descendants of both.

    sshd overwrites its environment with its title. Its listener is known by its configuration file, and an sshd of a
    session by the marked program that it runs.
    """
    wanted = list(ids)
    marks = {f"{MARK}={name}".encode() for name in wanted}
    configs = [f"/{name}/sshd_config".encode() for name in wanted]
    parents = {pid: int(fields[1]) for pid in _pids() if (fields := _stat(pid))}
    titles = {pid: title for pid in parents if (title := _read(pid, "cmdline")).startswith(b"sshd: ")}
    pids = {pid for pid in parents if marks & set(_read(pid, "environ").split(b"\0"))}
    for pid in tuple(pids):
        while (pid := parents.get(pid, 0)) in titles:
            pids.add(pid)
    pids |= {pid for pid, title in titles.items() if any(config in title for config in configs)}
    while below := {pid for pid, parent in parents.items() if parent in pids} - pids:
        pids |= below
    return pids - {os.getpid()}


def kill_marked(ids: Iterable[str]) -> None:
    """Kill until these instances have no process."""
    wanted, until = list(ids), time.monotonic() + _KILL_S
    while wanted and (pids := marked(wanted)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            raise TimeoutError(f"processes {sorted(pids)} of simulated instances cannot be killed")
        time.sleep(0.01)


def record(folder: Path, pid: int) -> None:
    """Write down the first process of an instance, so that the next simulator can find it."""
    (folder / "process.json").write_text(json.dumps({"pid": pid, "start_time": start_time(pid)}))


def kill_recorded(folder: Path) -> None:
    """End the recorded first process of an instance, and with it all its descendants, if it still runs."""
    try:
        record = json.loads((folder / "process.json").read_text())
        pid, started = int(record["pid"]), record["start_time"]
    except (OSError, ValueError, KeyError, TypeError):
        return  # killed before it was written; the mark finds its processes
    until = time.monotonic() + _KILL_S
    while started is not None and start_time(pid) == started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} of a simulated instance does not end")
        time.sleep(0.01)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the state on; empty for a process that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []
    return [] if fields[:1] in ([b"Z"], [b"X"]) else fields
