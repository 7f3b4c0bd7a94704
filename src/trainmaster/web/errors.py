"""Error answers: typed JSON for programs, an HTML page for browsers."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from trainmaster.core.errors import Fault, StorageError, StoreError, TargetError, UsageError
from trainmaster.core.secret.shapes import hide
from trainmaster.store.page_rows import backlog
from trainmaster.web.templating import render

log = logging.getLogger(__name__)
_PROGRAM = ("/v1/", "/api/", "/healthz", "/readyz", "/metrics")
_JOB = re.compile(r"(/jobs/[0-9a-f-]{36})/[a-z]+")
_LATER = {"Retry-After": "5"}


class Refused(Exception):
    """A request that is refused, with its error answer."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        faults: Sequence[Fault] = (),
        headers: Mapping[str, str] | None = None,
        links: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message)
        self.links = tuple(links)  # of the page: words and path
        self.status, self.code, self.message, self.faults = status, code, message, tuple(faults)
        self.headers = headers or {}


def not_found(job_id: str) -> Refused:
    return Refused(404, "not_found", f"no job {job_id}")


def install(app: FastAPI) -> None:
    """Register the exception handlers."""
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(UsageError, _unusable)
    for kind in (*backlog.GONE, StoreError, StorageError, TargetError):
        app.add_exception_handler(kind, _unavailable)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return answer(request, error)


async def _unusable(request: Request, error: Exception) -> Response:
    # For example a job whose target is not installed on this server.
    return answer(request, Refused(409, "unusable", str(error)))


async def _unavailable(request: Request, error: Exception) -> Response:
    return answer(request, unavailable(error))


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
    message = {404: "no such path"}.get(error.status_code, str(error.detail))
    return answer(request, Refused(error.status_code, code, message, headers=error.headers))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = [
        Fault(path=".".join(str(part) for part in item["loc"][1:]), message=_plain(item["msg"]))
        for item in error.errors()
    ]
    message = "; ".join(str(fault) for fault in faults)
    return answer(request, Refused(422, "bad_request", message, faults=faults))


def _plain(message: object) -> str:
    return str(message).removeprefix("Value error, ")  # pydantic's word for our own message


def broken(request: Request, error: Exception) -> Response:
    """The answer to an unexpected exception."""
    # The traceback goes to the log only.
    log.error("%s %s failed", request.method, request.scope["path"], exc_info=error)
    return answer(request, Refused(500, "internal", "internal error; see the server log"))


def unavailable(error: Exception) -> Refused:
    """The answer while the database, the storage or a target is unavailable."""
    log.warning("unavailable: %s", error)
    if isinstance(error, backlog.GONE):
        # The text of the driver contains the statement and its values.
        return Refused(503, "database_away", "the database is unavailable; nothing was changed", headers=_LATER)
    code = {StorageError: "storage_away", TargetError: "target_away"}
    kind = next((word for base, word in code.items() if isinstance(error, base)), "store_away")
    return Refused(503, kind, str(error), headers=_LATER)


def _back(request: Request) -> Sequence[tuple[str, str]]:
    """The job whose button was pressed."""
    pressed = _JOB.fullmatch(request.scope["path"]) if request.method == "POST" else None
    return (("Back to the job", pressed[1]),) if pressed is not None else ()


def for_programs(request: Request) -> bool:
    """Whether the answer is JSON; other paths get an HTML page."""
    path: str = request.scope["path"]  # not request.url, which contains the Host header
    return path.startswith(_PROGRAM)


# What to do next, by status; others have no advice.
_NEXT = {
    401: "Sign in with a token of this server.",
    402: "Nothing was created. An administrator of the project raises what it may spend with that command, or in "
    "Settings under Projects; then try again.",
    403: "Your token does not allow this; Settings says which role it has. An administrator of the project can create "
    "another one.",
    404: "The address may be mistyped, or what it named was deleted. Search for it by name, or go to the list.",
    409: "Change what it names, then try again.",
    422: "The address or the form has a value that is not allowed. Go back and change it.",
    429: "Wait for that long, then load this page again.",
    500: "This is a fault of the server, not of what you did. Load the page again; if it stays, tell the operator the "
    "address and the time: the log of the server has the cause.",
    503: "Load this page again in some seconds; it comes back by itself when that is there again.",
}
_AGAIN = (429, 500, 503)


def answer(request: Request, error: Refused) -> Response:
    """A refusal as JSON or as a page."""
    if for_programs(request):
        body: dict[str, object] = {"code": error.code, "message": hide(error.message)}
        if error.faults:
            body["faults"] = [{"path": hide(fault.path), "message": hide(fault.message)} for fault in error.faults]
        # As ASCII: a message may quote half of a surrogate pair, which UTF-8 cannot encode.
        text = json.dumps({"error": body})
        return Response(text, status_code=error.status, headers=dict(error.headers), media_type="application/json")
    message = hide(error.message).encode(errors="replace").decode()
    caller = request.scope.get("state", {}).get("who")  # None: not signed in, and shown no navigation
    known = {"who": caller} if caller is not None else {}
    page = render(
        "error.html",
        status_code=error.status,
        status=error.status,
        message=message.rstrip("."),
        advice=_NEXT.get(error.status, ""),
        again=request.method == "GET" and error.status in _AGAIN,
        links=(*error.links, *_back(request)) if caller is not None else (),
        at=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        **known,
    )
    page.headers.update(error.headers)
    return page
