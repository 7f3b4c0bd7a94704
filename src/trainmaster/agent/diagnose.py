"""Diagnosis of a failed rank, from its exit code and its last lines."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainmaster.core.errors import HostError
from trainmaster.core.plan import EXIT_REASONS, rank_log
from trainmaster.core.states import Reason
from trainmaster.node.host import Host

EVIDENCE_LINES = 40
_SEARCHED_BYTES = 64 * 1024  # an NCCL abort prints its reason above a hundred lines of stack
_LINE_CHARACTERS = 500
_ROOM_BYTES = 64 * 1024  # less is a full disk: file systems keep a few blocks they cannot hand out

# In order: the first that is found names the reason. Causes stand before the symptoms they bring about, because a rank
# that runs out of memory also closes its connections.
PATTERNS: tuple[tuple[str, Reason], ...] = (
    (r"\bout of memory: rank \d+ ", Reason.OUT_OF_MEMORY),  # train/watch/oom.py, which says what to change
    (r"CUDA out of memory", Reason.OUT_OF_MEMORY),  # c10/cuda/CUDACachingAllocator.cpp
    (r"CUDA error: out of memory", Reason.OUT_OF_MEMORY),  # cudaGetErrorString(cudaErrorMemoryAllocation)
    (r"Cuda failure (\d+ )?'out of memory'", Reason.OUT_OF_MEMORY),  # NCCL, src/include/checks.h
    (r"DefaultCPUAllocator: (not enough|can't allocate) memory", Reason.OUT_OF_MEMORY),  # c10/core/impl/alloc_cpu.cpp
    (r"^MemoryError\b", Reason.OUT_OF_MEMORY),  # CPython
    (r"numpy.*_ArrayMemoryError", Reason.OUT_OF_MEMORY),  # numpy/_core/_exceptions.py
    (r"std::bad_alloc", Reason.OUT_OF_MEMORY),  # C++ new
    (r"Cannot allocate memory", Reason.OUT_OF_MEMORY),  # strerror(ENOMEM)
    (r"workers are out of shared memory", Reason.OUT_OF_MEMORY),  # torch/csrc/DataLoader.cpp
    (r"No space left on device", Reason.DISK_FULL),  # strerror(ENOSPC)
    (r"Disk quota exceeded", Reason.DISK_FULL),  # strerror(EDQUOT)
    (r"uncorrectable ECC error encountered", Reason.NODE_LOST),  # cudaGetErrorString(cudaErrorECCUncorrectable)
    (r"uncorrectable NVLink error", Reason.NODE_LOST),  # cudaGetErrorString(cudaErrorNvlinkUncorrectable)
    # The port that was free a moment ago is taken: torch/csrc/distributed/c10d/socket.cpp
    (r"server socket has failed to listen on any local network address", Reason.TARGET_ERROR),
    (
        r"\bhang: (rank \d+ |all \d+ ranks )",
        Reason.COLLECTIVE_TIMEOUT,
    ),  # train/watch/hang.py, which names the missing ranks
    (r"Watchdog caught collective operation timeout", Reason.COLLECTIVE_TIMEOUT),  # c10d/ProcessGroupNCCL.cpp
    (r"Timed out waiting \d+ms for (recv|send) operation", Reason.COLLECTIVE_TIMEOUT),  # gloo/transport/tcp
    (r"Connection closed by peer", Reason.COLLECTIVE_TIMEOUT),  # gloo/transport/tcp/pair.cc, NCCL src/misc/socket.cc
    (r"gloo/.*Connection reset by peer", Reason.COLLECTIVE_TIMEOUT),  # gloo/transport/tcp/pair.cc
    (r"ncclRemoteError", Reason.COLLECTIVE_TIMEOUT),  # c10d/NCCLUtils.hpp: a peer went away
    (r"wait timeout after \d+ms, keys:", Reason.COLLECTIVE_TIMEOUT),  # c10d/TCPStore.cpp
    (r"Timed out after \d+ seconds waiting for clients", Reason.COLLECTIVE_TIMEOUT),  # c10d/TCPStore.cpp
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of an attempt: the exit record without its date."""

    reason: Reason | None  # None when it did what it was asked
    message: str = ""
    exit_codes: Mapping[str, int] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    resumable: bool = False


def judge(*, rank: int, ranks: int, code: int, lines: list[str], oom_kills: int, full: str | None = None) -> Outcome:
    """Outcome of a failed rank.

    `lines` end its log, masked; `oom_kills` counts those in our control group since the start; `full` is a folder of
    the attempt whose disk is full, which a rank cannot say itself when its log lies on that disk too.
    """
    shown = [line[:_LINE_CHARACTERS] for line in lines[-EVIDENCE_LINES:]]
    evidence: dict[str, Any] = {"rank": rank, "exit_code": code, "log": rank_log(rank), "last_lines": shown}
    ended = f"exited with {code}"
    if code < 0:
        evidence["signal"] = _signal_name(-code)
        ended = f"was killed by {evidence['signal']}"
    reason, cause = Reason.SCRIPT_FAILED, ""
    if code in EXIT_REASONS:
        reason = EXIT_REASONS[code]
    elif code == -signal.SIGKILL and oom_kills:
        reason, cause = Reason.OUT_OF_MEMORY, "the kernel's out-of-memory killer acted in this control group"
        evidence["oom_kills"] = oom_kills
    elif match := _first_match(lines):
        reason, cause = match
    elif full is not None:
        reason, cause = Reason.DISK_FULL, f"no space is left where {full} is"
    said = cause or next((line for line in reversed(shown) if line.strip()), "it printed nothing")
    if cause:
        evidence["cause"] = cause[:_LINE_CHARACTERS]
    message = f"rank {rank} of {ranks} {ended}: {said.strip()[:_LINE_CHARACTERS]}"
    return Outcome(reason=reason, message=message, evidence=evidence)


def _first_match(lines: list[str]) -> tuple[Reason, str] | None:
    for pattern, reason in PATTERNS:
        found = re.compile(pattern)
        for line in reversed(lines):
            if found.search(line):
                return reason, line.strip()
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def read_tail(path: Path) -> list[str]:
    """The last lines of a log, however large it is; none where there is no log."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _SEARCHED_BYTES)
            file.seek(start)
            text = file.read()
            if start:  # half a line could hold half a secret, which no mask would know
                text = text.partition(b"\n")[2]
            return text.decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []


def find_full(folders: Iterable[str]) -> str | None:
    """The first of the folders whose disk has no room for another line."""
    for folder in folders:
        with contextlib.suppress(OSError):
            disk = os.statvfs(folder)
            if disk.f_bavail * disk.f_frsize < _ROOM_BYTES:
                return folder
    return None


def count_oom_kills(host: Host) -> int:
    """How often the kernel's out-of-memory killer acted in our control group; in the machine, where that is hidden."""
    for path in (*_memory_groups(host), "/proc/vmstat"):
        try:
            words = dict(line.split(maxsplit=1) for line in host.read(path).splitlines())
            return int(words["oom_kill"])
        except (HostError, ValueError, KeyError):
            continue
    return 0


def _memory_groups(host: Host) -> Iterable[str]:
    try:
        groups = host.read("/proc/self/cgroup").splitlines()
    except HostError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            yield f"/sys/fs/cgroup{path}/memory.events"
        elif "memory" in controllers.split(","):  # version 1
            yield f"/sys/fs/cgroup/memory{path}/memory.oom_control"


# A name whose word ends in one of these; TOKENIZERS_PARALLELISM does not.
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(_|\d|$)")


def mask(value: Any, environments: Iterable[Mapping[str, str]]) -> Any:
    """The same data without the values of environment variables whose names look secret."""
    secrets = set()
    for environment in environments:
        for name, secret in environment.items():
            if _SECRET_NAME.search(name.upper()):
                # A key of several lines reaches a log line by line. Three characters hide nothing and spoil every line.
                secrets |= {part.strip() for part in (secret, *secret.splitlines()) if len(part.strip()) > 3}
    ordered = sorted(secrets, key=len, reverse=True)  # a secret inside a longer one must not leave its rest behind
    return _masked(value, ordered) if ordered else value


def _masked(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "***")
        return value
    if isinstance(value, Mapping):
        return {key: _masked(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(item, secrets) for item in value]
    return value
