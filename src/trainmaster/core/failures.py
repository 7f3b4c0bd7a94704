"""Table of failures: a pattern in a rank's last lines, or the signal that ended it → typed reason.

The reason says whether the job is retried (core/states.py). In order: the first pattern that is found names the reason.
Causes stand before the symptoms they bring about, because a rank that runs out of memory also closes its connections.
Each row carries the source of its text; tests hold every row to a line that a program really printed.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainmaster.core.states import Reason

_SHELL_SIGNAL = 128  # a shell, and torchrun around a shell, end with 128 + the signal of their child


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One row: a regular expression over a log line, and the reason it stands for."""

    pattern: re.Pattern[str]
    reason: Reason
    source: str  # of the text


def _rows(reason: Reason, *rows: tuple[str, str]) -> tuple[Failure, ...]:
    return tuple(Failure(pattern=re.compile(pattern), reason=reason, source=source) for pattern, source in rows)


FAILURES: tuple[Failure, ...] = (
    # Locked memory of the fabric, which also says "Cannot allocate memory".
    *_rows(
        Reason.FABRIC_ERROR,
        (r"ibv_\w+ .*Cannot allocate memory", "NCCL, src/misc/ibvwrap.cc: RLIMIT_MEMLOCK"),
        (r"RLIMIT_MEMLOCK", "libibverbs, src/init.c"),
    ),
    *_rows(
        Reason.OUT_OF_MEMORY,
        (r"\bout of memory: rank \d+ ", "train/watch/oom.py, which names what to change"),
        (r"CUDA out of memory", "c10/cuda/CUDACachingAllocator.cpp"),
        (r"CUDA error: out of memory", "cudaGetErrorString(cudaErrorMemoryAllocation)"),
        (r"Cuda failure (\d+ )?'out of memory'", "NCCL, src/include/checks.h"),
        (r"DefaultCPUAllocator: (not enough|can't allocate) memory", "c10/core/impl/alloc_cpu.cpp"),
        (r"^MemoryError\b", "CPython"),
        (r"numpy.*_ArrayMemoryError", "numpy/_core/_exceptions.py"),
        (r"std::bad_alloc", "C++ new"),
        (r"Cannot allocate memory", "strerror(ENOMEM)"),
        (r"workers are out of shared memory", "torch/csrc/DataLoader.cpp"),
        (r"bus error encountered in worker.*insufficient shared memory", "torch/csrc/DataLoader.cpp"),
    ),
    *_rows(
        Reason.DISK_FULL, (r"No space left on device", "strerror(ENOSPC)"), (r"Disk quota exceeded", "strerror(EDQUOT)")
    ),
    # The program's own fault on the GPU: the next attempt meets it at the same step.
    *_rows(
        Reason.SCRIPT_FAILED,
        (r"CUDA error: device-side assert triggered", "cudaGetErrorString(cudaErrorAssert)"),
        (r"CUDA error: (no kernel image is available|invalid device function)", "a build for another GPU"),
    ),
    *_rows(
        Reason.NODE_LOST,
        (r"uncorrectable ECC error encountered", "cudaGetErrorString(cudaErrorECCUncorrectable)"),
        (r"uncorrectable NVLink error", "cudaGetErrorString(cudaErrorNvlinkUncorrectable)"),
        (r"\bGPU is lost\b", "nvmlErrorString(NVML_ERROR_GPU_IS_LOST)"),
    ),
    *_rows(
        Reason.GPU_ERROR,
        (r"CUDA error: unspecified launch failure", "cudaGetErrorString(cudaErrorLaunchFailure)"),
        (r"an illegal memory access was encountered", "cudaGetErrorString(cudaErrorIllegalAddress)"),
        (
            r"CUDA error: (an illegal instruction|misaligned address|hardware stack error|unknown error"
            r"|the launch timed out|no CUDA-capable device|CUDA-capable device\(s\) is/are busy)",
            "cudaGetErrorString",
        ),
        (r"Cuda failure (\d+ )?'(unknown error|unspecified launch failure)'", "NCCL, src/include/checks.h"),
        (r"CU(BLAS|DNN)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)", "cublas_api.h, cudnn_graph.h"),
        (r"No CUDA GPUs are available", "torch/cuda/__init__.py"),
        (r"\bError 802\b|system not yet initialized", "cudaGetErrorString(cudaErrorSystemNotReady): fabric manager"),
    ),
    # The port that was free a moment ago is taken.
    *_rows(
        Reason.TARGET_ERROR,
        (r"server socket has failed to listen on any local network address", "c10d/socket.cpp"),
        (r"\[Errno 11\] Resource temporarily unavailable", "strerror(EAGAIN) of fork: the node's limit of processes"),
    ),
    *_rows(
        Reason.FABRIC_ERROR,
        (r"NET/IB.* Got completion from peer .*vendor err", "NCCL, src/transport/net_ib.cc"),
        (r"NCCL WARN NET/OFI .*(completed with error|\bRC: -?\d+)", "aws-ofi-nccl"),
        (r"libfabric:.*:efa:.*\berr: \d+", "libfabric, prov/efa"),
        (r"Unresponsive receiver", "libfabric, prov/efa/src/efa_errno.h"),
        (r"ncclSystemError", "c10d/NCCLUtils.cpp"),
        (r"ncclInternalError", "c10d/NCCLUtils.cpp"),
        (r"ncclUnhandledCudaError", "c10d/NCCLUtils.cpp"),
    ),
    *_rows(
        Reason.FILE_SYSTEM_ERROR,
        (r"\[Errno 116\]|Stale (NFS )?file handle", "strerror(ESTALE)"),
        (r"\[Errno 5\] Input/output error", "strerror(EIO)"),
        (r"\[Errno 108\]|\[Errno 107\] Transport endpoint", "strerror(ESHUTDOWN, ENOTCONN): Lustre and FUSE evictions"),
        (r"\[Errno 121\] Remote I/O error", "strerror(EREMOTEIO)"),
        (r"\[Errno 110\] Connection timed out: '/", "strerror(ETIMEDOUT) with a path: a mount"),
    ),
    *_rows(
        Reason.STORAGE_ERROR,
        (r"\bSlowDown\b|Please reduce your request rate", "S3 error responses"),
        (r"\b50[234] (Server Error|Service Unavailable|Bad Gateway|Gateway Time-?out)", "requests, urllib3: a hub"),
    ),
    *_rows(
        Reason.COLLECTIVE_TIMEOUT,
        (r"\bhang: (rank \d+ |all \d+ ranks )", "train/watch/hang.py, which names the missing ranks"),
        (r"Watchdog caught collective operation timeout", "c10d/ProcessGroupNCCL.cpp"),
        (r"watchdog got stuck for \d+ seconds", "c10d/ProcessGroupNCCL.cpp, heartbeat monitor"),
        (r"Some NCCL operations have failed or timed out", "c10d/ProcessGroupNCCL.cpp"),
        (r"Timed out waiting \d+ms for (recv|send) operation", "gloo/transport/tcp"),
        (r"Connection closed by peer", "gloo/transport/tcp/pair.cc, NCCL src/misc/socket.cc"),
        (r"gloo/.*Connection reset by peer", "gloo/transport/tcp/pair.cc"),
        (r"ncclRemoteError", "c10d/NCCLUtils.cpp: a peer went away"),
        (r"wait timeout after \d+ms, keys:", "c10d/TCPStore.cpp"),
        (r"Timed out after \d+ seconds waiting for clients", "c10d/TCPStore.cpp"),
        (r"watchdog thread terminated with exception", "c10d/ProcessGroupNCCL.cpp"),
        (r"DistNetworkError: ", "c10d/socket.cpp, TCPStore.cpp: the keeper of the store is gone"),
    ),
    # torchrun ends with 1 on a signal, whatever its ranks have saved.
    *_rows(
        Reason.PREEMPTED,
        (r"SignalException: Process \d+ got signal: (1|2|15)$", "torch/distributed/elastic/multiprocessing/api.py"),
    ),
    # A launcher inside the command (torchrun, mp.spawn) ends with 1 and names the signal of its child.
    *_rows(
        Reason.CRASHED,
        (r"Signal \d+ \(SIG(KILL|SEGV|BUS|ABRT|ILL|FPE)\) received by PID", "torch/distributed/elastic"),
        (r"failed \(exitcode: -(9|11|7|6|4|8)\) local_rank", "torch/distributed/elastic/multiprocessing/api.py"),
        (
            r"DataLoader worker \(pid.*\) is killed by signal: (Killed|Segmentation fault|Aborted)",
            "torch DataLoader.cpp",
        ),
        (r"terminated with signal SIG(KILL|SEGV|BUS|ABRT|ILL|FPE)", "torch/multiprocessing/spawn.py"),
        (r"^Fatal Python error: (Segmentation fault|Bus error|Aborted|Illegal instruction)", "CPython, faulthandler"),
    ),
)

SIGNALS: Mapping[int, Reason] = {
    signal.SIGKILL: Reason.CRASHED,
    signal.SIGSEGV: Reason.CRASHED,
    signal.SIGBUS: Reason.CRASHED,
    signal.SIGABRT: Reason.CRASHED,
    signal.SIGILL: Reason.CRASHED,
    signal.SIGFPE: Reason.CRASHED,
    # From outside: the agent sends it only after it has recorded its own reason.
    signal.SIGTERM: Reason.PREEMPTED,
}

# Reasons that a rank also shows when only its peer has failed.
SYMPTOMS = (Reason.COLLECTIVE_TIMEOUT, Reason.FABRIC_ERROR)


def find_failure(lines: Sequence[str]) -> tuple[Failure, str] | None:
    """The first row that matches any line, with the newest line that it matches."""
    for failure in FAILURES:
        for line in reversed(lines):
            if failure.pattern.search(line):
                return failure, line.strip()
    return None


def signal_of(code: int) -> int | None:
    """The signal of an exit code: negative as Python reports it, or above 128 as a shell does."""
    if code < 0:
        return -code
    return code - _SHELL_SIGNAL if code - _SHELL_SIGNAL in SIGNALS else None


# What agent/diagnose.py appends to the message where a program or script is not there, or may not be executed.
_MISSING = re.compile(
    r"; ([^;]{1,500} (?:is not in the working folder that was sent: check the name, and \.trainmasterignore"
    r"|(?:or the interpreter in its first line )?is not on that machine: check (?:its|the) path"
    r"|is not in PATH on that machine: name the whole path(?:, or use python3)?"
    r"|may not be executed there: chmod \+x it, or name its interpreter before it, as python3 or bash))(?:;|$)"
)


def find_action(reason: Reason | None, message: str) -> str | None:
    """What to do about an end: what the reason says, and of a missing program what its message says of that one."""
    if reason is Reason.SCRIPT_FAILED and (missing := _MISSING.search(message)) is not None:
        return missing[1]
    return reason.rule.action if reason is not None else None
