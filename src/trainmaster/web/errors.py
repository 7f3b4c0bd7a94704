"""Errors as answers: typed JSON for programs, a page in the same style for people."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from trainmaster.core.errors import Fault, StorageError, StoreError, TargetError, UsageError
from trainmaster.store import backlog
from trainmaster.web.templating import render

log = logging.getLogger(__name__)
_PROGRAM = ("/v1/", "/api/", "/healthz", "/readyz", "/metrics")
_LATER = {"Retry-After": "5"}


class Refused(Exception):
    """A request that cannot be done, with the answer it gets."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        faults: Sequence[Fault] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.faults = status, code, message, tuple(faults)
        self.headers = headers or {}


def not_found(job_id: str) -> Refused:
    return Refused(404, "not_found", f"there is no job {job_id}")


def install(app: FastAPI) -> None:
    """Teach the application to answer errors our way."""
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(UsageError, _unusable)
    for kind in (*backlog.GONE, StoreError, StorageError, TargetError):
        app.add_exception_handler(kind, _unavailable)


async def _refused(request: Request, wrong: Exception) -> Response:
    assert isinstance(wrong, Refused)
    return answer(request, wrong)


async def _unusable(request: Request, wrong: Exception) -> Response:
    # As a job whose target this server has not installed: it is there, and nothing can be asked of it from here.
    return answer(request, Refused(409, "unusable", str(wrong)))


async def _unavailable(request: Request, wrong: Exception) -> Response:
    return answer(request, unavailable(wrong))


async def _http(request: Request, wrong: Exception) -> Response:
    assert isinstance(wrong, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(wrong.status_code, "refused")
    message = {404: "there is nothing at this address"}.get(wrong.status_code, str(wrong.detail))
    return answer(request, Refused(wrong.status_code, code, message, headers=wrong.headers))


async def _invalid(request: Request, wrong: Exception) -> Response:
    assert isinstance(wrong, RequestValidationError)
    faults = [
        Fault(path=".".join(str(part) for part in item["loc"][1:]), message=str(item["msg"])) for item in wrong.errors()
    ]
    message = "; ".join(str(fault) for fault in faults)
    return answer(request, Refused(422, "bad_request", message, faults=faults))


def broken(request: Request, wrong: Exception) -> Response:
    """The answer to an error nobody foresaw."""
    # The trace goes to the log alone: a page may be read by others.
    log.error("%s %s failed", request.method, request.scope["path"], exc_info=wrong)
    return answer(request, Refused(500, "internal", "this is a fault of ours; the server's log has its trace"))


def unavailable(wrong: Exception) -> Refused:
    """The answer when something we rest on is away: a database, a storage, a target. Later may be better."""
    log.warning("unavailable: %s", wrong)
    if isinstance(wrong, backlog.GONE):
        # The driver's own words hold the statement and its values.
        return Refused(503, "database_away", "the database cannot be asked now; nothing was changed", headers=_LATER)
    code = {StorageError: "storage_away", TargetError: "target_away"}
    kind = next((word for base, word in code.items() if isinstance(wrong, base)), "store_away")
    return Refused(503, kind, str(wrong), headers=_LATER)


def for_programs(request: Request) -> bool:
    """Whether JSON is the right answer here; people get a page."""
    path: str = request.scope["path"]  # not of `request.url`, in which the Host header has a say
    return path.startswith(_PROGRAM)


def answer(request: Request, wrong: Refused) -> Response:
    """A refusal in the words of whoever asked."""
    if for_programs(request):
        body: dict[str, object] = {"code": wrong.code, "message": wrong.message}
        if wrong.faults:
            body["faults"] = [{"path": fault.path, "message": fault.message} for fault in wrong.faults]
        return JSONResponse({"error": body}, status_code=wrong.status, headers=dict(wrong.headers))
    page = render("error.html", status_code=wrong.status, status=wrong.status, message=wrong.message)
    page.headers.update(wrong.headers)
    return page
