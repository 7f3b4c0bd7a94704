"""Requests to one server: what is sent with each, what is asked again and when, and how an error becomes ours."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trainmaster.client.errors import Refusal, ServerUnreachable, refusal
from trainmaster.core.backoff import backoff_s
from trainmaster.core.errors import MissingExtra, UsageError
from trainmaster.core.loopback import is_loopback_host

if TYPE_CHECKING:
    import httpx

_LATER = frozenset({429, 502, 503, 504})  # the server, or what stands before it, asks for patience
_REST_S, _LONGEST_S = 0.25, 8.0  # before the first repetition, and at most
_SILENT_S = 60.0  # an open stream gives a sign of life every 15 s (web/streaming.py)


class Wire:
    """A pool of connections to one server. May be shared by threads."""

    def __init__(self, url: str, token: str | None, *, timeout_s: float, retries: int) -> None:
        try:
            import httpx
        except ModuleNotFoundError as missing:
            raise MissingExtra("the client", "client") from missing
        self.url, self.retries = _check_url(url), retries
        self._errors = httpx.TransportError
        headers = {"Accept": "application/json"}
        if token is not None:
            # The HTTP library would name the whole header in its complaint.
            if not re.fullmatch(r"[\x21-\x7e]+", token):
                raise UsageError("the token has characters that no token has; is it the right file?")
            headers["Authorization"] = f"Bearer {token}"
        # A proxy for the outer world cannot reach this machine's own loopback.
        loopback = is_loopback_host(urlsplit(self.url).hostname or "")
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout_s, follow_redirects=False, trust_env=not loopback
        )
        self._streaming = httpx.Timeout(timeout_s, read=max(timeout_s, _SILENT_S))

    def close(self) -> None:
        self._http.close()

    def ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        again: bool = True,
        fine: frozenset[int] = frozenset(),
    ) -> httpx.Response:
        """One answer. With `again` it is asked again after a lost connection or a plea for patience.

        Errors are raised, but for the statuses in `fine`.
        """
        kept = {name: value for name, value in (params or {}).items() if value is not None}
        for turn in range(self.retries + 1 if again else 1):
            last = turn == self.retries or not again
            try:
                answer = self._http.request(method, path, params=kept, json=body, headers=dict(headers or {}))
            except self._errors as wrong:
                if last:
                    raise self._unreachable(wrong) from None
                time.sleep(rest(turn))
                continue
            if answer.status_code in _LATER and answer.status_code not in fine and not last:
                time.sleep(max(rest(turn), _asked_rest(answer)))
                continue
            if answer.is_success or answer.status_code in fine:
                return answer
            raise refusal(answer.status_code, _json(answer))
        raise AssertionError("the last turn answers or raises")

    @contextlib.contextmanager
    def stream(
        self, path: str, *, params: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> Iterator[httpx.Response]:
        """An answer that is read while it comes. A connection that is lost meanwhile is `Lost`."""
        kept = {name: value for name, value in (params or {}).items() if value is not None}
        sent = dict(headers or {})
        try:
            with self._http.stream("GET", path, params=kept, headers=sent, timeout=self._streaming) as answer:
                if not answer.is_success:
                    answer.read()
                    raise refusal(answer.status_code, _json(answer))
                yield answer
        except self._errors as wrong:
            raise Lost(str(self._unreachable(wrong))) from None

    def _unreachable(self, wrong: Exception) -> ServerUnreachable:
        why = str(wrong) or type(wrong).__name__
        return ServerUnreachable(f"{self.url} cannot be reached: {why}; is `trainmaster serve` running there?")


class Lost(ServerUnreachable):
    """A stream was cut off, or could not be opened; it may be gone on with."""


def worth_waiting(wrong: Refusal | Lost) -> bool:
    """Whether a stream that ended like this is asked for again."""
    return isinstance(wrong, Lost) or wrong.status in _LATER


def rest(turn: int) -> float:
    """Seconds before the next repetition: longer each time, and never the same for two clients at once."""
    return backoff_s(turn + 1, first_s=_REST_S, longest_s=_LONGEST_S)


def server_sent(lines: Iterator[str]) -> Iterator[tuple[str, str, str]]:
    """(id, name, data) of each whole message of a stream of server-sent events; half a message is never given."""
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
                pass  # a comment is a sign of life; `retry` is for browsers


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
        raise UsageError("a server's address has no credentials in it; give the token by itself")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise UsageError(f"{url!r} is no address of a server; write for example http://127.0.0.1:8470")
    return url.rstrip("/")
