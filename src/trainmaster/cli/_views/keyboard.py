"""Keys of a terminal, one by one, without Enter."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import tty
from collections.abc import Iterator
from typing import Any

_NAMES = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down", "\x1b[5~": "page-up",
    "\x1b[6~": "page-down", "\r": "enter", "\n": "enter", "\x03": "q", "\x04": "q", "\x1b": "q", "Q": "q",
}  # fmt: skip


def name_key(text: str) -> str:
    """The name of what a terminal sent for one key; other keys are themselves."""
    return _NAMES.get(text, text)


def split_keys(text: str) -> list[str]:
    """What a terminal sent, key by key: an arrow is three characters, and two keys may come at once."""
    return re.findall(r"\x1b(?:\[[0-9;]*[A-Za-z~]|O[A-Z])?|[^\x1b]", text)


class Keys:
    """Keys of one terminal."""

    def __init__(self, fd: int, cooked: Any) -> None:
        self._fd, self._cooked = fd, cooked
        self._sent: list[str] = []

    def read(self, timeout_s: float | None) -> str:
        """The next key by its name; "" where none came in time. Of a terminal that is gone, q."""
        if not self._sent:
            if not select.select([self._fd], [], [], timeout_s)[0]:
                return ""
            data = os.read(self._fd, 256)
            if not data:
                return "q"
            self._sent = split_keys(data.decode(errors="replace"))
        return name_key(self._sent.pop(0))

    @contextlib.contextmanager
    def cooked(self) -> Iterator[None]:
        """The terminal as programs expect it, meanwhile."""
        raw = termios.tcgetattr(self._fd)
        termios.tcsetattr(self._fd, termios.TCSADRAIN, self._cooked)
        try:
            yield
        finally:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, raw)


@contextlib.contextmanager
def raw_keys() -> Iterator[Keys]:
    """The keys of standard input; the terminal is as before at the end."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield Keys(fd, before)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
