"""Errors of the Lambda Cloud API, typed by the vendor's code. Messages and suggestions are shown, never interpreted.

TargetError
├── NoCapacity        instance-operations/launch/insufficient-capacity
├── NotNow            429: nothing was done
├── Unreachable       5xx, no answer, an answer that does not fit the schema
└── ApiError          every other refusal, with its code
    ├── InvalidKey          401 global/invalid-api-key
    ├── AccountError        global/account-inactive, global/invalid-address, global/forbidden
    ├── QuotaExceeded       global/quota-exceeded
    ├── NotFound            global/object-does-not-exist, global/not-found
    ├── InvalidRequest      global/invalid-parameters
    ├── Duplicate           global/duplicate
    ├── Conflict            409 global/conflict
    └── WrongRegion         instance-operations/launch/file-system-in-wrong-region
"""

from __future__ import annotations

from trainmaster.core.errors import NoCapacity, TargetError, Unreachable
from trainmaster.targets._provider import NotNow

_SHOWN = 300  # characters of a message of the API


class ApiError(TargetError):
    """A refusal with the vendor's code."""

    def __init__(self, message: str, *, code: str, status: int) -> None:
        super().__init__(message)
        self.code, self.status = code, status


class InvalidKey(ApiError):
    """The API key is not accepted."""


class AccountError(ApiError):
    """The account may not do this."""


class QuotaExceeded(ApiError):
    """The account's quota is used up."""


class NotFound(ApiError):
    """No such object."""


class InvalidRequest(ApiError):
    """A parameter is refused."""


class Duplicate(ApiError):
    """The name is taken."""


class Conflict(ApiError):
    """The object is in a state that forbids this."""


class WrongRegion(ApiError):
    """A file system is in another region than the instance."""


CAPACITY = "instance-operations/launch/insufficient-capacity"
_TYPES: dict[str, type[ApiError]] = {
    "global/invalid-api-key": InvalidKey,
    "global/account-inactive": AccountError,
    "global/invalid-address": AccountError,
    "global/forbidden": AccountError,
    "global/quota-exceeded": QuotaExceeded,
    "global/object-does-not-exist": NotFound,
    "global/not-found": NotFound,
    "global/invalid-parameters": InvalidRequest,
    "global/duplicate": Duplicate,
    "global/conflict": Conflict,
    "instance-operations/launch/file-system-in-wrong-region": WrongRegion,
}
_BY_STATUS: dict[int, type[ApiError]] = {401: InvalidKey, 403: AccountError, 404: NotFound, 409: Conflict}


def refusal(operation: str, status: int, code: str, message: str, suggestion: str) -> TargetError:
    """The typed error for an error answer. The texts are untrusted and may hold anything but our key."""
    text = "; ".join(part[:_SHOWN] for part in (message, suggestion) if part) or "no message"
    wrong = "wrong API key: " if _TYPES.get(code, _BY_STATUS.get(status)) is InvalidKey else ""
    words = f"lambda: {operation}: {wrong}{_printable(text)} ({status} {_printable(code[:100]) or 'without a code'})"
    if code == CAPACITY:
        return NoCapacity(words)
    if status == 429:
        return NotNow(words)
    if status >= 500 or code.startswith("provider/"):
        return Unreachable(words)
    kind = _TYPES.get(code) or _BY_STATUS.get(status, ApiError)
    return kind(words, code=code, status=status)


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
