"""Lambda Cloud as a provider: its words become ours here, and nowhere else."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster.core.errors import TargetError, Unreachable
from trainmaster.targets._provider import Instance, InstanceState, Label, LaunchRequest, NotNow, Offer
from trainmaster.targets.lambda_cloud.client import Client
from trainmaster.targets.lambda_cloud.errors import Duplicate, NotFound
from trainmaster.targets.lambda_cloud.rates import Rates
from trainmaster.targets.lambda_cloud.settings import Settings, read_key, read_public_key, read_settings

_STATES = {
    "booting": InstanceState.BOOTING,
    "active": InstanceState.ACTIVE,
    "unhealthy": InstanceState.UNHEALTHY,
    "terminating": InstanceState.TERMINATING,
    "terminated": InstanceState.GONE,
    "preempted": InstanceState.PREEMPTED,
}
_TAG = "trainmaster"
_GPU_MEMORY = re.compile(r"(\d+(?:\.\d+)?) ?G[iB]")
_RATES: dict[tuple[str, str], Rates] = {}  # per account: the limits are the account's, not an event loop's
_CLIENTS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Client]] = weakref.WeakKeyDictionary()


class LambdaCloud:
    """Instances of one account."""

    name = "lambda"

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings if settings is not None else read_settings()
        self.access, self.timing = self._settings.access, self._settings.timing
        self._ssh_key_name: str | None = None

    async def list_offers(self) -> list[Offer]:
        return [offer for item in (await self._client().list_types()).values() for offer in _offers(item)]

    async def list_instances(self) -> list[Instance]:
        return [_instance(item) for item in await self._client().list_instances()]

    async def find_instance(self, instance_id: str) -> Instance | None:
        try:
            return _instance(await self._client().get_instance(instance_id))
        except NotFound:
            return None
        except Unreachable:
            raise
        except TargetError as error:
            raise Unreachable(f"lambda: {instance_id} is not listed, and cannot be asked for: {error}") from None

    def may_launch(self) -> bool:
        return self._client().rates.may_launch()

    async def launch(self, request: LaunchRequest) -> str:
        try:
            key = await self._register_key()
        except Unreachable as error:
            raise NotNow(str(error)) from None  # nothing was launched yet
        return await self._client().launch(_body(request, key))

    async def terminate(self, ids: Sequence[str]) -> None:
        """Each id in a request of its own: one that is refused must not keep the others running."""
        first: TargetError | None = None
        for instance_id in ids:
            try:
                await self._client().terminate([instance_id])
            except NotFound:
                continue
            except TargetError as error:
                first = first or error
        if first is not None:
            raise first

    async def list_regions(self) -> list[str]:
        return [str(item.get("name")) for item in await self._client().list_regions()]

    async def list_file_systems(self) -> Mapping[str, str]:
        file_systems = await self._client().list_file_systems()
        return {str(item.get("name")): str(_part(item, "region", "name")) for item in file_systems}

    def describe(self, request: LaunchRequest) -> str:
        body = _body(request, self._ssh_key_name or "YOUR-SSH-KEY")
        return f"POST {self._settings.url}/api/v1/instance-operations/launch\n{json.dumps(body, indent=2)}\n"

    async def _register_key(self) -> str:
        """Name of our SSH key in the account; added if no key there is the same."""
        if self._ssh_key_name is None:
            public = await asyncio.to_thread(read_public_key, self.access)
            name = await self._find_key(public)
            if name is None:
                wanted = f"trainmaster-{hashlib.sha256(public.encode()).hexdigest()[:12]}"
                try:
                    name = str((await self._client().add_ssh_key(wanted, public))["name"])
                except Duplicate:  # another process of ours was first
                    name = wanted
            self._ssh_key_name = name
        return self._ssh_key_name

    async def _find_key(self, public: str) -> str | None:
        for item in await self._client().list_ssh_keys():
            if str(item.get("public_key", "")).split()[:2] == public.split():
                return str(item.get("name"))
        return None

    def _client(self) -> Client:
        """The client of the running event loop, shared by all jobs. The key is read on first use and after a 401."""
        clients = _CLIENTS.setdefault(asyncio.get_running_loop(), {})
        if self._settings.url not in clients:
            key = read_key()
            account = (self._settings.url, hashlib.sha256(key.header().encode()).hexdigest())
            rates = _RATES.setdefault(
                account, Rates(request_s=self._settings.request_s, launch_s=self._settings.launch_s)
            )
            clients[self._settings.url] = Client(
                self._settings.url, key, rates, times=self._settings.times, reread=read_key
            )
        return clients[self._settings.url]


async def close_all() -> None:
    """Close the clients of the running event loop."""
    for client in _CLIENTS.pop(asyncio.get_running_loop(), {}).values():
        await client.close()


def _body(request: LaunchRequest, ssh_key: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "region_name": request.region,
        "instance_type_name": request.kind,
        "ssh_key_names": [ssh_key],
        "name": request.name,
        "tags": [{"key": _TAG, "value": request.name}],
    }
    if request.file_systems:
        body["file_system_names"] = list(request.file_systems)
    if request.image is not None:
        body["image"] = {"family": request.image}
    return body


def _instance(item: Mapping[str, Any]) -> Instance:
    """An entry of the listing. One without an id cannot be terminated: the whole listing is then not to be trusted."""
    instance_id = item.get("id") if isinstance(item, Mapping) else None
    if not isinstance(instance_id, str) or not instance_id:
        raise Unreachable("lambda: the listing has an instance without an id")
    price = _part(item, "instance_type", "price_cents_per_hour")
    return Instance(
        id=instance_id,
        name=_name(item),
        state=_STATES.get(str(item.get("status")), InstanceState.UNKNOWN),
        kind=str(_part(item, "instance_type", "name") or ""),
        region=str(_part(item, "region", "name") or ""),
        price_cents_per_hour=float(price) if _is_number(price) else None,
        address=_text(item.get("ip")),
        private_address=_text(item.get("private_ip")),
    )


def _name(item: Mapping[str, Any]) -> str:
    """Name of an instance. Another one may have our name, but not our tag: its name is then no label of ours."""
    name, tags = str(item.get("name") or ""), item.get("tags")
    if Label.parse(name) is None or not isinstance(tags, list):
        return name
    ours = any(_part(tag, "key") == _TAG and _part(tag, "value") == name for tag in tags)
    return name if ours else f"{name} (without our tag)"


def _offers(item: Any) -> list[Offer]:
    """A type in each region with capacity, and once without a region: sold out in all that are not named."""
    kind, price = _part(item, "instance_type", "name"), _part(item, "instance_type", "price_cents_per_hour")
    specs = _part(item, "instance_type", "specs")
    if not isinstance(kind, str) or not _is_number(price) or not isinstance(specs, Mapping):
        return []  # a type without a price is not for rent
    described = str(_part(item, "instance_type", "gpu_description") or "")
    memory = _GPU_MEMORY.search(described)
    return [
        Offer(
            kind=kind,
            region=region,
            price_cents_per_hour=float(price),
            available=region != "",
            gpus=_count(specs.get("gpus")),
            gpu=described,
            gpu_memory_gib=float(memory[1]) if memory else None,
            memory_gib=float(_count(specs.get("memory_gib"))),
        )
        for region in (*_regions(item), "")
    ]


def _regions(item: Any) -> list[str]:
    listed = item.get("regions_with_capacity_available") if isinstance(item, Mapping) else None
    names = [_part(region, "name") for region in listed] if isinstance(listed, list) else []
    return [name for name in names if isinstance(name, str)]


def _part(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
