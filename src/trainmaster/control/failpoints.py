"""Named places where a drill may kill the control plane: around each commit and each effect on the world.

Without a drill `reach` does nothing.

TRAINMASTER_CONTROL_KILL_AT="call submit: after 1"   SIGKILL when this process is at that place for the first time
TRAINMASTER_CONTROL_KILL_ONCE=FILE                   SIGKILL at every place that is not in the file yet, which is then
                                                     added: started again and again, it dies everywhere once
TRAINMASTER_CONTROL_PLACES=FILE                      write down every place it comes by

A place is what is about to be done or was just done. Its detail tells apart what is done more than once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

KILL_AT_VARIABLE = "TRAINMASTER_CONTROL_KILL_AT"
KILL_ONCE_VARIABLE = "TRAINMASTER_CONTROL_KILL_ONCE"
PLACES_VARIABLE = "TRAINMASTER_CONTROL_PLACES"

_reached: Counter[str] = Counter()


def before(what: str, detail: object = "") -> None:
    """The next thing this process does is `what`."""
    _reach(f"{what}: before", detail)


def after(what: str, detail: object = "") -> None:
    """The last thing this process did is `what`; nothing was returned yet."""
    _reach(f"{what}: after", detail)


@contextlib.contextmanager
def around(what: str, detail: object = "") -> Iterator[None]:
    """Both; the second only if it went well."""
    before(what, detail)
    yield
    after(what, detail)


def _reach(place: str, detail: object) -> None:
    if name := os.environ.get(PLACES_VARIABLE):
        with Path(name).open("a") as file:
            file.write(f"{place}\n")
    if wanted := os.environ.get(KILL_AT_VARIABLE):
        _reached[place] += 1
        if wanted == f"{place} {_reached[place]}":
            os.kill(os.getpid(), signal.SIGKILL)
    if (name := os.environ.get(KILL_ONCE_VARIABLE)) and _is_new(Path(name), f"{place} {detail}".rstrip()):
        os.kill(os.getpid(), signal.SIGKILL)


def _is_new(path: Path, place: str) -> bool:
    """Whether no process has died there yet; it is then taken. Several processes may ask at the same time."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if place in file.read().splitlines():
            return False
        file.write(f"{place}\n")
        return True
