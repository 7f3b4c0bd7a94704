"""Ways to an API server: in the name of another user, by another name of its certificate, and through a proxy."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.http11 import Request, Response

from kube import ADMIN, LIMITED, Kube
from trainmaster.core.errors import Unreachable, UsageError
from trainmaster.targets.kubernetes import websocket
from trainmaster.targets.kubernetes.client import Client
from trainmaster.targets.kubernetes.errors import Denied, Missing
from trainmaster.targets.kubernetes.kubeconfig import Access, load_access

pytestmark = pytest.mark.spawns
T = TypeVar("T")


def access(kube: Kube, tmp_path: Path, *, cluster: dict[str, Any] | None = None, **user: Any) -> Access:
    """Access of a kubeconfig with further fields of its cluster and its user."""
    document = yaml.safe_load(kube.kubeconfig().read_text())
    document["clusters"][0]["cluster"].update({"certificate-authority-data": None, **(cluster or {})})
    document["clusters"][0]["cluster"]["certificate-authority"] = str(kube.folder / "certs" / "apiserver.crt")
    document["users"][0]["user"].update(user)
    path = tmp_path / "config"
    path.write_text(yaml.safe_dump(document))
    return load_access(str(path), None)


def ask(given: Access, question: Callable[[Client], Awaitable[T]]) -> T:
    async def go() -> T:
        client = Client(given)
        try:
            return await question(client)
        finally:
            await client.close()

    return asyncio.run(go())


async def open_shell(client: Client) -> None:
    await client.open_socket("/api/v1/namespaces/default/pods/gone/exec", [("command", "ls")], ["v4.channel.k8s.io"])


async def review(client: Client) -> dict[str, Any]:
    """What the server takes the caller for, by the rights of a group that has all of them."""
    body = {"spec": {"resourceAttributes": {"verb": "delete", "resource": "nodes"}}}
    answer = await client.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
    found: dict[str, Any] = answer["status"]
    return found


def test_requests_are_sent_in_the_name_of_another_user(kube: Kube, tmp_path: Path) -> None:
    with pytest.raises(Denied, match="may not list nodes"):
        ask(access(kube, tmp_path, **{"as": "somebody"}), lambda client: client.list("/api/v1/nodes"))
    with pytest.raises(Denied, match="may not"):
        ask(access(kube, tmp_path, **{"as": "somebody"}), open_shell)
    groups = ["builders", "system:masters"]
    assert ask(access(kube, tmp_path, **{"as": "somebody", "as-groups": groups}), review)["allowed"] is True
    whole = {"as": "somebody", "as-uid": "7", "as-groups": ["builders"], "as-user-extra": {"Acme.com/Team": ["a", "b"]}}
    assert access(kube, tmp_path, **whole).impersonate == (
        ("Impersonate-User", "somebody"),
        ("Impersonate-Uid", "7"),
        ("Impersonate-Group", "builders"),
        ("Impersonate-Extra-acme.com%2Fteam", "a"),
        ("Impersonate-Extra-acme.com%2Fteam", "b"),
    )
    assert ask(access(kube, tmp_path, **whole), review)["allowed"] is False


def test_who_may_not_impersonate_is_refused(kube: Kube, tmp_path: Path) -> None:
    with pytest.raises(Denied, match="impersonate"):
        ask(access(kube, tmp_path, token=LIMITED, **{"as": "admin"}), lambda client: client.list("/api/v1/nodes"))


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ({"as-groups": ["g"]}, "need `as` too"), ({"as-uid": "7"}, "need `as` too"),
        ({"as-user-extra": {"a": ["b"]}}, "need `as` too"), ({"as": "a\r\nX-Evil: 1"}, "not a name"),
        ({"as": "a", "as-groups": "g"}, "is a list"), ({"as": "a", "as-groups": ["g\n"]}, "not a name"),
        ({"as": "a", "as-user-extra": {"k": "v"}}, "a list for each name"), ({"as": 7}, "not a name"),
    ],
)  # fmt: skip
def test_impersonation_that_is_none_is_refused(kube: Kube, tmp_path: Path, user: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        access(kube, tmp_path, **user)


def test_the_certificate_is_that_of_the_stated_name(kube: Kube, tmp_path: Path) -> None:
    named = access(kube, tmp_path, cluster={"tls-server-name": "kubernetes.default.svc"})
    assert "items" in ask(named, lambda client: client.list("/api/v1/nodes"))
    with pytest.raises(Missing, match="gone"):
        ask(named, open_shell)
    other = access(kube, tmp_path, cluster={"tls-server-name": "elsewhere.example"})
    for question in (lambda client: client.list("/api/v1/nodes"), open_shell):
        with pytest.raises(Unreachable, match=r"elsewhere\.example"):
            ask(other, question)


class Proxy:
    """A proxy that takes CONNECT and nothing else, and remembers for whom."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._pumps: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, place, _ = head.split(" ", 2)
        secret = next((line for line in head.split("\r\n") if line.lower().startswith("proxy-authorization")), "")
        self.asked.append(f"{method} {place} {secret.partition(': ')[2]}".strip())
        if "denied" in secret or method != "CONNECT":
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            writer.close()
            return
        host, _, port = place.rpartition(":")
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(65536):
                sink.write(piece)
                await sink.drain()
        except OSError:
            pass
        finally:
            sink.close()


@pytest.mark.parametrize("name", [None, "kubernetes.default.svc"], ids=["its own name", "another name"])
def test_requests_and_sockets_go_through_the_proxy(kube: Kube, tmp_path: Path, name: str | None) -> None:
    proxy = Proxy()

    async def go() -> None:
        async with proxy.running() as address:
            cluster = {"proxy-url": f"http://me:secret@{address}", "tls-server-name": name}
            given = access(kube, tmp_path, cluster=cluster)
            assert "secret" not in repr(given)
            client = Client(given)
            try:
                assert "items" in await client.list("/api/v1/nodes")
                with pytest.raises(Missing, match="gone"):
                    await open_shell(client)
            finally:
                await client.close()

    asyncio.run(go())
    place = kube.url.removeprefix("https://")
    assert proxy.asked == [f"CONNECT {place} Basic bWU6c2VjcmV0"] * 2


def test_a_proxy_that_is_not_there_is_unreachable(kube: Kube, tmp_path: Path) -> None:
    given = access(kube, tmp_path, cluster={"proxy-url": "http://127.0.0.1:1"})
    for question in (lambda client: client.list("/api/v1/nodes"), open_shell):
        with pytest.raises(Unreachable):
            ask(given, question)


@pytest.mark.parametrize("address", ["socks5://h:1", "proxy:3128", "http://", "http://h:0x", "http://h:99999"])
def test_a_proxy_that_is_none_is_refused_without_its_password(kube: Kube, tmp_path: Path, address: str) -> None:
    with pytest.raises(UsageError, match="write http://HOST:PORT"):
        access(kube, tmp_path, cluster={"proxy-url": address})


# The socket by itself, against a server of the test.


@asynccontextmanager
async def socket_server(
    tmp_path: Path, answer: Callable[[ServerConnection], Awaitable[None]], **more: Any
) -> AsyncIterator[tuple[Access, Server]]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=x"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)  # noqa: ASYNC221 (nothing else runs yet)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    async with serve(answer, "127.0.0.1", 0, ssl=tls, max_size=None, subprotocols=["v4"], **more) as server:  # type: ignore[list-item]
        port = next(iter(server.sockets)).getsockname()[1]
        yield Access(server=f"https://127.0.0.1:{port}/prefix", ca=cert.read_text(), token=ADMIN), server


def test_messages_come_whole_and_in_both_directions(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    async def answer(connection: ServerConnection) -> None:
        assert connection.request is not None
        seen.update(path=connection.request.path, token=connection.request.headers["Authorization"])
        seen["agent"] = connection.request.headers["User-Agent"]
        await (await connection.ping())
        await connection.send([b"in ", b"parts"])
        await connection.send("text")
        async for message in connection:
            await connection.send(message)
            if len(message) > 1_000_000:
                return

    async def go() -> None:
        async with socket_server(tmp_path, answer) as (given, _):
            client = Client(given)
            socket = await client.open_socket("/exec", [("command", "a b"), ("command", "ü")], ["v4"])
            assert [await socket.receive(), await socket.receive()] == [b"in parts", b"text"]
            for size in (0, 125, 126, 70_000, 2_000_000):
                await socket.send(b"\x01" * size)
                assert await socket.receive() == b"\x01" * size
            assert await socket.receive() is None
            with pytest.raises(Unreachable, match="ConnectionClosed"):
                await socket.send(b"late")
            await socket.close()

    asyncio.run(go())
    assert seen["path"] == "/prefix/exec?command=a+b&command=%C3%BC" and seen["token"] == f"Bearer {ADMIN}"
    assert seen["agent"].startswith("trainmaster/")


def test_a_message_that_is_too_large_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_MAX_MESSAGE_BYTES", 1000)

    async def answer(connection: ServerConnection) -> None:
        await connection.send(b"x" * 1001)
        await connection.wait_closed()

    async def go() -> None:
        async with socket_server(tmp_path, answer) as (given, _):
            socket = await Client(given).open_socket("/exec", [], ["v4"])
            with pytest.raises(Unreachable, match="too large"):
                await socket.receive()
            await socket.close()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [(404, Missing, "pods gone"), (403, Denied, "pods gone"), (500, Unreachable, "pods gone"), (302, Exception, "302")],
)
def test_a_refusal_has_the_message_of_its_body(
    tmp_path: Path, status: int, error: type[Exception], message: str
) -> None:
    asked = []

    def refuse(connection: ServerConnection, request: Request) -> Response:
        asked.append(request.path)
        body = "" if status == 302 else '{"kind": "Status", "message": "pods gone"}'
        response = connection.respond(HTTPStatus(status), body)
        if status == 302:
            response.headers["Location"] = "/prefix/elsewhere"
        return response

    async def answer(connection: ServerConnection) -> None:
        await connection.wait_closed()

    async def go() -> None:
        async with socket_server(tmp_path, answer, process_request=refuse) as (given, _):
            with pytest.raises(error, match=message):
                await Client(given).open_socket("/exec", [], ["v4"])

    asyncio.run(go())
    assert asked == ["/prefix/exec"], "no redirect is followed"
