"""GPUs of this machine, and which processes use them: read from nvidia-smi, for the queue.

A slice of a GPU in MIG mode is a device of its own. A machine whose nvidia-smi fails is not one without GPUs: the
failure is reported, and nothing is started there. Unless the machine proves that it has none, as an instance without
GPUs whose image has the driver: no NVIDIA device on its PCI bus, and no device file of the driver.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from trainmaster.core.plan import ATTEMPT_VARIABLE

_SMI = "nvidia-smi"
_TIMEOUT_S = 30.0
_KILL_S = 2.0  # for a process that was killed to be gone
_ANSWER_S = 35.0  # for an answer: beyond the two above, so that their words come first
_THREAD = "ask nvidia-smi"
_HANGS = f"{_SMI} does not answer: it hangs, or its driver does"
# A GPU that nobody uses holds a few MiB for the driver. More than this, without a process that we can see, is one in
# another container.
_IDLE_MIB = 256
# What nvidia-smi prints where a product has no such value, as one without memory of its own. Any other word, as
# [Unknown Error], [GPU is lost] or ERR!, is a value that could not be read.
_NO_VALUE = frozenset({"[N/A]", "N/A", "[Not Supported]"})
_PCI, _DEV = Path("/sys/bus/pci/devices"), Path("/dev")
_NVIDIA = "0x10de"  # vendor in the PCI ID list
_DEVICE_FILE = re.compile(r"nvidia[0-9]+|dxg")  # dxg: GPUs of the Windows host, which are not on the bus
# In MIG mode the memory of the whole GPU is told to nobody but root.
_NOT_TOLD = frozenset({"[Insufficient Permissions]"})
_GPU = re.compile(r"GPU \d+: (?P<model>.*) \(UUID: (?P<uuid>GPU-[0-9a-fA-F-]+)\)")
_SLICE = re.compile(r"\s+MIG (?P<model>\S+)\s+Device\s+\d+: \(UUID: (?P<uuid>MIG-[^)\s]+)\)")


class DevicesUnknown(Exception):
    """nvidia-smi is there and does not answer as it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A device that CUDA_VISIBLE_DEVICES can name."""

    uuid: str
    model: str
    parent: str  # UUID of the GPU; its own unless it is a MIG slice
    users: tuple[tuple[str, str], ...] = ()  # (attempt or "", description) of each process on it


def read_gpus() -> list[Gpu]:
    """The GPUs of this machine; none where there is no nvidia-smi. DevicesUnknown where it fails."""
    if shutil.which(_SMI) is None:
        return []
    try:
        listed = parse_list(_run("-L"))
    except DevicesUnknown:
        if has_none():
            return []
        raise
    if not listed:
        return []
    apps = _run("--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits")
    memory = _run("--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits")
    return add_users(listed, apps, memory, find_attempt)


def has_none() -> bool:
    """Whether this machine proves that it has no GPU: without nvidia-smi, or without an NVIDIA device."""
    if shutil.which(_SMI) is None:
        return True
    try:
        vendors = [(device / "vendor").read_text().strip() for device in _PCI.iterdir()]
        files = [path.name for path in _DEV.iterdir() if _DEVICE_FILE.fullmatch(path.name)]
    except OSError:
        return False
    return bool(vendors) and _NVIDIA not in vendors and not files


def read_serials() -> list[str]:
    """Serial number of each GPU, else its UUID; none where nvidia-smi is missing, fails or hangs."""
    try:
        out = _run("--query-gpu=serial,uuid", "--format=csv,noheader")
    except DevicesUnknown:
        return []
    rows = [[word.strip() for word in line.split(",")] for line in out.splitlines()]
    words = [next((word for word in row if word and not word.startswith("[")), "") for row in rows]
    return [word for word in words if word]


def parse_list(text: str) -> list[Gpu]:
    """GPUs and MIG slices of `nvidia-smi -L`. A GPU with slices is given by them."""
    gpus: list[Gpu] = []
    for line in text.splitlines():
        if match := _GPU.match(line):
            gpus.append(Gpu(uuid=match["uuid"], model=match["model"], parent=match["uuid"]))
        elif (match := _SLICE.match(line)) and gpus:
            parent = gpus[-1].parent
            if gpus[-1].uuid == parent:
                gpus.pop()
            gpus.append(Gpu(uuid=match["uuid"], model=match["model"], parent=parent))
        elif line.strip() and not line.startswith(" "):
            raise DevicesUnknown(f"`{_SMI} -L` cannot be understood: {line.strip()[:200]}")
    return gpus


def add_users(gpus: list[Gpu], apps: str, memory: str, find: Callable[[int], str]) -> list[Gpu]:
    """The GPUs with the processes on each; a slice has those of its whole GPU where nvidia-smi names only that."""
    users: dict[str, list[tuple[str, str]]] = {}
    for line in filter(str.strip, apps.splitlines()):
        if line.startswith("WARNING:"):  # of the infoROM, behind the rows
            continue
        row = [word.strip() for word in line.split(",")]
        if len(row) != 3 or not row[0].startswith(("GPU-", "MIG-")):
            raise DevicesUnknown(f"the processes that {_SMI} lists cannot be understood: {line.strip()[:200]}")
        uuid, pid, used = row
        attempt = find(int(pid)) if pid.isdecimal() else ""
        users.setdefault(uuid, []).append((attempt, f"process {pid} holds {used} MiB"))
    held = {uuid.strip(): used.strip() for uuid, _, used in (line.partition(",") for line in memory.splitlines())}
    named = {uuid for uuid in users if uuid.startswith("MIG-")}
    seen = []
    for gpu in gpus:
        whole, used = gpu.uuid == gpu.parent, held.get(gpu.parent, "no answer")
        known = list(users.get(gpu.uuid if named or whole else gpu.parent, ()))
        if not used.isdecimal() and used not in (_NO_VALUE if whole else _NO_VALUE | _NOT_TOLD):
            known.append(("", f"its memory cannot be read: {used[:100]}"))
        elif whole and used.isdecimal() and int(used) > _IDLE_MIB and not known:
            known.append(("", f"{used} MiB are in use by no process that can be seen"))
        seen.append(replace(gpu, users=tuple(known)))
    return seen


def find_attempt(pid: int) -> str:
    """The attempt that a process belongs to; "" where it is none of ours, or not to be seen."""
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ""
    mark = f"{ATTEMPT_VARIABLE}=".encode()
    found = next((item[len(mark) :] for item in block.split(b"\0") if item.startswith(mark)), b"")
    return found.decode(errors="replace").partition("/")[0]


class _Asker:
    """Asks nvidia-smi in a thread of its own, one question at a time.

    A driver that hangs holds its callers in the kernel, where nothing ends them. Threads of the pool of asyncio would
    be lost one by one, until nothing else of this process runs; a daemon thread does not hold up its exit either.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answer: Future[list[Gpu]] | None = None
        self._since = 0.0

    def ask(self) -> Future[list[Gpu]]:
        """The answer to come, of the question under way where there is one. DevicesUnknown where that is too old."""
        with self._lock:
            if self._answer is None or self._answer.done():
                self._answer, self._since = Future(), time.monotonic()
                self._answer.set_running_or_notify_cancel()  # from here on nobody who waits can cancel it
                threading.Thread(target=_answer, args=(self._answer,), name=_THREAD, daemon=True).start()
            elif time.monotonic() - self._since > _ANSWER_S:
                raise DevicesUnknown(_HANGS)
            return self._answer


_ASKER = _Asker()


async def ask_gpus() -> list[Gpu]:
    """`read_gpus` without holding up the caller's loop or its pool of threads; DevicesUnknown also where it hangs."""
    answer = asyncio.wrap_future(_ASKER.ask())
    try:
        done, _ = await asyncio.wait([answer], timeout=_ANSWER_S)
        if not done:
            raise DevicesUnknown(_HANGS)
        return answer.result()
    finally:
        answer.cancel()


def _answer(answer: Future[list[Gpu]]) -> None:
    try:
        gpus = read_gpus()
    except BaseException as error:
        answer.set_exception(error)
    else:
        answer.set_result(gpus)


_stuck: list[subprocess.Popen[str]] = []  # killed, and not ended


def _run(*words: str) -> str:
    if any(process.poll() is None for process in _stuck):  # one more would hang beside it
        raise DevicesUnknown(f"{_SMI} (process {_stuck[0].pid}) was killed and does not end: its driver hangs")
    _stuck.clear()
    try:
        process = subprocess.Popen(
            [_SMI, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace",
        )  # fmt: skip
    except OSError as error:
        raise DevicesUnknown(f"{_SMI} cannot be run: {error}") from error
    try:
        out, err = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        _kill(process)
        raise DevicesUnknown(f"{_SMI} did not answer within {_TIMEOUT_S:g} s") from error
    if process.returncode != 0:
        text = " ".join((out + err).split())[:300]
        raise DevicesUnknown(f"{_SMI} ended with {process.returncode}: {text or 'without a message'}")
    return out


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process, or give up: one that waits in the kernel for its driver cannot be ended."""
    process.kill()
    try:
        process.wait(_KILL_S)
    except subprocess.TimeoutExpired:
        _stuck.append(process)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
