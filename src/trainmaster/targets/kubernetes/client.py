"""Client of the Kubernetes API over HTTP: apply, get, list, patch, delete, watch, logs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from trainmaster import __version__
from trainmaster.core.errors import MissingExtra, Unreachable
from trainmaster.targets.kubernetes import names
from trainmaster.targets.kubernetes.errors import parse, refusal
from trainmaster.targets.kubernetes.kubeconfig import Access, Credentials
from trainmaster.targets.kubernetes.manifests import RESOURCES
from trainmaster.targets.kubernetes.websocket import WebSocket, connect

if TYPE_CHECKING:
    import httpx

Object = dict[str, Any]
_REQUEST_S = 20.0
_SILENT_S = 90.0  # a watch ends by itself after 60 s; a longer silence is a dead connection
WATCH_S = 60
_CORE = {"ConfigMap": "configmaps", "Secret": "secrets", "Service": "services", "Pod": "pods", "Node": "nodes"}


def path_of(api: str, plural: str, *, namespace: str | None = None, name: str | None = None) -> str:
    """Path of a collection or an object."""
    root = f"/api/{api}" if "/" not in api else f"/apis/{api}"
    parts = [root, *(["namespaces", namespace] if namespace else []), plural, *([name] if name else [])]
    return "/".join(parts)


def path_of_object(item: Mapping[str, Any]) -> str:
    kind, metadata = str(item["kind"]), item["metadata"]
    plural = _CORE.get(kind) or next(resource.plural for resource in RESOURCES.values() if resource.kind == kind)
    return path_of(item["apiVersion"], plural, namespace=metadata.get("namespace"), name=metadata["name"])


class Client:
    """One API server, in one event loop."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._credentials = Credentials(access)
        self._http: httpx.AsyncClient | None = None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def apply(self, item: Mapping[str, Any], *, force: bool = False) -> Object:
        """Server-side apply: create the object, or find it as it should be. Taken where another manager changed it."""
        params = {"fieldManager": names.MANAGER, "force": str(force).lower()}
        body = json.dumps(item).encode()
        what = f"{item['kind']} {item['metadata']['name']}"
        made = await self.send(
            "PATCH", path_of_object(item), params=params, body=body, kind="application/apply-patch+yaml", what=what
        )
        if _metadata(made).get("name") != item["metadata"]["name"]:
            raise _no_answer(what, made)
        return made

    async def get(self, path: str) -> Object:
        return await self.send("GET", path)

    async def list(self, path: str, **params: str) -> Object:
        answer = await self.send("GET", path, params=params)
        items = answer.get("items", 0) or []  # `null` is an empty list of Go
        if (
            "items" not in answer
            or not isinstance(items, list)
            or not all(_metadata(item).get("name") for item in items)
        ):
            raise _no_answer(path.rpartition("/")[2], answer)
        return {**answer, "items": items}

    async def post(self, path: str, item: Mapping[str, Any]) -> Object:
        return await self.send("POST", path, body=json.dumps(item).encode())

    async def merge(self, path: str, change: Mapping[str, Any]) -> Object:
        """Merge patch."""
        return await self.send("PATCH", path, body=json.dumps(change).encode(), kind="application/merge-patch+json")

    async def delete(self, path: str, *, grace_s: int | None = None, **params: str) -> Object:
        given = {"propagationPolicy": "Background", **params}
        if grace_s is not None:
            given["gracePeriodSeconds"] = str(grace_s)
        return await self.send("DELETE", path, params=given)

    async def delete_by_uid(self, path: str, uid: str) -> Object:
        """Delete this very object; Taken where another one has its name since."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        return await self.send("DELETE", path, body=json.dumps(body).encode())

    async def send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        kind: str = "application/json",
        what: str = "",
    ) -> Object:
        """One request; the object that is its answer."""
        import httpx

        http = self._open()
        headers = [*(await self._credentials.headers()), *([("Content-Type", kind)] if body is not None else [])]
        try:
            async with asyncio.timeout(_REQUEST_S):
                answer = await http.request(
                    method, path, params=params, content=body, headers=headers, extensions=_watch_handshake()
                )
        except TimeoutError:
            raise Unreachable(f"kubernetes: no answer within {_REQUEST_S:g} s") from None
        except (httpx.HTTPError, OSError) as error:
            raise _unreachable(error) from None
        what = what or path.rpartition("/")[2]
        if answer.status_code == 401:
            self._credentials.forget()
        if answer.status_code >= 300:
            raise refusal(answer.status_code, parse(answer.content), what=what)
        try:
            document = json.loads(answer.content)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise _no_answer(what, answer.text)
        return document

    async def watch(self, path: str, version: str, **params: str) -> AsyncIterator[Object]:
        """Changes of a collection after a resource version; ends after some minutes. Expired: list again."""
        given = {
            **params, "watch": "true", "resourceVersion": version, "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }  # fmt: skip
        async for line in self.lines(path, given):
            change = parse(line)
            item = change.get("object") if isinstance(change, dict) else None
            if isinstance(change, dict) and change.get("type") == "ERROR":
                code = item.get("code") if isinstance(item, dict) else None
                raise refusal(code if isinstance(code, int) and code >= 300 else 500, item, what="watch")
            if not _metadata(item).get("resourceVersion"):
                raise _no_answer("watch", line.decode(errors="replace"))
            yield change

    async def lines(self, path: str, params: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Whole lines of an answer that goes on; a line that is cut off at the end is left out."""
        rest = b""
        async with self._stream(path, params) as answer:
            async for piece in answer.aiter_raw():
                *whole, rest = (rest + piece).split(b"\n")
                for line in whole:
                    yield line

    async def open_socket(self, path: str, query: Sequence[tuple[str, str]], protocols: Sequence[str]) -> WebSocket:
        """A WebSocket with one of the protocols."""
        return await connect(self.access, path, query, await self._credentials.headers(), protocols)

    @asynccontextmanager
    async def _stream(self, path: str, params: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        import httpx

        http = self._open()
        headers = await self._credentials.headers()
        limits = httpx.Timeout(_REQUEST_S, read=_SILENT_S)
        try:
            async with http.stream(
                "GET", path, params=params, headers=headers, timeout=limits, extensions=_watch_handshake()
            ) as answer:
                if answer.status_code >= 300:
                    raise refusal(answer.status_code, parse(await answer.aread()), what=path.rpartition("/")[2])
                yield answer
        except (httpx.HTTPError, OSError) as error:
            raise _unreachable(error) from None

    def _open(self) -> httpx.AsyncClient:
        if self._http is None:
            try:
                import httpx
            except ImportError:
                raise MissingExtra("Kubernetes", "kubernetes") from None
            self._http = httpx.AsyncClient(
                base_url=self.access.server,
                verify=self.access.tls(),
                proxy=self.access.proxy,
                headers={"User-Agent": f"trainmaster/{__version__}", "Accept": "application/json"},
                timeout=None,  # noqa: S113 (each request has its own)
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
                trust_env=False,
            )
        return self._http


def _metadata(item: object) -> Mapping[str, Any]:
    metadata = item.get("metadata") if isinstance(item, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _no_answer(what: str, answer: object) -> Unreachable:
    """For an answer of a proxy before the server, or one that was cut off: nothing is known."""
    return Unreachable(f"kubernetes: {what}: not an answer of an API server: {str(answer)[:100]!r}")


def _unreachable(error: Exception) -> Unreachable:
    return Unreachable(f"kubernetes: {type(error).__name__}: {str(error)[:200]}")


def _watch_handshake() -> dict[str, Any]:
    """Extension of a request that closes its connection where the TLS handshake is cancelled.

    httpcore 1.0 closes it after errors alone: a cancelled request would leave an open socket behind.
    """
    streams: list[Any] = []

    async def trace(event: str, facts: Mapping[str, Any]) -> None:
        if event.endswith(".connect_tcp.complete"):
            streams.append(facts["return_value"])
        elif event.endswith(".start_tls.failed") and streams:  # `proxy.` behind a proxy
            await streams.pop().aclose()

    return {"trace": trace}
