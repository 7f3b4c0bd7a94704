"""Answers that many callers ask for and that take a while: each is made once and kept for some seconds."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")
_MOST = 256


class Kept:
    """Values by key, each kept so long. Threads may share it; the key holds whatever the value depends on."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def forget(self, kind: str) -> None:
        """Make the values anew whose key begins with this word: something that they show was changed."""
        with self._lock:
            for key in [key for key in self._values if isinstance(key, tuple) and key[0] == kind]:
                self._values[key] = (-math.inf, self._values[key][1])

    def read(self, key: Hashable, make: Callable[[], T], *, for_s: float) -> T:
        """The value of a key; made where there is none, or an old one. Who asks meanwhile waits for the same."""
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:
            with self._lock:
                made_at, value = self._values.get(key, (0.0, None))
                if key in self._values and time.monotonic() - made_at < for_s:
                    kept: T = value
                    return kept
            new = make()
            with self._lock:
                self._values[key] = (time.monotonic(), new)
                self._values.move_to_end(key)
                while len(self._values) > _MOST:
                    self._making.pop(self._values.popitem(last=False)[0], None)
            return new
