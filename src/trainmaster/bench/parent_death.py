"""Ranks end with their launcher, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(variable: str) -> None:
    """Have the kernel kill this process when the launcher dies whose process number is in `variable`. Linux only."""
    parent = os.environ.get(variable)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if parent is None or prctl is None:
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):  # it died before the request was heard
        os._exit(1)
