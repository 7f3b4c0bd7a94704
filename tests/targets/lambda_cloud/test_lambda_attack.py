"""The account under attack: a key that is replaced, an instance that will not end, hostile addresses and settings."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from targets.lambda_cloud.test_lambda_client import FAST, LAUNCH, LAUNCHED, Api, answer, error
from trainmaster import targets
from trainmaster.core.errors import TargetError, UsageError
from trainmaster.targets.lambda_cloud import errors
from trainmaster.targets.lambda_cloud.client import ApiKey, Client
from trainmaster.targets.lambda_cloud.provider import LambdaCloud
from trainmaster.targets.lambda_cloud.rates import Rates
from trainmaster.targets.lambda_cloud.settings import read_settings


class Picky(Api):
    """Accepts one key; terminates every instance but one."""

    def __init__(self, key: str, stuck: str = "") -> None:
        super().__init__(answer(200, {"data": []}))
        self._accepted, self._stuck = key, stuck

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                headers = {}
                while (header := (await reader.readline()).strip()) != b"":
                    name, _, value = header.decode().partition(": ")
                    headers[name.lower()] = value
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests.append((line.decode().rpartition(" ")[0], headers, body))
                status, _, content = self._answer(line, headers, body)
                writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
        except asyncio.CancelledError:
            return  # the end of the test
        finally:
            writer.close()

    def _answer(self, line: bytes, headers: dict[str, str], body: bytes) -> Any:
        if headers["authorization"] != f"Bearer {self._accepted}":
            return error(401, "global/invalid-api-key")
        if b"/launch" in line:
            return answer(200, LAUNCHED)
        if b"/terminate" in line:
            ids = json.loads(body)["instance_ids"]
            gone = answer(200, {"data": {"terminated_instances": []}})
            return error(409, "global/conflict") if self._stuck in ids else gone
        return answer(200, {"data": []})


def serve(api: Api, work: Any) -> Any:
    async def go() -> Any:
        server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
        try:
            return await work(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        finally:
            await targets.close()
            server.close()

    return asyncio.run(go())


def test_a_key_that_was_replaced_is_read_again_and_a_launch_is_sent_once() -> None:
    keys = ["old-key-0123456789"]
    api = Picky("new-key-0123456789")

    async def work(url: str) -> None:
        rates = Rates(request_s=0.0, launch_s=0.0)
        client = Client(url, ApiKey(keys[0]), rates, times=FAST, reread=lambda: ApiKey(keys[0]))
        with pytest.raises(errors.InvalidKey):
            await client.list_instances()
        assert len(api.requests) == 1, "the same key is not tried again"
        keys[0] = "new-key-0123456789"
        assert await client.list_instances() == []
        assert await client.launch(LAUNCH) == LAUNCHED["data"]["instance_ids"][0]
        assert sum("/launch" in line for line, _, _ in api.requests) == 1
        await client.close()

    serve(api, work)


def test_a_server_uses_the_new_key_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text("old-key-0123456789")
    api = Picky("new-key-0123456789")

    async def work(url: str) -> None:
        for name, value in {"LAMBDA_API_URL": url, "LAMBDA_API_KEY_FILE": str(file), "LAMBDA_PACE": "1000"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("LAMBDA_API_KEY", raising=False)
        cloud = LambdaCloud()
        with pytest.raises(errors.InvalidKey):
            await cloud.list_instances()
        file.write_text("new-key-0123456789")
        assert await cloud.list_instances() == []

    serve(api, work)


def test_an_instance_that_cannot_be_terminated_keeps_no_other_running(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Picky("key-0123456789", stuck="stuck")

    async def work(url: str) -> None:
        for name, value in {"LAMBDA_API_URL": url, "LAMBDA_API_KEY": "key-0123456789", "LAMBDA_PACE": "1000"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(TargetError, match="conflict"):
            await LambdaCloud().terminate(["stuck", "second", "third"])

    serve(api, work)
    assert [json.loads(body)["instance_ids"] for _, _, body in api.requests] == [["stuck"], ["second"], ["third"]]


@pytest.mark.parametrize("host", ["127.0.0.1.example.org", "127.example.org", "0.0.0.0", "localhost.example.org"])
def test_a_name_that_looks_like_this_machine_gets_no_key_in_clear_text(host: str) -> None:
    with pytest.raises(UsageError, match="clear text"):
        Client(f"http://{host}", ApiKey("key-0123456789"), Rates(request_s=0, launch_s=0))


@pytest.mark.parametrize("port", ["70000", "0.5", "-1", "nan", "22x", "1e14"])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(UsageError, match="LAMBDA_SSH_PORT"):
        read_settings({"LAMBDA_SSH_PORT": port})


def test_a_quoted_tilde_in_the_key_file_is_the_home_folder() -> None:
    key = read_settings({"LAMBDA_SSH_KEY_FILE": "~/.ssh/x"}).access.key
    assert key == str(Path.home() / ".ssh" / "x")
