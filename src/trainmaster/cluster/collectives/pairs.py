"""Pair tests between real nodes, over SSH, in Slurm or in pods: the `measure` function of `trainmaster isolate`.

The pairs of a round run at once, each with two ranks of its own. A pair without an answer by its deadline is None. A
node that cannot be reached is reported as silent and takes no part: no test is needed to know it, and a round spent on
it would measure nothing about the others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.cluster.termination import run, until_terminated
from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    from trainmaster.cluster.collectives.launch import Capabilities
    from trainmaster.core.errors import NodeUnavailable
    from trainmaster.targets import Node, Program, ReachesNodes

_TAKEN = ("EADDRINUSE", "address already in use")  # the port was taken since the node was asked: no verdict


class Pairs:
    """Nodes that are ready for pair tests. One event loop serves all rounds; call `close`.

    Until then SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so that `close` is reached.
    """

    def __init__(self, target: ReachesNodes, *, home: Path, size: str, timeout_s: float, rounds: int) -> None:
        from trainmaster.cluster.collectives import launch

        self._nodes: dict[str, Node] = {}
        self._size, self._timeout_s, self._rounds = size, timeout_s, rounds
        self._runner = asyncio.Runner()
        self._terminated = contextlib.ExitStack()
        # Each pair may be tried twice, where its port was taken.
        limit_s = launch.CAPABILITIES_TIMEOUT_S + 2 * rounds * timeout_s
        self._access = target.open_nodes(limit_s=limit_s, home=home)
        try:
            self._terminated.enter_context(until_terminated())  # between the rounds
            self._read(run(self._open(), runner=self._runner))
        except BaseException:
            self.close()
            raise

    async def _open(self) -> Mapping[str, Capabilities | NodeUnavailable]:
        from trainmaster.cluster.collectives import launch

        self._nodes = {node.name: node for node in await self._access.nodes()}
        return await launch.query_capabilities(list(self._nodes.values()), self._access, ports=2 * self._rounds)

    def _read(self, offers: Mapping[str, Capabilities | NodeUnavailable]) -> None:
        from trainmaster.cluster.collectives.launch import Capabilities

        self.silent = {name: str(offer) for name, offer in offers.items() if not isinstance(offer, Capabilities)}
        self._capabilities = {name: offer for name, offer in offers.items() if isinstance(offer, Capabilities)}
        self._ports = {name: list(offer.ports) for name, offer in self._capabilities.items()}
        self.backend = choose_backend(self._capabilities)

    @property
    def nodes(self) -> list[str]:
        """Nodes that answered."""
        return list(self._capabilities)

    @property
    def racks(self) -> dict[str, str] | None:
        """Rack by node; None where the target states no rack."""
        stated = {name: self._nodes[name].rack for name in self._capabilities}
        return {name: rack for name, rack in stated.items() if rack is not None} or None

    def measure(self, pairs: Sequence[tuple[str, str]]) -> list[float | None]:
        """One round: GB/s of each pair, or None."""

        async def all_pairs() -> list[float | None]:
            return await asyncio.gather(*(self._pair(a, b) for a, b in pairs))

        return run(all_pairs(), runner=self._runner)

    def close(self) -> None:
        """Give the nodes back."""
        with self._terminated:
            try:
                run(self._access.close(), runner=self._runner)
            finally:
                self._runner.close()

    async def _pair(self, a: str, b: str) -> float | None:
        from trainmaster.bench.collectives.pairs import read_pair
        from trainmaster.cluster.collectives.launch import run_together

        for _ in range(2):
            jobs = [(self._nodes[name], [program]) for name, program in zip((a, b), self._plan(a, b), strict=True)]
            first, _second = await run_together(jobs, self._access, timeout_s=self._timeout_s)
            if not isinstance(first, Sequence):
                return None
            if not any(word in first[0].err for word in _TAKEN):
                return read_pair(first[0].out)
        return None

    def _plan(self, a: str, b: str) -> list[Program]:
        from trainmaster.bench.collectives.pairs import plan_pair
        from trainmaster.targets import Program

        free = self._ports[a]
        if not free:
            raise UsageError(f"no free port from 20000 to 29999 on {a}; list its listeners: ss -ltn")
        free.append(port := free.pop(0))  # round robin: the last port may still be in TIME_WAIT
        address = self._nodes[a].address or self._capabilities[a].address or a
        commands = plan_pair(
            a, b, address=address, port=port, size=self._size, timeout_s=self._timeout_s / 4, backend=self.backend
        )
        more = ("--start-timeout", f"{self._timeout_s / 2:g}")
        return [
            Program(module=command.argv[2], words=[*command.argv[3:], *more], env=command.env) for command in commands
        ]


def choose_backend(capabilities: Mapping[str, Capabilities]) -> str:
    """NCCL where all nodes have GPUs, gloo where none has. UsageError where nodes are not comparable."""
    if bare := [name for name, offer in capabilities.items() if offer.torch is None]:
        why = capabilities[bare[0]].why
        raise UsageError(f"{why} on {', '.join(bare)}; pair tests need it: install it there, or leave these nodes out")
    without = [name for name, offer in capabilities.items() if not offer.gpus]
    if without and len(without) < len(capabilities):
        raise UsageError(f"torch sees GPUs on some nodes, but none on {', '.join(without)}; test them separately")
    return "gloo" if without or not capabilities else "nccl"
