"""HTTP requests to one server: headers, retries with back-off, and errors of the API as exceptions."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from trainmaster.client.errors import Refusal, ServerUnreachable, refusal
from trainmaster.core.backoff import backoff_s
from trainmaster.core.errors import MissingExtra, UsageError
from trainmaster.core.loopback import is_loopback_host

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
_LATER = frozenset({429, 502, 503, 504})  # the server, or a proxy before it, is busy or restarting
_REST_S, _LONGEST_S = 0.25, 8.0  # first and longest delay before a retry
_SAY_S = 1.0  # a longer wait is told
_SILENT_S = 60.0  # an open stream has a heartbeat at least every 15 s (web/streaming.py)


class Transport:
    """Connection pool of one server. Threads may share it."""

    def __init__(
        self, url: str, token: str | None, *, timeout_s: float, retries: int, on_wait: Callable[[str], None] | None
    ) -> None:
        try:
            import httpx
        except ModuleNotFoundError as missing:
            raise MissingExtra("the client", "client") from missing
        self.url, self.retries, self._on_wait = _check_url(url), retries, on_wait
        self._errors = httpx.TransportError
        headers = {"Accept": "application/json"}
        if token is not None:
            # The HTTP library would print the whole header in its error.
            if not re.fullmatch(r"[\x21-\x7e]+", token):
                raise UsageError("the token has invalid characters; check that it is the right file")
            headers["Authorization"] = f"Bearer {token}"
        # A proxy from the environment cannot reach the loopback of this machine.
        loopback = is_loopback_host(urlsplit(self.url).hostname or "")
        # The authorities that the environment names count on loopback too.
        trusted = httpx.create_ssl_context() if self.url.startswith("https:") else True
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout_s, follow_redirects=False, trust_env=not loopback,
            verify=trusted,
        )  # fmt: skip
        self._timeout_s, self._limit, self._late = timeout_s, httpx.Timeout, httpx.ReadTimeout
        self._streaming = httpx.Timeout(timeout_s, read=max(timeout_s, _SILENT_S))

    def close(self) -> None:
        self._http.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: object = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        again: bool = True,
        fine: frozenset[int] = frozenset(),
        more_s: float = 0.0,
    ) -> httpx.Response:
        """One request. With `again` it is retried after a lost connection, 429, 502, 503 and 504.

        Errors are raised, except the statuses in `fine`. `more_s`: what the server is known to take, over the time-out.
        """
        wait_s = self._timeout_s + more_s
        kept = {name: value for name, value in (params or {}).items() if value is not None}
        for turn in range(self.retries + 1 if again else 1):
            last = turn == self.retries or not again
            try:
                answer = self._http.request(
                    method, path, params=kept, json=body, content=content, headers=dict(headers or {}),
                    timeout=self._limit(self._timeout_s, read=wait_s),
                )  # fmt: skip
            except self._errors as error:
                why = self._unreachable(error, wait_s=wait_s)
                if last or isinstance(why, Untrusted):
                    raise why from None
                self._rest(turn, why if isinstance(why, NoAnswer) else error, tell=isinstance(why, NoAnswer))
                continue
            if answer.status_code in _LATER and answer.status_code not in fine and not last:
                self._rest(turn, refusal(answer.status_code, _json(answer)), asked_s=_asked_rest(answer))
                continue
            if answer.is_success or answer.status_code in fine:
                return answer
            raise refusal(answer.status_code, _json(answer))
        raise AssertionError("the last turn returns or raises")

    @contextlib.contextmanager
    def stream(
        self, path: str, *, params: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[httpx.Response]:
        """A streamed answer. A connection that breaks raises `Lost`."""
        kept = {name: value for name, value in (params or {}).items() if value is not None}
        sent = dict(headers or {})
        try:
            with self._http.stream("GET", path, params=kept, headers=sent, timeout=self._streaming) as answer:
                if not answer.is_success:
                    answer.read()
                    raise refusal(answer.status_code, _json(answer))
                yield answer
        except self._errors as error:
            reason = self._unreachable(error)
            raise (reason if isinstance(reason, Untrusted) else Lost(str(reason))) from None

    def reopen(self, opened: Callable[[], Generator[T, None, bool]]) -> Iterator[T]:
        """Items of a stream across reconnects. `opened` opens it at its present position and returns whether it is
        complete; it is opened again with back-off, at most `retries` times in a row without an item."""
        turn, why = 0, Exception("the stream ended early")
        while True:
            stream = opened()
            try:
                while True:
                    item = next(stream)
                    turn = 0
                    yield item
            except StopIteration as end:
                if end.value:
                    return
            except (Refusal, Lost) as error:
                if turn >= self.retries or not _worth_waiting(error):
                    raise
                why = error
            finally:
                stream.close()
            self._rest(turn, why)
            turn += 1

    def _rest(self, turn: int, error: Exception, *, asked_s: float = 0.0, tell: bool = False) -> None:
        """Wait before the next try, and say so where a person would wonder, or has waited already (`tell`)."""
        rest_s = max(backoff_s(turn + 1, first_s=_REST_S, longest_s=_LONGEST_S), asked_s)
        if (rest_s > _SAY_S or tell) and self._on_wait is not None:
            what = str(error) if str(error).startswith(self.url) else f"{self.url}: {error}"
            when = f" in {rest_s:.0f} s" if rest_s > _SAY_S else ""
            self._on_wait(f"{what}; trying again{when} ({turn + 1} of {self.retries})")
        time.sleep(rest_s)

    def _unreachable(self, error: Exception, *, wait_s: float | None = None) -> ServerUnreachable:
        if wait_s is not None and isinstance(error, self._late):
            return NoAnswer(f"{self.url} did not answer within {wait_s:.3g} s; it may still do what was asked")
        why = str(error) or type(error).__name__
        if _is_untrusted(error):
            return Untrusted(
                f"the certificate of {self.url} is not trusted here: {why}; for a certificate of your own set "
                "SSL_CERT_FILE to the PEM file of the authority that signed it"
            )
        return ServerUnreachable(f"{self.url} cannot be reached: {why}; is `trainmaster serve` running there?")


class NoAnswer(ServerUnreachable):
    """The request was sent, and no answer came in time. What it asks for may be done or not."""


class Untrusted(ServerUnreachable):
    """The certificate of the server could not be verified. A retry cannot help."""


class Lost(ServerUnreachable):
    """A stream broke or could not be opened. It can be reopened."""


def _is_untrusted(error: Exception) -> bool:
    return "CERTIFICATE_VERIFY_FAILED" in str(error)


def _worth_waiting(error: Refusal | Lost) -> bool:
    """Whether a stream that failed like this is reopened."""
    return isinstance(error, Lost) or error.status in _LATER


def server_sent(lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    """(id, name, data) of each complete message of a server-sent event stream."""
    place, name, data = "", "message", list[str]()
    for line in lines:
        if not line:
            if data:
                yield place, name, "\n".join(data)
            name, data = "message", []
            continue
        key, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match key:
            case "id":
                place = value
            case "event":
                name = value
            case "data":
                data.append(value)
            case _:
                pass  # a comment is a heartbeat; `retry` is for browsers


def _asked_rest(answer: httpx.Response) -> float:
    asked = answer.headers.get("retry-after", "")
    return min(60.0, float(asked)) if asked.isdecimal() else 0.0


def _json(answer: httpx.Response) -> object:
    try:
        return json.loads(answer.content)
    except ValueError:
        return None


def _check_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if parts.username is not None or parts.password is not None:
        raise UsageError("a server URL must not contain credentials; give the token by itself")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise UsageError(f"{url!r} is not a server URL; write for example http://127.0.0.1:8470")
    return url.rstrip("/")
