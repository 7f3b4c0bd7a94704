"""Errors as answers: typed JSON for programs, a page in the same style for people."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from trainmaster.core.errors import Fault
from trainmaster.web.frame import render

log = logging.getLogger(__name__)
_PROGRAM = ("/v1/", "/api/", "/healthz")


class Refused(Exception):
    """A request that cannot be done, with the answer it gets."""

    def __init__(self, status: int, code: str, message: str, *, faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.faults = status, code, message, tuple(faults)


def not_found(job_id: str) -> Refused:
    return Refused(404, "not_found", f"there is no job {job_id}")


def install(app: FastAPI) -> None:
    """Teach the application to answer errors our way."""
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid)


async def _refused(request: Request, wrong: Exception) -> Response:
    assert isinstance(wrong, Refused)
    return _answer(request, wrong)


async def _http(request: Request, wrong: Exception) -> Response:
    assert isinstance(wrong, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(wrong.status_code, "refused")
    message = {404: "there is nothing at this address"}.get(wrong.status_code, str(wrong.detail))
    answer = _answer(request, Refused(wrong.status_code, code, message))
    answer.headers.update(wrong.headers or {})
    return answer


async def _invalid(request: Request, wrong: Exception) -> Response:
    assert isinstance(wrong, RequestValidationError)
    faults = [
        Fault(path=".".join(str(part) for part in item["loc"][1:]), message=str(item["msg"])) for item in wrong.errors()
    ]
    message = "; ".join(str(fault) for fault in faults)
    return _answer(request, Refused(422, "bad_request", message, faults=faults))


def broken(request: Request, wrong: Exception) -> Response:
    """The answer to an error nobody foresaw."""
    # The trace goes to the log alone: a page may be read by others.
    log.error("%s %s failed", request.method, request.url.path, exc_info=wrong)
    return _answer(request, Refused(500, "internal", "this is a fault of ours; the server's log has its trace"))


def _answer(request: Request, wrong: Refused) -> Response:
    if request.url.path.startswith(_PROGRAM):
        body: dict[str, object] = {"code": wrong.code, "message": wrong.message}
        if wrong.faults:
            body["faults"] = [{"path": fault.path, "message": fault.message} for fault in wrong.faults]
        return JSONResponse({"error": body}, status_code=wrong.status)
    return render("error.html", status_code=wrong.status, status=wrong.status, message=wrong.message)
