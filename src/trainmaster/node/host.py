"""The machine: the only runner of commands and the only reader of /proc and /sys.

A check reads the machine through the six methods of `Host` (run, read, list, disk, env, kernel_clock) alone, so a
machine can be captured, replayed and judged again elsewhere (node/recorded.py). An unanswered read is a HostError with
its reason; no answer is ever invented.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainmaster.core.errors import CommandMissing, CommandTimedOut, FileMissing, FileUnreadable, HostError

MAX_OUTPUT_BYTES = 16 << 20  # of each stream; `nvidia-smi -q -x` of 16 GPUs is under 1 MiB
MAX_FILE_BYTES = 4 << 20
_POLL_S = 0.05  # poll interval for a command whose pipes another process still holds
_REAP_S = 2.0  # a killed process that survives this hangs in the kernel

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """Result of a command that ended by itself."""

    argv: tuple[str, ...]
    exit_code: int  # negative: the signal that ended it
    stdout: str
    stderr: str
    took_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """The file system that holds a path, as an ordinary user may use it."""

    total_bytes: int
    free_bytes: int
    free_files: int | None  # None where the file system does not count them


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelClock:
    """State of the kernel's clock (adjtimex): whether a time service steers it, and its error bound."""

    synchronised: bool
    max_error_s: float


class Host:
    """This machine. `env` adds variables of the coming workload that this process lacks."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = {**os.environ, **(env or {})}

    def run(self, *argv: str, timeout_s: float = 30.0) -> CommandResult:
        """Run a program to its end. A non-zero exit is an answer; a timeout kills its process group and raises.

        `python` stands for the current interpreter, so that a probe is recorded under one name on every machine.
        """
        return _run(argv, timeout_s, self._env)

    def read(self, path: str) -> str:
        """The text of a file."""
        try:
            with Path(path).open("rb", buffering=0) as file:
                # In small chunks: for /proc/sys the kernel allocates the requested size.
                raw = bytearray()
                while bite := file.read(1 << 16):
                    raw += bite
                    if len(raw) > MAX_FILE_BYTES:
                        raise FileUnreadable(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
        except OSError as error:
            raise _unreadable(path, error) from None
        return raw.decode("utf-8", errors="replace")

    def list(self, path: str) -> tuple[str, ...]:
        """The names in a folder, sorted."""
        try:
            return tuple(sorted(entry.name for entry in Path(path).iterdir()))
        except OSError as error:
            raise _unreadable(path, error) from None

    def disk(self, path: str) -> Disk:
        """Usage of the file system of an existing path."""
        try:
            stat = os.statvfs(path)
        except OSError as error:
            raise _unreadable(path, error) from None
        return Disk(
            total_bytes=stat.f_blocks * stat.f_frsize,
            free_bytes=stat.f_bavail * stat.f_frsize,
            free_files=stat.f_favail if stat.f_files else None,
        )

    def env(self, name: str) -> str | None:
        """One environment variable."""
        return self._env.get(name)

    def kernel_clock(self) -> KernelClock:
        """The state of the kernel's clock. Works inside containers, which share it."""
        return _adjtimex()

    def hostname(self) -> str:
        return self.read("/proc/sys/kernel/hostname").strip()

    def cpus(self) -> int:
        """CPUs this process may be scheduled on. A quota may allow less time than that (node/cgroup.py)."""
        allowed = _field(self.read("/proc/self/status"), "Cpus_allowed_list")
        # The mask of a virtual machine names CPUs that could be plugged in; only those online run anything.
        online = self.read("/sys/devices/system/cpu/online")
        return len(_numbers(allowed) & _numbers(online))


class Snapshot(Host):
    """A cached view of a machine: repeated reads give the same answer, errors included.

    So two checks judge the same moment, a capture replays to the same findings, and a hung program costs its timeout
    once instead of once per check.
    """

    def __init__(self, inner: Host) -> None:
        super().__init__()
        self._inner = inner
        self._mutex = threading.Lock()
        # One lock per read: a check that hangs in one is abandoned, and must not block the others.
        self._locks: dict[Hashable, threading.Lock] = {}
        self._answers: dict[Hashable, Any] = {}

    def run(self, *argv: str, timeout_s: float = 30.0) -> CommandResult:
        return self._once("run", argv, lambda: self._inner.run(*argv, timeout_s=timeout_s))

    def read(self, path: str) -> str:
        return self._once("read", path, lambda: self._inner.read(path))

    def list(self, path: str) -> tuple[str, ...]:
        return self._once("list", path, lambda: self._inner.list(path))

    def disk(self, path: str) -> Disk:
        return self._once("disk", path, lambda: self._inner.disk(path))

    def env(self, name: str) -> str | None:
        return self._once("env", name, lambda: self._inner.env(name))

    def kernel_clock(self) -> KernelClock:
        return self._once("clock", "", self._inner.kernel_clock)

    def _once(self, kind: str, key: Any, read: Callable[[], T]) -> T:
        with self._mutex:
            lock = self._locks.setdefault((kind, key), threading.Lock())
        with lock:
            if (kind, key) not in self._answers:
                answer: T | HostError
                try:
                    answer = read()
                except HostError as error:
                    answer = error
                self._keep(kind, key, answer)
                self._answers[kind, key] = answer
            held: T | HostError = self._answers[kind, key]
        if isinstance(held, HostError):
            raise held
        return held

    def _keep(self, kind: str, key: Any, answer: object) -> None:
        """Hook for a capture to record the answer."""


def _run(argv: tuple[str, ...], timeout_s: float, env: Mapping[str, str]) -> CommandResult:
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            (sys.executable, *argv[1:]) if argv[0] == "python" else argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a process group of its own, so that its children die with it
            env={**env, "LC_ALL": "C"},  # parsers read English
        )
    except FileNotFoundError:
        raise CommandMissing(f"{argv[0]} is not on this machine") from None
    except (OSError, ValueError) as error:
        raise HostError(f"{argv[0]} could not be started: {error}") from None
    try:
        out, err = _collect(process, started + timeout_s)
    except TimeoutError:
        raise CommandTimedOut(f"{_show(argv)} gave no answer in {timeout_s:g} s and was killed") from None
    except OverflowError:
        raise HostError(f"{_show(argv)} wrote more than {MAX_OUTPUT_BYTES >> 20} MiB and was killed") from None
    finally:
        _end(process)
    return CommandResult(
        argv=argv,
        exit_code=process.returncode,
        stdout=out.decode("utf-8", errors="replace"),
        stderr=err.decode("utf-8", errors="replace"),
        took_s=time.monotonic() - started,
    )


def _collect(process: subprocess.Popen[bytes], deadline: float) -> tuple[bytes, bytes]:
    """Both streams until the program ends, without waiting for grandchildren that keep them open."""
    assert process.stdout is not None
    assert process.stderr is not None
    kept = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    with selectors.DefaultSelector() as selector:
        for fd in kept:
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ)
        ended = False
        while selector.get_map() and not ended:
            # Asked before the pipes are drained: what it wrote before its end is in them by then.
            ended = _has_ended(process.pid)
            left = deadline - time.monotonic()
            if left <= 0 and not ended:
                raise TimeoutError
            for key, _ in selector.select(0 if ended else min(left, _POLL_S)):
                if _drain(key.fd, kept[key.fd]):
                    selector.unregister(key.fd)
    while not _has_ended(process.pid):
        if time.monotonic() >= deadline:
            raise TimeoutError
        time.sleep(0.001)
    return bytes(kept[process.stdout.fileno()]), bytes(kept[process.stderr.fileno()])


def _drain(fd: int, into: bytearray) -> bool:
    """Read what is available; True at the end of the stream."""
    while True:
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            return True
        into += chunk
        if len(into) > MAX_OUTPUT_BYTES:
            raise OverflowError


def _has_ended(pid: int) -> bool:
    # WNOWAIT leaves it unreaped, so that its number, which is also its group's, cannot pass to another process.
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the rest of its process group, close the pipes, and reap it if the kernel releases it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=_REAP_S)


def _unreadable(path: str, error: OSError) -> FileUnreadable:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return FileMissing(f"{path} is not there")
    return FileUnreadable(f"{path} cannot be read: {error.strerror or error}", code=error.errno)


def _show(argv: tuple[str, ...]) -> str:
    return " ".join(argv)[:200]


def _field(status: str, name: str) -> str:
    for line in status.splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value.strip()
    raise HostError(f"/proc/self/status has no {name}")


def _numbers(text: str) -> set[int]:
    """The kernel's list format: `0-3,8` is {0, 1, 2, 3, 8}."""
    part = r"\d{1,6}(-\d{1,6})?"
    if not re.fullmatch(rf"{part}(,{part})*", text.strip(), flags=re.ASCII):
        raise HostError(f"{text.strip()[:80]!r} is not a list of CPUs")
    numbers: set[int] = set()
    for piece in text.strip().split(","):
        first, _, last = piece.partition("-")
        if int(last or first) < int(first):
            raise HostError(f"{text.strip()[:80]!r} is not a list of CPUs")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


class _Timex(ctypes.Structure):
    """struct timex of Linux; the rest of it is not read, but the kernel writes it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),  # microseconds
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


_STA_UNSYNC = 0x40
_TIME_ERROR = 5


def _adjtimex() -> KernelClock:
    try:
        call = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        raise HostError("this system has no adjtimex") from None
    timex = _Timex(modes=0)  # no mode: reads, changes nothing, needs no right
    state = call(ctypes.byref(timex))
    if state < 0:
        raise HostError(f"the kernel does not tell the state of its clock: {os.strerror(ctypes.get_errno())}")
    synchronised = state != _TIME_ERROR and not timex.status & _STA_UNSYNC
    return KernelClock(synchronised=synchronised, max_error_s=timex.maxerror / 1e6)
