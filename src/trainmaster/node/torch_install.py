"""The installed torch, without importing it: that takes 2 to 5 seconds, and a start has none to spare."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE: the driver is there and shows none
_LIMIT_S = 60.0  # a driver that hangs must not hold a command for ever
# A process of its own: an open driver starts a thread and keeps the device files of every GPU open.
_ASK_DRIVER = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
number, code = ctypes.c_int(), driver.cuInit(0)
print(code or driver.cuDeviceGetCount(ctypes.byref(number)), number.value)
"""


def find() -> Path | None:
    """The folder of the installed torch; None where there is none."""
    found = importlib.util.find_spec("torch")
    return Path(found.origin).parent if found is not None and found.origin else None


def count_gpus() -> int | None:
    """GPUs that torch would see here, as the driver counts them; None where only torch itself can tell."""
    folder = find()
    if folder is None:
        return 0
    kinds = _kinds(folder)
    if kinds == {"cuda": False, "hip": False}:
        return 0
    if kinds == {"cuda": True, "hip": False}:
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            asked = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _ASK_DRIVER],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_LIMIT_S,
                check=True,
            )
            code, number = map(int, asked.stdout.split())
            if code == 0:
                return number
            if code == _NO_DEVICE:
                return 0
    return None


def _kinds(folder: Path) -> dict[str, bool]:
    """Which drivers this build of torch can use; empty where its version file says nothing that is known."""
    try:
        text = (folder / "version.py").read_text()
    except (OSError, ValueError):
        return {}
    found = re.findall(r"^(cuda|hip)\b[^=\n]*= *(None|['\"])", text, flags=re.MULTILINE)
    return {name: value != "None" for name, value in found}


def bytecode_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with which Python keeps the bytecode of torch, where neither the image nor the user keeps it.

    Images are often built without it and with PYTHONDONTWRITEBYTECODE: every start then compiles 2,000 sources, which
    takes longer than everything else of an import. A stale file is noticed by Python.
    """
    folder = find()
    if folder is None or environ.get("PYTHONPYCACHEPREFIX"):
        return {}
    if Path(importlib.util.cache_from_source(str(folder / "__init__.py"))).exists():
        return {}
    try:
        kept = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainmaster" / "bytecode"
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not kept.is_absolute() or not _is_ours(kept.resolve()):
            return {}
    except (OSError, RuntimeError):
        return {}
    return {"PYTHONPYCACHEPREFIX": str(kept), "PYTHONDONTWRITEBYTECODE": ""}


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can put files there, or another folder in its place: what is read from there is executed."""
    state = folder.stat()
    if state.st_uid != os.geteuid() or state.st_mode & 0o022 or not os.access(folder, os.W_OK):
        return False
    above = [parent.stat() for parent in folder.parents]
    return all(
        state.st_uid in (0, os.geteuid()) and (not state.st_mode & 0o022 or state.st_mode & 0o1000) for state in above
    )
