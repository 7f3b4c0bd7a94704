"""Try again, with pauses that grow: a source that fails now and then must not end a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from trainmaster.core.backoff import backoff_s
from trainmaster.core.errors import TrainmasterError

T = TypeVar("T")
_FIRST_S, _LONGEST_S = 0.4, 30.0


class Closed(Exception):
    """Nobody waits for the answer any more."""


class Patience:
    """Tries until it works, until it is closed, or until the fault is one that trying again cannot mend."""

    def __init__(self, what: str, *, tries: int | None = None) -> None:
        """`tries` at most; None: without end, and whoever waits for the answer sets the limit."""
        self._what, self._tries = what, tries
        self._closed = threading.Event()
        self.trouble: str | None = None  # what goes wrong right now, for whoever waits

    def call(self, action: Callable[[], T]) -> T:
        """What `action` returns in the end. Our own errors and absent files are told at once."""
        tried = 0
        while not self._closed.is_set():
            try:
                result = action()
            except (TrainmasterError, Closed):
                raise
            except Exception as wrong:
                tried += 1
                if is_final(wrong) or tried == self._tries:
                    raise
                self.trouble = f"{self._what}: {brief(wrong)} (try {tried})"
            else:
                self.trouble = None
                return result
            self._closed.wait(backoff_s(tried, first_s=_FIRST_S, longest_s=_LONGEST_S))
        raise Closed

    def close(self) -> None:
        self._closed.set()


def is_final(wrong: BaseException) -> bool:
    """Whether trying again cannot help: it is not there, or may not be read. Read from names, as libraries differ."""
    kinds = [kind.__name__ for kind in type(wrong).__mro__]
    if "LocalEntryNotFoundError" in kinds:  # huggingface_hub: not in the cache, because the Hub could not be asked
        return False
    final = {
        "RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError", "EntryNotFoundError", "DisabledRepoError",
        "DatasetNotFoundError", "DataFilesNotFoundError", "HFValidationError", "PermissionError", "IsADirectoryError",
    }  # fmt: skip
    return bool(final.intersection(kinds)) or type(wrong) in (TypeError, AttributeError, KeyError, IndexError)


def brief(wrong: BaseException) -> str:
    """An error of a library in one line."""
    lines = [line.strip() for line in str(wrong).splitlines() if line.strip()]
    return f"{type(wrong).__name__}: {(lines or ['no message'])[0][:200]}"
