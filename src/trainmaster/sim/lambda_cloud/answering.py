"""From a request to an answer: authentication, rate limits, the schema, the operation, and faults of answers."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainmaster.core.vendors.lambda_api import Operation, find_faults, find_operation
from trainmaster.sim.lambda_cloud import operations
from trainmaster.sim.lambda_cloud.cloud import Cloud
from trainmaster.sim.lambda_cloud.errors import ApiError, invalid
from trainmaster.sim.lambda_cloud.limits import Limits
from trainmaster.sim.lambda_cloud.summary import Requests

JSON, HTML = "application/json", "text/html; charset=utf-8"
_INTERNAL = ("global/internal-error", "An internal server error occurred.", "Try again later.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One HTTP request; header names in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is sent after `delay_s` simulated seconds. `cut`: the connection ends without an answer."""

    status: int
    body: bytes
    content_type: str = JSON
    delay_s: float = 0.0
    cut: bool = False


class Answering:
    """Answers of the vendor's paths."""

    def __init__(self, cloud: Cloud, *, api_key: str) -> None:
        self.cloud, self._api_key = cloud, api_key
        self.requests = Requests()
        self.limits = Limits(factor=cloud.clock.factor)
        self._refusals: list[ApiError] = []
        self._lock = threading.Lock()

    def refuse_next(self, status: int, code: str) -> None:
        """Answer the next request with this error."""
        with self._lock:
            self._refusals.append(ApiError(status, code, "Refused for a test."))

    def answer(self, request: Request) -> Answer:
        """The answer, counted by its status."""
        answer = self._answer(request)
        with self._lock:
            self.requests.by_status["cut" if answer.cut else str(answer.status)] += 1
        return answer

    def _answer(self, request: Request) -> Answer:
        if request.headers.get("user-agent", "").startswith("Python-urllib"):
            return Answer(status=403, body=b"<html><body>error code: 1010</body></html>\n", content_type=HTML)
        if not self.knows(request.headers.get("authorization", "")):
            text = "API key was invalid, expired, or deleted."
            return _refuse(ApiError(401, "global/invalid-api-key", text, "Check your API key."))
        operation = find_operation(request.method, request.path)
        launch = operation is not None and operation.name == "launchInstance"
        with self._lock:
            allowed = self.limits.allows(launch=launch, now_s=self.cloud.clock.now_s())
        if not allowed:
            return _too_many()
        if operation is None:
            return _refuse(ApiError(404, "global/not-found", "The requested resource was not found."))
        with self._lock:
            self.requests.by_operation[operation.name] += 1
        return self._fault_before() or self._fault_after(operation, self._run(operation, request))

    def knows(self, header: str) -> bool:
        """Whether the Authorization header holds the key: Bearer, or Basic with the key as user name or bare."""
        scheme, _, given = header.partition(" ")
        given = given.strip()
        words = [given]
        if scheme.lower() == "basic":
            with contextlib.suppress(binascii.Error, UnicodeDecodeError):
                words.append(base64.b64decode(given, validate=True).decode().partition(":")[0])
        elif scheme.lower() != "bearer":
            return False
        return any(hmac.compare_digest(word.encode(), self._api_key.encode()) for word in words)

    def _run(self, operation: Operation, request: Request) -> Answer:
        try:
            body = self._read_body(operation, request)
            path_id = request.path.rpartition("/")[2]
            answer: dict[str, Any] = {"data": operations.run(operation.name, self.cloud, path_id=path_id, body=body)}
            status = 200
        except ApiError as refusal:
            status, answer = refusal.status, refusal.body()
        wanted = operation.responses.get(status)
        faults = find_faults(wanted, answer) if wanted is not None else [f"status {status} is undocumented"]
        with self._lock:
            self.requests.schema_faults += [f"{operation.name} {status}: {fault}" for fault in faults]
        return Answer(status=status, body=json.dumps(answer).encode())

    def _read_body(self, operation: Operation, request: Request) -> Mapping[str, Any]:
        if operation.request is None:
            return {}
        try:
            body = json.loads(request.body)
        except ValueError:
            raise invalid("The body is not JSON.") from None
        if faults := find_faults(operation.request, body):
            raise invalid("; ".join(str(fault) for fault in faults))
        known = operation.request.get("properties", {})
        with self._lock:
            self.requests.unknown_fields.update(f"{operation.name}.{name}" for name in body if name not in known)
        return dict(body)

    def _fault_before(self) -> Answer | None:
        """Refusals before anything happens."""
        with self._lock, self.cloud.lock:
            if self._refusals:
                return _refuse(self._refusals.pop(0))
            happens = self.cloud.faults.happens
            if happens("rate-limit"):
                return _too_many()
            if happens("rate-limit-empty"):
                return Answer(status=429, body=b"")
            if happens("error-500"):
                as_html = self.cloud.faults.injected["error-500"] % 2 == 0
                page = b"<html><head><title>502 Bad Gateway</title></head></html>\n"
                return (
                    Answer(status=502, body=page, content_type=HTML) if as_html else _refuse(ApiError(500, *_INTERNAL))
                )
        return None

    def _fault_after(self, operation: Operation, answer: Answer) -> Answer:
        """Faults of the answer to a request that was done."""
        with self._lock, self.cloud.lock:
            faults = self.cloud.faults
            if operation.name == "launchInstance" and answer.status == 200:
                if faults.happens("launch-500"):
                    return _refuse(ApiError(500, *_INTERNAL))
                if faults.happens("launch-timeout"):
                    return Answer(status=0, body=b"", cut=True, delay_s=faults.delay_s("launch-timeout"))
                if faults.happens("launch-cut"):
                    return Answer(status=0, body=b"", cut=True)
            if faults.happens("garbled-json"):
                return Answer(status=answer.status, body=answer.body[: len(answer.body) * 2 // 3] + b"\x00{")
            if faults.happens("slow-answer"):
                return Answer(status=answer.status, body=answer.body, delay_s=faults.delay_s("slow-answer"))
        return answer


def _refuse(refusal: ApiError) -> Answer:
    return Answer(status=refusal.status, body=json.dumps(refusal.body()).encode())


def _too_many() -> Answer:
    """The body of a 429 is undocumented; a client may rely on the status alone."""
    return _refuse(ApiError(429, "global/too-many-requests", "Too many requests.", "Wait before the next request."))
