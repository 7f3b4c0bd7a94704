"""Pair tests between real nodes over SSH: the `measure` that `trainmaster isolate` chooses its rounds by.

The pairs of a round run at once, each a run of its own of two ranks. A pair that does not answer is None, after its
deadline at the latest. A node that cannot be asked at all is told as silent and takes no part: that is known without
any test, and a round spent on it would tell nothing of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    from trainmaster.cluster.exchange import Run
    from trainmaster.cluster.hosts import SshHosts
    from trainmaster.cluster.launch import Seat

_TAKEN = ("EADDRINUSE", "address already in use")  # somebody took the port since the node was asked: no verdict on it


class Pairs:
    """The nodes of a hosts file, ready to be tested in pairs. One event loop for all rounds; `close` it."""

    def __init__(self, hosts: SshHosts, *, size: str, timeout_s: float, rounds: int) -> None:
        from trainmaster.cluster import launch
        from trainmaster.cluster.launch import Seat

        self._hosts = {host.name: host for host in hosts.hosts}
        self._size, self._timeout_s = size, timeout_s
        self._runner = asyncio.Runner()
        self._link = launch.open_link(hosts)
        told = self._runner.run(launch.ask_seats(hosts.hosts, self._link, ports=2 * rounds))
        self.silent = {name: str(seat) for name, seat in told.items() if not isinstance(seat, Seat)}
        self._seats = {name: seat for name, seat in told.items() if isinstance(seat, Seat)}
        self._ports = {name: list(seat.ports) for name, seat in self._seats.items()}
        self.backend = choose_backend(self._seats)

    @property
    def nodes(self) -> list[str]:
        """Those that answered."""
        return list(self._seats)

    @property
    def racks(self) -> dict[str, str] | None:
        """As the hosts file says; None where it names none."""
        stated = {name: self._hosts[name].rack for name in self._seats}
        return {name: rack for name, rack in stated.items() if rack is not None} or None

    def measure(self, pairs: Sequence[tuple[str, str]]) -> list[float | None]:
        """One round: GB/s of each pair, or None."""

        async def all_of_them() -> list[float | None]:
            return await asyncio.gather(*(self._pair(a, b) for a, b in pairs))

        return self._runner.run(all_of_them())

    def close(self) -> None:
        self._runner.close()

    async def _pair(self, a: str, b: str) -> float | None:
        from trainmaster.bench.collectives.pairs import read_pair
        from trainmaster.cluster.launch import run_together

        for _ in range(2):
            jobs = [(self._hosts[name], [run]) for name, run in zip((a, b), self._plan(a, b), strict=True)]
            first, _second = await run_together(jobs, self._link, timeout_s=self._timeout_s)
            if not isinstance(first, Sequence):
                return None
            if not any(word in first[0].err for word in _TAKEN):
                return read_pair(first[0].out)
        return None

    def _plan(self, a: str, b: str) -> list[Run]:
        from trainmaster.bench.collectives.pairs import plan_pair
        from trainmaster.cluster.exchange import Run

        free = self._ports[a]
        if not free:
            raise UsageError(f"no port from 20000 to 29999 is left on {a}; see what listens on it: ss -ltn")
        free.append(port := free.pop(0))  # the next one each time: the last may still wait for its late packets
        address = self._hosts[a].address or self._seats[a].address or self._hosts[a].host
        commands = plan_pair(
            a, b, address=address, port=port, size=self._size, timeout_s=self._timeout_s / 4, backend=self.backend
        )
        more = ("--start-timeout", f"{self._timeout_s / 2:g}")
        return [Run(module=one.argv[2], words=[*one.argv[3:], *more], env=one.env) for one in commands]


def choose_backend(seats: dict[str, Seat]) -> str:
    """NCCL where all have GPUs, gloo where none has. UsageError where nodes cannot be compared with each other."""
    if bare := [name for name, seat in seats.items() if seat.torch is None]:
        why = seats[bare[0]].why
        raise UsageError(f"{why} on {', '.join(bare)}; pair tests need it: install it there, or leave these nodes out")
    without = [name for name, seat in seats.items() if not seat.gpus]
    if without and len(without) < len(seats):
        raise UsageError(f"torch sees no GPU on {', '.join(without)}, and some on the others; test them apart")
    return "gloo" if without or not seats else "nccl"
