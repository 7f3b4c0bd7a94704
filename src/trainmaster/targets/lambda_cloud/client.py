"""Client of the Lambda Cloud API: the operations that renting needs, each answer held to the vendor's schema.

Requests that change nothing, and terminate, are repeated after 429, 5xx, a lost connection or an answer that does not
fit the schema, until their deadline. A launch is sent once: what is not a clear refusal is Unreachable, its outcome
unknown. The key is sent in the Authorization header and appears nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from trainmaster import __version__
from trainmaster.core.backoff import backoff_s
from trainmaster.core.errors import MissingExtra, TargetError, Unreachable, UsageError
from trainmaster.core.loopback import is_loopback_host
from trainmaster.core.vendors import lambda_api
from trainmaster.targets._provider import NotNow
from trainmaster.targets.lambda_cloud.errors import InvalidKey, refusal
from trainmaster.targets.lambda_cloud.rates import Rates

if TYPE_CHECKING:
    import httpx

_MAX_ANSWER_BYTES = 16 << 20
_STRICT = frozenset({"launchInstance", "addSSHKey"})  # operations of which the whole answer has to fit the schema
# The API refuses the default user agent of some libraries with 403.
_USER_AGENT = f"trainmaster/{__version__}"


class ApiKey:
    """A secret that is neither printed nor compared by accident."""

    def __init__(self, text: str) -> None:
        self._text = text.strip()
        if not self._text or not self._text.isascii() or not self._text.isprintable() or " " in self._text:
            raise UsageError("lambda: the API key is empty or has characters that no key has")

    def header(self) -> str:
        return f"Bearer {self._text}"

    def hide(self, text: str) -> str:
        """The text without the key, should an answer repeat it."""
        return text.replace(self._text, "[key]")

    def __repr__(self) -> str:
        return "ApiKey(…)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds: one request, a request with all its repetitions, a launch, and between repetitions."""

    request_s: float = 15.0
    deadline_s: float = 60.0
    launch_s: float = 60.0
    first_rest_s: float = 1.0


class Client:
    """One account of the API, in one event loop."""

    def __init__(
        self,
        url: str,
        key: ApiKey,
        rates: Rates,
        *,
        times: Times | None = None,
        reread: Callable[[], ApiKey] | None = None,
    ) -> None:
        """`reread` gives the key as it is now: a server outlives its key."""
        self._url, self._key, self.rates, self._reread = _checked(url), key, rates, reread
        self._times = times if times is not None else Times()
        self._http: httpx.AsyncClient | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def list_types(self) -> Mapping[str, Any]:
        """Instance types by name, with price and regions that have capacity."""
        return dict(await self._repeat("listInstanceTypes"))

    async def list_instances(self) -> list[dict[str, Any]]:
        return list(await self._repeat("listInstances"))

    async def get_instance(self, instance_id: str) -> dict[str, Any]:
        return dict(await self._repeat("getInstance", id=instance_id))

    async def launch(self, body: Mapping[str, Any]) -> str:
        """Launch one instance; its id. Sent once: Unreachable means that the outcome is unknown."""
        await self.rates.turn()
        self.rates.note_launch()
        try:
            data = await self._send("launchInstance", body, limit_s=self._times.launch_s)
        except InvalidKey:  # a clear refusal: nothing was launched
            if not await self._renew_key():
                raise
            await self.rates.turn()
            data = await self._send("launchInstance", body, limit_s=self._times.launch_s)
        ids = data["instance_ids"]
        if len(ids) != 1:
            raise Unreachable(f"lambda: launch answered with {len(ids)} instances instead of one")
        return str(ids[0])

    async def terminate(self, ids: Sequence[str]) -> None:
        await self._repeat("terminateInstance", {"instance_ids": list(ids)})

    async def restart(self, ids: Sequence[str]) -> None:
        await self._repeat("restartInstance", {"instance_ids": list(ids)})

    async def list_ssh_keys(self) -> list[dict[str, Any]]:
        return list(await self._repeat("listSSHKeys"))

    async def add_ssh_key(self, name: str, public_key: str) -> dict[str, Any]:
        """Register a public key. Sent once: a second key of that name would be refused."""
        await self.rates.turn()
        body = {"name": name, "public_key": public_key}
        return dict(await self._send("addSSHKey", body, limit_s=self._times.request_s))

    async def list_file_systems(self) -> list[dict[str, Any]]:
        return list(await self._repeat("listFilesystems"))

    async def list_regions(self) -> list[dict[str, Any]]:
        return list(await self._repeat("listRegions"))

    async def _repeat(self, name: str, body: Mapping[str, Any] | None = None, **parts: str) -> Any:
        """Send until there is an answer, or the deadline is over."""
        until, failures = time.monotonic() + self._times.deadline_s, 0
        while True:
            await self.rates.turn()
            try:
                return await self._send(name, body, limit_s=self._times.request_s, **parts)
            except InvalidKey:
                if not await self._renew_key():
                    raise
            except (Unreachable, NotNow) as error:
                failures += 1
                rest_s = backoff_s(failures, first_s=self._times.first_rest_s, longest_s=15.0)
                if time.monotonic() + rest_s >= until:
                    raise Unreachable(f"{error}; tried {failures} times") from None
                await asyncio.sleep(rest_s)

    async def _renew_key(self) -> bool:
        """Whether there is another key by now: one that was replaced needs no restart, and no machine waits for it."""
        try:
            key = await asyncio.to_thread(self._reread) if self._reread is not None else self._key
        except UsageError:
            return False
        changed, self._key = key.header() != self._key.header(), key
        return changed

    async def _send(self, name: str, body: Mapping[str, Any] | None, *, limit_s: float, **parts: str) -> Any:
        """One request; the `data` of its answer."""
        operation = lambda_api.operations()[name]
        if operation.request is not None and (faults := lambda_api.find_faults(operation.request, body)):
            raise TargetError(f"lambda: {name}: the request does not fit the schema: {faults[0]}")
        path, http = operation.path.format(**parts), self._open()
        import httpx

        headers = {"Authorization": self._key.header()}
        try:
            async with asyncio.timeout(limit_s):
                answer = await http.request(operation.method, path, json=body, headers=headers)
        except TimeoutError:
            raise Unreachable(f"lambda: {name}: no answer of {_place(http)} within {limit_s:g} s") from None
        except (httpx.HTTPError, OSError) as error:
            text = self._key.hide(str(error))[:200]
            raise Unreachable(f"lambda: {name} at {_place(http)}: {type(error).__name__}: {text}") from None
        return self._judge(operation, answer)

    def _judge(self, operation: lambda_api.Operation, answer: httpx.Response) -> Any:
        status, document = answer.status_code, _parse(answer.content)
        if status == 200:
            faults = lambda_api.find_faults(operation.responses[200], document)
            # A field or a status that is new to us must not hide the others: an unseen instance cannot be terminated.
            if faults := [fault for fault in faults if fault.path in ("", "data") or operation.name in _STRICT]:
                raise Unreachable(f"lambda: {operation.name}: an answer that does not fit the schema: {faults[0]}")
            assert isinstance(document, dict)
            return document["data"]
        if status == 429:
            self.rates.pause(_retry_after(answer.headers.get("retry-after")))
        error = document.get("error") if isinstance(document, dict) else None
        words = error if isinstance(error, dict) else {}
        texts = (self._key.hide(str(words.get(part, ""))) for part in ("code", "message", "suggestion"))
        if status < 400:
            return _raise(Unreachable(f"lambda: {operation.name}: an answer with status {status}"))
        return _raise(refusal(operation.name, status, *texts))

    def _open(self) -> httpx.AsyncClient:
        if self._http is None:
            try:
                import httpx
            except ImportError:
                raise MissingExtra("Lambda Cloud", "lambda") from None
            headers = {"User-Agent": _USER_AGENT, "Accept": "application/json"}
            self._http = httpx.AsyncClient(base_url=self._url, headers=headers, timeout=None)  # noqa: S113 (see _send)
        return self._http


def _place(http: httpx.AsyncClient) -> str:
    """Host and port of the API, without a user's name or password."""
    return http.base_url.netloc.decode()


def _raise(error: TargetError) -> Any:
    raise error


def _checked(url: str) -> str:
    """The base URL; the key is sent in clear text to this machine only."""
    parts = urlsplit(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback_host(parts.hostname or "")):
        raise UsageError(f"lambda: {url!r} is not an https:// address; the API key would be sent in clear text")
    return f"{parts.scheme}://{parts.netloc}"


def _parse(content: bytes) -> Any:
    """The JSON of an answer; None where it is none. Its schema is checked by the caller."""
    if len(content) > _MAX_ANSWER_BYTES:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(content)
    return None


def _retry_after(value: str | None) -> float:
    """Seconds of a Retry-After header: a number or a date; a few seconds where there is none."""
    with contextlib.suppress(TypeError, ValueError):
        if value is not None and value.strip().isdecimal():
            return float(value)
        if value is not None:
            return parsedate_to_datetime(value).timestamp() - time.time()
    return 2.0
