"""The ssh target over machines that a handle names, with their pinned host keys, instead of a hosts file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster.core.errors import TargetError
from trainmaster.targets import Handle
from trainmaster.targets._answers import clean
from trainmaster.targets._provider import SshAccess
from trainmaster.targets.ssh.hosts import SshHost
from trainmaster.targets.ssh.session import Session, close_session, session
from trainmaster.targets.ssh.target import Ssh

_GPUS = 64  # serial numbers kept of one machine


class RentedSsh(Ssh):
    """Machines of a handle's `hosts`."""

    def __init__(self, access: SshAccess, addresses: Mapping[str, str]) -> None:
        """`addresses`: of machines, by id, that moved since their handle was written."""
        super().__init__(Path("/nonexistent"))
        self._access, self._addresses = access, addresses

    async def identify(self, handle: Handle) -> list[list[str]]:
        """Serial numbers of the GPUs of each machine; also the proof that a login works."""
        listed_gpus = []
        for node in self._nodes(handle):
            listed = (await node.request("identify")).result.get("gpus")
            words = listed[:_GPUS] if isinstance(listed, list) else []
            listed_gpus.append([clean(word)[:80] for word in words if isinstance(word, str)])
        return listed_gpus

    async def close(self, handle: Handle) -> None:
        """Close the connections: the machines are gone."""
        for host, key in self._hosts_of(handle):
            await close_session(host, key)

    def _nodes(self, handle: Handle) -> list[Session]:
        return [session(host, key) for host, key in self._hosts_of(handle)]

    def _sessions(self) -> list[Session]:
        raise TargetError("rented machines are named by their handle")

    def _hosts_of(self, handle: Handle) -> list[tuple[SshHost, bytes]]:
        access = self._access
        return [
            (
                SshHost(
                    host=self._address(item), name=str(item["name"]), port=item.get("port"), user=access.user,
                    key=access.key, python=access.python, folder=access.folder, lost_after_s=access.lost_after_s,
                    address=item.get("address"),
                ),
                str(item["key"]).replace(str(item["host"]), self._address(item), 1).encode(),
            )
            for item in handle.get("hosts", ())
        ]  # fmt: skip

    def _address(self, item: Mapping[str, Any]) -> str:
        return self._addresses.get(str(item.get("id")), str(item["host"]))
