"""CUDA errors: their meaning for a machine and the action, found by code or by message.

Codes and messages are those of cudaError_t in the CUDA runtime API reference. The probes run kernels that are known to
be correct, so an error that usually blames the program blames the device here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trainmaster.core.results import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaError:
    """Row of the table. `error`: the GPU could not be tested. `fail`: it was tested and is not fit."""

    code: int
    words: str  # as cudaGetErrorString prints them
    verdict: Verdict
    meaning: str
    action: str


_REPLACE = "drain the node, reset the GPU and run this again; replace the GPU if it repeats"
_REBOOT = "reload the NVIDIA driver or reboot the node, then run this again"


def _row(code: int, words: str, verdict: Verdict, meaning: str, action: str) -> CudaError:
    return CudaError(code=code, words=words, verdict=verdict, meaning=meaning, action=action)


TABLE = (
    _row(2, "out of memory", Verdict.ERROR, "its memory is taken", "end what else runs on this GPU"),
    _row(3, "initialization error", Verdict.ERROR, "the driver did not start for it", _REBOOT),
    _row(
        35,
        "CUDA driver version is insufficient for CUDA runtime version",
        Verdict.ERROR,
        "the driver is too old for this torch",
        "install a driver that this torch's CUDA supports",
    ),
    _row(
        46,
        "CUDA-capable device(s) is/are busy or unavailable",
        Verdict.ERROR,
        "it is held by another process or in exclusive mode",
        "end what else runs on this GPU, and set its compute mode to default",
    ),
    _row(
        100,
        "no CUDA-capable device is detected",
        Verdict.ERROR,
        "CUDA does not see it, though nvidia-smi lists it",
        "give this process /dev/nvidia* and /dev/nvidia-uvm; see the Xid check",
    ),
    _row(101, "invalid device ordinal", Verdict.ERROR, "CUDA does not see it, though nvidia-smi lists it", _REBOOT),
    _row(
        209,
        "no kernel image is available for execution on the device",
        Verdict.ERROR,
        "this torch has no code for this chip",
        "install a torch that was built for it",
    ),
    _row(214, "uncorrectable ECC error encountered", Verdict.FAIL, "its memory has an uncorrectable error", _REPLACE),
    _row(
        220,
        "uncorrectable NVLink error detected during the execution",
        Verdict.FAIL,
        "an NVLink failed under load",
        "drain the node; reseat or replace the GPU baseboard or its NVSwitch",
    ),
    _row(
        700, "an illegal memory access was encountered", Verdict.FAIL, "a right kernel read a wrong address", _REPLACE
    ),
    _row(702, "the launch timed out and was terminated", Verdict.FAIL, "a short kernel did not end", _REPLACE),
    _row(714, "hardware stack error", Verdict.FAIL, "its stack memory is damaged", _REPLACE),
    _row(715, "an illegal instruction was encountered", Verdict.FAIL, "it read a wrong instruction", _REPLACE),
    _row(716, "misaligned address", Verdict.FAIL, "a right kernel read a wrong address", _REPLACE),
    _row(718, "invalid program counter", Verdict.FAIL, "it lost its place in a right kernel", _REPLACE),
    _row(719, "unspecified launch failure", Verdict.FAIL, "a right kernel died on it", _REPLACE),
    _row(
        802,
        "system not yet initialized",
        Verdict.FAIL,
        "its NVSwitch fabric is not up",
        "start nvidia-fabricmanager, of exactly the driver's version, and see its log",
    ),
    _row(
        803,
        "system has unsupported display driver / cuda driver combination",
        Verdict.ERROR,
        "the kernel module and libcuda are of different versions",
        "install the two of one version, or take the host's libcuda into the container",
    ),
    _row(
        804,
        "forward compatibility was attempted on non supported HW",
        Verdict.ERROR,
        "a newer libcuda than the driver is on the path",
        "take cuda-compat off LD_LIBRARY_PATH, or update the driver",
    ),
    _row(
        805,
        "MPS client failed to connect to the MPS control daemon or the MPS server",
        Verdict.ERROR,
        "an MPS daemon is configured and does not answer",
        "start nvidia-cuda-mps-control, or unset CUDA_MPS_PIPE_DIRECTORY",
    ),
    _row(999, "unknown error", Verdict.ERROR, "the driver is in a state it cannot name", _REBOOT),
)


def find(message: str, code: int | None = None) -> CudaError | None:
    """The row for this error: by its number, by `Error 802:`, or by CUDA's own words behind `CUDA error:`."""
    match = re.search(r"\bError (\d{1,4}):", message)
    number = code if code is not None else int(match[1]) if match else None
    by_number = next((row for row in TABLE if row.code == number), None)
    if by_number is not None:
        return by_number
    lowered = message.lower()
    if "cuda" not in lowered:
        return None
    # The longest first: `unknown error` is part of many a sentence.
    return next((row for row in sorted(TABLE, key=lambda row: -len(row.words)) if row.words.lower() in lowered), None)
