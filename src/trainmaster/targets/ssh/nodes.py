"""Programs on the machines of a hosts file: a connection for each start, one exchange, one answer.

A machine needs Python 3.10 and nothing else: it requests the node half if it lacks it. Nothing is left there but the
cached package: the bootstrap ends with its connection, and its programs with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster.core.errors import NodeUnavailable
from trainmaster.remote import bootstrap
from trainmaster.remote.package import pack
from trainmaster.targets._answers import deadline, make_order, malformed, parse_results
from trainmaster.targets._nodes import Node, Program, Result, Transfer
from trainmaster.targets.ssh.channel import Stream, command, ended, tail
from trainmaster.targets.ssh.connect import CONNECT_TIMEOUT_S, connect, explain, load
from trainmaster.targets.ssh.hosts import SshHost, SshHosts, read_known_hosts

_HANDSHAKES = 64  # concurrent: a handshake costs CPU here; waiting for a verdict costs nothing
_END_S = 5.0


class SshNodes:
    """The machines of a hosts file."""

    def __init__(self, hosts: SshHosts) -> None:
        load()  # a missing package is reported once, not once per machine
        self._hosts = {host.name: host for host in hosts.hosts}
        self._known_hosts, self._package = read_known_hosts(hosts.known_hosts), pack()
        self._gate = asyncio.Semaphore(_HANDSHAKES)
        self.transfer = Transfer()

    async def nodes(self) -> list[Node]:
        return [Node(name=host.name, address=host.address, rack=host.rack) for host in self._hosts.values()]

    async def run(self, node: Node, programs: Sequence[Program], timeout_s: float) -> list[Result]:
        host = self._hosts[node.name]
        async with self._gate:
            started = time.monotonic()
            stack = contextlib.AsyncExitStack()
            connection = await stack.enter_async_context(
                connect(host, self._known_hosts, timeout_s=min(timeout_s, CONNECT_TIMEOUT_S))
            )
        async with stack:
            left_s = timeout_s - (time.monotonic() - started)
            data = await self._exchange(connection, host, programs, timeout_s=timeout_s, left_s=left_s)
        return parse_results(data, len(programs))

    async def close(self) -> None:
        """Nothing is held between two programs."""

    async def _exchange(
        self, connection: Any, host: SshHost, programs: Sequence[Program], *, timeout_s: float, left_s: float
    ) -> bytes:
        order = make_order(
            programs, deadline_s=deadline(left_s), digest=self._package.digest, size=len(self._package.data),
            env={bootstrap.ADDRESS_VARIABLE: host.host},
        )  # fmt: skip
        process_id: list[int] = []
        try:
            async with asyncio.timeout(left_s):
                process = await connection.create_process(command(host.python, order), encoding=None)
                return await self._talk(process, order, process_id)
        except TimeoutError:
            await _end(connection, process_id)
            action = "log in and check what its Python or file system waits for; reboot it if it stays"
            raise NodeUnavailable(
                f"it accepted the login, then gave no answer in {timeout_s:g} s", action=action
            ) from None
        except NodeUnavailable:
            raise
        except Exception as error:
            raise explain(error, host, self._known_hosts, timeout_s=timeout_s) from None

    async def _talk(self, process: Any, order: Mapping[str, Any], process_id: list[int]) -> bytes:
        """Read marked lines until the answer."""
        stream = Stream(process, str(order["nonce"]).encode())
        while True:
            word = await stream.word()
            if word is None:
                raise ended(process, await tail(process))
            if match := re.fullmatch(rb"pid (\d{1,9})", word):
                process_id[:] = [int(match[1])]
                continue
            if word == b"need":
                self.transfer.sent_bytes += len(self._package.data)
                process.stdin.write(self._package.data)
                await process.stdin.drain()
                continue
            match = re.fullmatch(rb"answer (\d{1,9}) ([0-9a-f]{64})", word)
            if not match or int(match[1]) > bootstrap.MAX_ANSWER_BYTES:
                raise malformed(f"unexpected line {word[:60]!r}")
            data = await stream.exactly(int(match[1]))
            if data is None or hashlib.sha256(data).hexdigest().encode() != match[2]:
                raise malformed("the answer was cut off or damaged in transit")
            self.transfer.received_bytes += stream.received
            return data


async def _end(connection: Any, process_id: Sequence[int]) -> None:
    """Kill the hung process. By a second command, because sshd forwards no signals for root logins."""
    with contextlib.suppress(Exception):  # the hang is reported already
        async with asyncio.timeout(_END_S):
            for number in process_id:
                await connection.run(f"kill -TERM -- -{number}")
