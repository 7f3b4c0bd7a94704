"""Client of the Lambda Cloud API against a real HTTP server: limits, repetitions, typed errors, and the key."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from trainmaster.core.errors import NoCapacity, TargetError, Unreachable, UsageError
from trainmaster.targets._provider import NotNow
from trainmaster.targets.lambda_cloud import errors
from trainmaster.targets.lambda_cloud.client import ApiKey, Client, Times
from trainmaster.targets.lambda_cloud.rates import Rates
from trainmaster.targets.lambda_cloud.settings import read_key, read_settings

SECRET = "secret_planted_0123456789abcdef"
LAUNCH = {"region_name": "us-west-1", "instance_type_name": "gpu_1x_a10", "ssh_key_names": ["me"], "name": "x"}
LAUNCHED = {"data": {"instance_ids": ["0920582c7ff041399e34823a0be62549"]}}
FAST = Times(request_s=1.5, deadline_s=6.0, launch_s=1.5, first_rest_s=0.01)

Answer = tuple[int, dict[str, str], bytes]


def answer(status: int, document: Any = None, **headers: str) -> Answer:
    return status, headers, b"" if document is None else json.dumps(document).encode()


def error(status: int, code: str) -> Answer:
    return answer(status, {"error": {"code": code, "message": f"told by {SECRET}", "suggestion": "try"}})


class Api:
    """A server that gives prepared answers, then the last one again; None: it does not answer."""

    def __init__(self, *answers: Answer | None) -> None:
        self.answers, self.requests = list(answers), list[tuple[str, dict[str, str], bytes]]()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                headers = {}
                while (header := (await reader.readline()).strip()) != b"":
                    name, _, value = header.decode().partition(": ")
                    headers[name.lower()] = value
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.requests.append((line.decode().rpartition(" ")[0], headers, body))
                given = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if given is None:
                    await reader.read()
                    return
                status, extra, content = given
                extra = {**{name.replace("_", "-"): value for name, value in extra.items()}, "X": "y"}
                head = "".join(f"{name}: {value}\r\n" for name, value in extra.items())
                writer.write(f"HTTP/1.1 {status} x\r\n{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
                await writer.drain()
        except asyncio.CancelledError:
            return  # the end of the test
        finally:
            writer.close()


def ask(api: Api, call: Callable[[Client], Coroutine[Any, Any, Any]], *, rates: Rates | None = None) -> Any:
    async def go() -> Any:
        server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client(
            f"http://127.0.0.1:{port}", ApiKey(SECRET), rates or Rates(request_s=0.0, launch_s=0.0), times=FAST
        )
        try:
            return await call(client)
        finally:
            await client.close()
            server.close()

    return asyncio.run(go())


def test_the_key_is_sent_as_bearer_with_a_user_agent_of_our_own() -> None:
    api = Api(answer(200, {"data": []}))
    assert ask(api, lambda client: client.list_instances()) == []
    line, headers, _ = api.requests[0]
    assert (line, headers["authorization"]) == ("GET /api/v1/instances", f"Bearer {SECRET}")
    assert headers["user-agent"].startswith("trainmaster/")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (401, "global/invalid-api-key", errors.InvalidKey),
        (403, "global/account-inactive", errors.AccountError),
        (403, "global/invalid-address", errors.AccountError),
        (403, "global/forbidden", errors.AccountError),
        (404, "global/object-does-not-exist", errors.NotFound),
        (404, "global/not-found", errors.NotFound),
        (400, "global/invalid-parameters", errors.InvalidRequest),
        (400, "global/quota-exceeded", errors.QuotaExceeded),
        (400, "global/duplicate", errors.Duplicate),
        (400, "instance-operations/launch/insufficient-capacity", NoCapacity),
        (400, "instance-operations/launch/file-system-in-wrong-region", errors.WrongRegion),
        (409, "global/conflict", errors.Conflict),
        (400, "something/new", errors.ApiError),
        (500, "global/internal-error", Unreachable),
        (400, "provider/internal-unavailable", Unreachable),
    ],
)
def test_errors_are_typed_by_the_code(status: int, code: str, kind: type[TargetError]) -> None:
    with pytest.raises(kind) as refused:
        ask(Api(error(status, code)), lambda client: client.launch(LAUNCH))
    assert type(refused.value) is kind
    assert SECRET not in str(refused.value) and code in str(refused.value)


@pytest.mark.parametrize(
    "bad",
    [
        answer(429, {"error": {"code": "global/rate", "message": "slow"}}, Retry_After="0"),
        answer(429, None, Retry_After="0"),
        answer(500, {"error": {"code": "global/internal-error", "message": "m", "suggestion": "s"}}),
        answer(502, None),
        (200, {}, b'{"data": [tr'),
        (200, {}, b"<html>"),
        answer(200, {"data": {"not": "a list"}}),
        answer(200, []),
        None,
    ],
    ids=["429", "429 empty", "500", "502 empty", "garbled", "html", "wrong data", "no envelope", "silent"],
)
def test_a_reading_request_is_repeated_until_an_answer_fits(bad: Answer | None) -> None:
    api = Api(bad, bad, answer(200, {"data": []}))
    assert ask(api, lambda client: client.list_instances()) == []
    assert len(api.requests) == 3


@pytest.mark.parametrize(
    "bad",
    [answer(500, None), (200, {}, b"{"), answer(200, {"data": {}}), answer(302, None), None],
    ids=["500", "garbled", "no id", "redirect", "silent"],
)
def test_a_launch_of_unknown_outcome_is_sent_once(bad: Answer | None) -> None:
    api = Api(bad, answer(200, LAUNCHED))
    with pytest.raises(Unreachable):
        ask(api, lambda client: client.launch(LAUNCH))
    assert len(api.requests) == 1


def test_a_launch_refused_by_the_rate_limit_did_not_happen() -> None:
    with pytest.raises(NotNow):
        ask(Api(answer(429, None)), lambda client: client.launch(LAUNCH))


def test_a_launch_returns_the_id_and_its_body_fits_the_schema() -> None:
    api = Api(answer(200, LAUNCHED))
    assert ask(api, lambda client: client.launch(LAUNCH)) == LAUNCHED["data"]["instance_ids"][0]
    assert json.loads(api.requests[0][2]) == LAUNCH
    with pytest.raises(TargetError, match="does not fit the schema: name: longer than 64"):
        ask(api, lambda client: client.launch({**LAUNCH, "name": "x" * 65}))
    assert len(api.requests) == 1


def test_a_dead_api_is_unreachable_after_the_deadline() -> None:
    api = Api(answer(503, None))
    with pytest.raises(Unreachable, match="tried"):
        ask(api, lambda client: client.list_types())
    assert len(api.requests) > 2


def test_every_request_takes_its_turn_and_repetitions_too() -> None:
    taken: list[float] = []

    class Counted(Rates):
        def take(self) -> float:
            taken.append(super().take())
            return 0.0

    async def together(client: Client) -> None:
        await asyncio.gather(*(client.list_instances() for _ in range(4)))
        await client.launch(LAUNCH)

    api = Api(answer(500, None), *[answer(200, {"data": []})] * 4, answer(200, LAUNCHED))
    ask(api, together, rates=Counted(request_s=100.0, launch_s=1.0))
    assert len(taken) == len(api.requests) == 6
    assert [round(wait_s, -2) for wait_s in taken] == [0, 100, 200, 300, 400, 500], "one after the other, not together"


def test_turns_of_requests_and_launches() -> None:
    now = [0.0]
    rates = Rates(request_s=1.0, launch_s=12.0, clock=lambda: now[0])
    assert [rates.take() for _ in range(3)] == [0.0, 1.0, 2.0]
    now[0] = 3.0
    assert rates.may_launch() and not rates.may_launch()
    now[0] = 14.9
    assert not rates.may_launch()
    now[0] = 15.0
    assert rates.may_launch()
    now[0] = 20.0
    rates.note_launch()
    now[0] = 31.9
    assert not rates.may_launch(), "twelve seconds after it was sent"
    now[0] = 32.0
    assert rates.may_launch()
    rates.pause(30.0)
    assert rates.take() == 30.0
    now[0] = 61.0
    assert not rates.may_launch()


def test_retry_after_holds_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[float] = []
    monkeypatch.setattr(Rates, "pause", lambda _, seconds: paused.append(seconds))
    api = Api(answer(429, None, Retry_After="7"), answer(429, None), answer(200, {"data": []}))
    ask(api, lambda client: client.list_instances())
    assert paused == [7.0, 2.0]


def test_the_key_is_neither_logged_nor_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    told = []
    for bad in (error(401, "global/invalid-api-key"), error(400, f"code {SECRET}"), None):
        with pytest.raises(TargetError) as refused:
            ask(Api(bad), lambda client: client.launch(LAUNCH))
        told.append(str(refused.value) + repr(refused.value))
    assert SECRET not in "".join(told) + caplog.text + repr(ApiKey(SECRET))


def test_the_key_comes_from_a_variable_or_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    assert read_key({"LAMBDA_API_KEY": SECRET}).header() == f"Bearer {SECRET}"
    assert read_key({"LAMBDA_API_KEY_FILE": str(file)}).header() == f"Bearer {SECRET}"
    file.chmod(0o640)
    with pytest.raises(UsageError, match="others can read"):
        read_key({"LAMBDA_API_KEY_FILE": str(file)})
    with pytest.raises(UsageError, match="no API key"):
        read_key({})
    with pytest.raises(UsageError, match="no key has"):
        read_key({"LAMBDA_API_KEY": "a\nb"})


def test_the_key_is_sent_in_clear_text_to_this_machine_only() -> None:
    for url in ("http://cloud.lambda.ai", "ftp://127.0.0.1", "http://10.0.0.1"):
        with pytest.raises(UsageError, match="clear text"):
            Client(url, ApiKey(SECRET), Rates(request_s=0, launch_s=0))


def test_the_limits_of_the_vendor_hold_unless_a_simulator_is_named() -> None:
    assert (read_settings({}).request_s, read_settings({}).launch_s) == (1.0, 12.0)
    with pytest.raises(UsageError, match="LAMBDA_PACE"):
        read_settings({"LAMBDA_PACE": "10"})
    assert read_settings({"LAMBDA_PACE": "10", "LAMBDA_API_URL": "http://127.0.0.1:1"}).launch_s == 1.2


def test_an_api_that_cannot_be_reached_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: every connection is refused
        place = f"127.0.0.1:{taken.getsockname()[1]}"

        async def ask() -> None:
            times = Times(deadline_s=0.0)
            client = Client(f"http://{place}", ApiKey(SECRET), Rates(request_s=0, launch_s=0), times=times)
            try:
                await client.list_types()
            finally:
                await client.close()

        with pytest.raises(Unreachable, match=f"listInstanceTypes at {place}: ConnectError"):
            asyncio.run(ask())
