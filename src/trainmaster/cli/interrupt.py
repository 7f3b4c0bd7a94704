"""Ctrl-C while the program starts: it ends at once, with 130.

Nothing has been done by then. Python's own way is an exception out of whatever import is under way: a traceback, or a
package that seems to be missing, or nothing at all where the import goes on in spite of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

INTERRUPTED = 130


def leave_at_once() -> None:
    """Until `restore`, Ctrl-C ends this process. Under nohup or in the background of a script it stays ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def restore() -> None:
    """Ctrl-C is a KeyboardInterrupt again: the verb cleans up after itself."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """For a long import inside a verb that has done nothing yet."""
    leave_at_once()
    try:
        yield
    finally:
        restore()


def _leave(_number: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)
