"""Retry reads with growing pauses: a source that fails now and then must not end a run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from trainmaster.core.backoff import backoff_s
from trainmaster.core.errors import TrainmasterError

T = TypeVar("T")
_FIRST_S, _LONGEST_S = 0.4, 30.0


class Closed(Exception):
    """The reader was closed while it retried."""


class Retry:
    """Calls an action until it succeeds, until it is closed, or until it fails in a way that a retry cannot mend."""

    def __init__(self, what: str, *, tries: int | None = None) -> None:
        """`tries` at most; None: without a limit of its own (the caller's deadline applies)."""
        self._what, self._tries = what, tries
        self._closed = threading.Event()
        self.trouble: str | None = None  # the failure being retried, for messages

    def call(self, action: Callable[[], T]) -> T:
        """Result of `action`. Our own errors and missing files are raised at once."""
        tried = 0
        while not self._closed.is_set():
            try:
                result = action()
            except (TrainmasterError, Closed):
                raise
            except Exception as error:
                tried += 1
                if is_final(error) or tried == self._tries:
                    raise
                self.trouble = f"{self._what}: {brief(error)} (try {tried})"
            else:
                self.trouble = None
                return result
            self._closed.wait(backoff_s(tried, first_s=_FIRST_S, longest_s=_LONGEST_S))
        raise Closed

    def close(self) -> None:
        self._closed.set()


def is_final(error: BaseException) -> bool:
    """Whether a retry cannot help: not found, or no permission. Judged by class names, as libraries differ."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if "LocalEntryNotFoundError" in kinds:  # huggingface_hub: not in the cache, because the Hub could not be asked
        return False
    final = {
        "RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError", "EntryNotFoundError", "DisabledRepoError",
        "DatasetNotFoundError", "DataFilesNotFoundError", "HFValidationError", "PermissionError", "IsADirectoryError",
    }  # fmt: skip
    return bool(final.intersection(kinds)) or type(error) in (TypeError, AttributeError, KeyError, IndexError)


def brief(error: BaseException) -> str:
    """A library's error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or ['no message'])[0][:200]}"
