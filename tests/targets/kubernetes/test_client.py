"""The client of the API: a request that is cut off leaves no connection behind."""

from __future__ import annotations

import asyncio

import pytest

from trainmaster.core.errors import Unreachable
from trainmaster.targets.kubernetes import client as module
from trainmaster.targets.kubernetes.client import Client
from trainmaster.targets.kubernetes.kubeconfig import Access

pytestmark = pytest.mark.spawns


@pytest.mark.parametrize("way", ["cancelled", "timeout", "stream"])
def test_a_handshake_that_is_cut_off_closes_its_connection(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server takes the connection and never answers, as it does while it starts."""

    async def go() -> None:
        begun, ended = asyncio.Event(), asyncio.Event()

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            begun.set()
            while await reader.read(4096):
                pass
            ended.set()
            writer.close()

        server = await asyncio.start_server(take, "127.0.0.1", 0)
        client = Client(Access(server=f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        if way == "timeout":
            monkeypatch.setattr(module, "_REQUEST_S", 0.3)
            with pytest.raises(Unreachable, match="no answer"):
                await client.get("/version")
        else:
            asked = client.get("/version") if way == "cancelled" else anext(client.lines("/log", {}))
            task = asyncio.ensure_future(asked)
            async with asyncio.timeout(20):
                await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        async with asyncio.timeout(5):
            await ended.wait()
        await client.close()
        server.close()

    asyncio.run(go())
