"""Requests of the client and the answers it takes, held to the vendor's own OpenAPI file where it is given.

TRAINMASTER_LAMBDA_OPENAPI names the file. Without it the requests are held to the digest that ships in the package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lambda_sim import ask, lambda_cloud
from sshd import needs_sshd
from trainmaster.core.vendors import lambda_api
from trainmaster.sim.lambda_cloud.simulator import Simulator
from trainmaster.targets.lambda_cloud.client import Client
from trainmaster.targets.lambda_cloud.rates import Rates
from trainmaster.targets.lambda_cloud.settings import read_key, read_settings

pytestmark = [pytest.mark.spawns, needs_sshd, pytest.mark.timeout(120)]

OPENAPI = os.environ.get("TRAINMASTER_LAMBDA_OPENAPI")
PUBLIC = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAICN+lJwsONkwrdsSnQsu1ydUkIuIg5oOC+Eslvmtt60T"


class Recording(Client):
    """The client, with every request body and every answer that it accepted."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[str, Any, Any]] = []

    async def _send(self, name: str, body: Any, *, limit_s: float, **parts: str) -> Any:
        data = await super()._send(name, body, limit_s=limit_s, **parts)
        self.seen.append((name, body, data))
        return data


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Simulator]:
    with lambda_cloud(tmp_path / "lambda", monkeypatch) as simulator:
        yield simulator


async def call_everything(client: Client) -> None:
    """Every operation that the client has, once."""
    await client.list_types()
    await client.list_ssh_keys()
    await client.add_ssh_key("me", PUBLIC)
    await client.list_file_systems()
    await client.list_regions()
    body = {"region_name": "us-west-1", "instance_type_name": "gpu_1x_a10", "ssh_key_names": ["me"], "name": "x"}
    made = await client.launch({**body, "tags": [{"key": "trainmaster", "value": "x"}]})
    while (await client.get_instance(made))["status"] != "active":
        await client.list_instances()
    await client.restart([made])
    await client.terminate([made])


def test_every_request_and_answer_fits_the_schema(cloud: Simulator) -> None:
    settings = read_settings()
    rates = Rates(request_s=settings.request_s, launch_s=settings.launch_s)
    client = Recording(settings.url, read_key(), rates, times=settings.times)

    async def go() -> None:
        try:
            await call_everything(client)
        finally:
            await client.close()

    ask(go())
    assert len({name for name, _, _ in client.seen}) == 10, "each operation that renting needs"
    faults = [
        f"{name}: {fault}"
        for name, body, data in client.seen
        for operation in [lambda_api.operations()[name]]
        for fault in [
            *(lambda_api.find_faults(operation.request, body) if operation.request is not None else ()),
            *lambda_api.find_faults(operation.responses[200], {"data": data}),
        ]
    ]
    assert faults == []
    if OPENAPI:
        for name, body, data in client.seen:
            _validate(json.loads(Path(OPENAPI).read_text()), lambda_api.operations()[name], body, data)


def _validate(document: Any, operation: lambda_api.Operation, body: Any, data: Any) -> None:
    stated = document["paths"][operation.path][operation.method.lower()]
    answer = stated["responses"]["200"]["content"]["application/json"]["schema"]
    pairs = [(answer, {"data": data})]
    if body is not None:
        pairs.append((stated["requestBody"]["content"]["application/json"]["schema"], body))
    for schema, value in pairs:
        jsonschema.Draft202012Validator({**schema, "components": document["components"]}).validate(value)
