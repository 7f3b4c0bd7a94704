"""Runs that make something on a cluster without a job in a database: checks, measurements, acceptance.

Everything they make carries the mark of their home folder and of the run. A run that lives holds a lock on a file in
its home folder; what carries the mark of a home whose lock is free was left by a killed run, and the next call or
`trainmaster reap` removes it. Of another home nothing is touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainmaster.targets._provider import home_mark, make_home_mark

_FOLDER = "runs"  # in a home folder
_NO_LOCK = "x"  # first letter of a run whose home cannot be written: whether it lives is not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who made something: a home folder by its mark, and one run of it."""

    home: str
    run: str


class Run:
    """One run of this process, alive until `close` or the end of the process."""

    def __init__(self, home: Path) -> None:
        self._folder, run = home / _FOLDER, secrets.token_hex(6)
        self._fd: int | None = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            make_home_mark(home)
            self._fd = os.open(self._folder / run, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a check of a machine whose disk is full must not end here
            run = f"{_NO_LOCK}{run}"
        self.owner = Owner(home=home_mark(home), run=run)

    def close(self) -> None:
        """End the run; what carries its mark from now on is left over."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                (self._folder / self.owner.run).unlink()
            os.close(self._fd)
            self._fd = None


def is_left_over(home: Path, handle: Mapping[str, Any]) -> bool:
    """Whether a thing that some run made is of this home, and its run is known to be gone."""
    run = str(handle.get("run", _NO_LOCK))
    return not run.startswith(_NO_LOCK) and handle.get("home") == home_mark(home) and not is_running(home, handle)


def is_running(home: Path, handle: Mapping[str, Any]) -> bool:
    """Whether the run of this home that made a thing holds its lock."""
    try:
        fd = os.open(home / _FOLDER / Path(str(handle.get("run"))).name, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False
