"""Send what the server measured to a collector, beside the requests: a collector that is away costs no answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainmaster.web.metrics import METHODS, UNMEASURED
from trainmaster.web.otlp.encode import Span, encode_metrics, encode_traces
from trainmaster.web.otlp.settings import Otlp

if TYPE_CHECKING:
    from prometheus_client import Metric

log = logging.getLogger(__name__)
_MOST_SPANS = 2048  # that wait; later ones are dropped
_BATCH = 512
_EVERY_S = 5.0  # between two exports of spans, as the SDKs of OpenTelemetry have it
_QUIET_S = 300.0  # between two log lines about a collector that is away
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


class Exporter:
    """Spans that wait, and the loop that sends them and the metrics. Of one event loop."""

    def __init__(self, settings: Otlp) -> None:
        self._settings, self._spans = settings, deque[Span]()
        self._since_ns = time.time_ns()
        self.dropped = 0
        self._complained = -_QUIET_S

    @property
    def traces(self) -> bool:
        return self._settings.traces is not None

    def sample(self, parent: str) -> tuple[bytes, bytes] | None:
        """Trace and parent of a request whose span is kept; None where it is not. `parent` is its traceparent."""
        match = _PARENT.fullmatch(parent)
        if match is not None and int(match[1], 16) and int(match[2], 16):
            trace, span = bytes.fromhex(match[1]), bytes.fromhex(match[2])
            sampled = bool(int(match[3], 16) & 1) if self._settings.by_parent else self._draw(trace)
            return (trace, span) if sampled else None
        trace = secrets.token_bytes(16)
        return (trace, b"") if self._draw(trace) else None

    def _draw(self, trace: bytes) -> bool:
        return int.from_bytes(trace[8:], "big") < self._settings.ratio * (1 << 64)

    def add(self, span: Span) -> None:
        if len(self._spans) >= _MOST_SPANS:
            self.dropped += 1
        else:
            self._spans.append(span)

    @contextlib.asynccontextmanager
    async def running(self, collect: Callable[[], Iterable[Metric]]) -> AsyncIterator[None]:
        """Export while the server runs, and once more when it ends. `collect` reads the metrics, in a thread."""
        stop = asyncio.Event()
        loops = [asyncio.create_task(self._every(_EVERY_S, self.send_spans, stop), name="traces")]
        if self._settings.metrics is not None:
            send = self._metrics(collect)
            loops.append(asyncio.create_task(self._every(self._settings.interval_s, send, stop), name="otlp metrics"))
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*loops, return_exceptions=True)

    async def _every(self, interval_s: float, act: Callable[[], Awaitable[None]], stop: asyncio.Event) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), interval_s)
            last = stop.is_set()
            try:
                await act()
            except Exception as error:  # whatever the database or the network does, the next export is tried
                self._complain(type(error).__name__)
            if last:
                return

    async def send_spans(self) -> None:
        """Send the spans that wait."""
        while self._spans and self._settings.traces is not None:
            batch = [self._spans.popleft() for _ in range(min(_BATCH, len(self._spans)))]
            await self._post(self._settings.traces, encode_traces(batch, self._settings.resource))

    def _metrics(self, collect: Callable[[], Iterable[Metric]]) -> Callable[[], Awaitable[None]]:
        async def send() -> None:
            def encode() -> bytes:
                times = {"since_ns": self._since_ns, "now_ns": time.time_ns()}
                return encode_metrics(collect(), self._settings.resource, **times)

            assert self._settings.metrics is not None
            await self._post(self._settings.metrics, await run_in_threadpool(encode))

        return send

    async def _post(self, url: str, body: bytes) -> None:
        import httpx

        headers = {**self._settings.headers, "Content-Type": "application/x-protobuf"}
        try:
            async with (
                httpx.AsyncClient(timeout=self._settings.timeout_s, follow_redirects=False) as http,
                http.stream("POST", url, content=body, headers=headers) as answer,
            ):
                status = answer.status_code  # what else it says is not read
        except httpx.HTTPError as error:
            self._complain(type(error).__name__)
            return
        if status != 200:
            self._complain(f"HTTP {status}")

    def _complain(self, what: str) -> None:
        if time.monotonic() - self._complained >= _QUIET_S:
            self._complained = time.monotonic()
            log.warning("the OTLP collector took no traces or metrics (%s); what it missed is not sent again", what)


class TraceMiddleware:
    """A span for each request. Its name and attributes have the route's template, so that no id or token is in them."""

    def __init__(self, app: ASGIApp, *, exporter: Exporter) -> None:
        self._app, self._exporter = app, exporter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kept = None
        if scope["type"] == "http" and UNMEASURED not in scope.get("state", {}):
            kept = self._exporter.sample(Headers(scope=scope).get("traceparent", ""))
        if kept is None:
            await self._app(scope, receive, send)
            return
        began_ns, status = time.time_ns(), 500

        async def send_seen(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_seen)
        finally:
            trace, parent = kept
            self._exporter.add(
                Span(
                    trace_id=trace,
                    span_id=secrets.token_bytes(8),
                    parent_id=parent,
                    method=scope["method"] if scope["method"] in METHODS else "_OTHER",
                    route=getattr(scope.get("route"), "path", None) or "(none)",
                    status=status,
                    began_ns=began_ns,
                    ended_ns=time.time_ns(),
                )
            )
