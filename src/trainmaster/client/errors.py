"""What can go wrong with a server.

    ServerError                 exit code
    ├── ServerUnreachable       1   nothing answered, however often it was asked; says nothing about the jobs
    ├── Download                1   a file did not arrive as the server described it
    └── Refusal                 1   the server answered with an error: `status`, `code`, `message`, `faults`
        ├── BadRequest          2   400, 405, 413, 415, 421, 422: what was asked cannot be done as asked
        ├── NoAccess            2   401, 403: no token, a wrong one, or one that may not do this
        ├── NotFound            2   404
        ├── Conflict            2   409: the idempotency key stands for another spec
        ├── OverBudget          2   402: the project has spent what it may
        ├── TooMany             1   429, after waiting as often as the client may
        └── Unavailable         1   5xx, after asking again as often as the client may

A message never holds the token.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainmaster.core.errors import Fault, TrainmasterError


class ServerError(TrainmasterError):
    """Something went wrong between this client and its server."""


class ServerUnreachable(ServerError):
    """Nothing answered. Says nothing about the jobs."""


class Download(ServerError):
    """A file did not arrive as the server described it."""


class Refusal(ServerError):
    """The server answered with an error. `code` is for programs and stays; the message is for people."""

    def __init__(self, status: int, code: str, message: str, faults: Sequence[Fault] = ()) -> None:
        self.status, self.code, self.message, self.faults = status, code, message, tuple(faults)
        details = "".join(f"\n  {fault}" for fault in self.faults if str(fault) not in message)
        super().__init__(f"{message} ({status} {code}){details}")


class BadRequest(Refusal):
    """What was asked cannot be done as asked."""

    exit_code = 2


class NoAccess(Refusal):
    """No token, a wrong one, or one that may not do this."""

    exit_code = 2


class NotFound(Refusal):
    """There is no such thing, or it may not be seen."""

    exit_code = 2


class Conflict(Refusal):
    """The idempotency key, or the name, stands for something else already."""

    exit_code = 2


class OverBudget(Refusal):
    """The project has spent what it may; nothing was created."""

    exit_code = 2


class TooMany(Refusal):
    """Asked too often, and waiting did not help."""


class Unavailable(Refusal):
    """The server cannot do it now."""


_BY_STATUS: dict[int, type[Refusal]] = {
    401: NoAccess,
    402: OverBudget,
    403: NoAccess,
    404: NotFound,
    409: Conflict,
    429: TooMany,
}


def refusal(status: int, body: object) -> Refusal:
    """The error of an answer; one whose body is not ours (a proxy's) is told by its status alone."""
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {}
    code, message = str(error.get("code", "unknown")), str(error.get("message", f"the server answered {status}"))
    listed = error.get("faults")
    faults = [
        Fault(path=str(item.get("path", "")), message=str(item.get("message", "")))
        for item in (listed if isinstance(listed, list) else [])
        if isinstance(item, dict)
    ]
    kind = _BY_STATUS.get(status) or (BadRequest if status < 500 else Unavailable)
    return kind(status, code, message, faults)
