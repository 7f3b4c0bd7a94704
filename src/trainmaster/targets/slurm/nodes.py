"""Programs on the nodes of a Slurm cluster: the bootstrap, started by srun.

Each node is allocated whole before its first program and kept until `close`: between two programs no other job may get
the node, or it would look slow or dead. A retest is one program per node, and its job is its own allocation. Jobs carry
the mark of their home and run; `close` cancels by their name, also those whose answer was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainmaster import targets
from trainmaster.core.errors import NodeUnavailable, TargetError
from trainmaster.targets import Target
from trainmaster.targets._answers import clean, deadline, encode_order, find_answer, make_order, parse_results
from trainmaster.targets._leftovers import remove_leftovers
from trainmaster.targets._nodes import Node, Program, Result, Transfer
from trainmaster.targets._runs import Run
from trainmaster.targets.slurm import node_list, retest
from trainmaster.targets.slurm.node_list import SlurmNode, list_nodes, options
from trainmaster.targets.slurm.queue import Queue, queue
from trainmaster.targets.slurm.settings import SlurmSettings, node_half

STEP = ("--cpu-bind=none", "--quit-on-interrupt", "--kill-on-bad-exit=1")
_AT_ONCE = 64  # retests
_START_S = 30.0  # for srun itself, beside its program
_BOOTSTRAP = "trainmaster.remote.bootstrap"


class SlurmNodes:
    """The nodes of a cluster."""

    def __init__(
        self, target: Target, settings: SlurmSettings, *, limit_s: float, home: Path, retest: bool = False
    ) -> None:
        self._target, self._settings = target, settings
        self._limit_s, self._home, self._retest = limit_s, home, retest
        self._run = Run(home)
        self._name = f"trainmaster-{secrets.token_hex(6)}"
        self._nodes: dict[str, SlurmNode] = {}
        self._held: dict[str, str] = {}  # node → id of the job that holds it
        self._gates: dict[str, asyncio.Lock] = {}
        self._retests = asyncio.Semaphore(_AT_ONCE)
        self._package: str | None = None
        self.transfer = Transfer()

    async def nodes(self) -> list[Node]:
        if not self._nodes:
            await remove_leftovers(self._target, self._home)
            self._nodes = {node.name: node for node in await list_nodes(queue(self._settings), self._settings)}
            self._gates = {name: asyncio.Lock() for name in self._nodes}
        return [node.describe(retest=self._retest) for node in self._nodes.values()]

    async def run(self, node: Node, programs: Sequence[Program], timeout_s: float) -> list[Result]:
        described, where = self._nodes[node.name], queue(self._settings)
        try:
            if self._retest:
                async with self._retests, retest.reserve(where, described, self._run.owner) as reservation:
                    return await self._run_once(where, described, programs, reservation, timeout_s=timeout_s)
            async with self._gates[node.name]:
                if node.name not in self._held:
                    self._held[node.name] = await self._allocate(where, described)
            return await self._run_in(where, described, programs, timeout_s=timeout_s)
        except NodeUnavailable:
            raise
        except TargetError as error:
            raise NodeUnavailable(str(error), action="see `scontrol show node` and the log of its slurmd") from None

    async def close(self) -> None:
        """Give every node back."""
        try:
            if self._nodes and not self._retest:
                await cancel(queue(self._settings), f"--name={self._name}")
        finally:
            self._run.close()
            await targets.close()

    async def _run_once(
        self, where: Queue, node: SlurmNode, programs: Sequence[Program], reservation: str | None, *, timeout_s: float
    ) -> list[Result]:
        """Run programs in a job of their own."""
        name = f"trainmaster-check-{secrets.token_hex(6)}"
        words = ["srun", *self._options(node, name=name, limit_s=timeout_s)]
        words += [f"--reservation={reservation}"] if reservation else []
        try:
            return await self._start(where, words, programs, timeout_s=timeout_s, wait_s=node_list.FREE_S)
        except BaseException:
            # srun is dead by now, its job need not be: it would hold the node, and its reservation, until its time
            # limit.
            with contextlib.suppress(TargetError):
                await cancel(where, f"--name={name}")
            raise

    async def _allocate(self, where: Queue, node: SlurmNode) -> str:
        """Id of the job that holds a node."""
        if node.out_of_service is not None:
            action = "give it back with `trainmaster readmit`" if node.ours else "repair and resume it"
            raise NodeUnavailable(node.out_of_service, action=action)
        words = ["salloc", "--no-shell", *self._options(node, name=self._name, limit_s=self._limit_s)]
        result, _ = await where.request("run", words=words, timeout_s=node_list.FREE_S + _START_S)
        text = _stderr(result)
        if granted := re.search(r"Granted job allocation (\d+)", text):
            return granted[1]
        raise _not_started("salloc", result.get("code"), text)

    async def _run_in(
        self, where: Queue, node: SlurmNode, programs: Sequence[Program], *, timeout_s: float
    ) -> list[Result]:
        """Run programs in the allocation of a node."""
        job = self._held[node.name]
        words = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1"]
        words += [f"--gres={node.gpus}"] if node.gpus else []
        try:
            return await self._start(where, words, programs, timeout_s=timeout_s)
        except asyncio.CancelledError:
            # srun is dead by now, its step is not: the next program on the node must not meet it.
            await cancel(where, "--signal=TERM", job)
            raise

    async def _start(
        self, where: Queue, srun: Sequence[str], programs: Sequence[Program], *, timeout_s: float, wait_s: float = 0.0
    ) -> list[Result]:
        """The answer of the bootstrap on one node, started by these words of srun."""
        if self._package is None:
            self._package = await prepare(where, self._settings)
        order = make_order(programs, deadline_s=deadline(timeout_s), package=self._package)
        program = [*python_words(self._settings, self._package), "-m", _BOOTSTRAP, encode_order(order)]
        result, body = await where.request(
            "run", words=[*srun, *STEP, *program], timeout_s=timeout_s + wait_s + _START_S
        )
        data = find_answer(body, order["nonce"])
        if data is None:
            raise _not_started("srun", result.get("code"), _stderr(result))
        self.transfer.received_bytes += len(data)
        return parse_results(data, len(programs))

    def _options(self, node: SlurmNode, *, name: str, limit_s: float) -> list[str]:
        return options([node], self._settings, name=name, owner=self._run.owner, limit_s=limit_s)


async def prepare(where: Queue, settings: SlurmSettings) -> str:
    """Bring the node half to where the compute nodes find it; its folder."""
    result, _ = await where.request("prepare", package=node_half(settings))
    return str(result["package"])


def python_words(settings: SlurmSettings, package: str, **env: str) -> list[str]:
    """Python of the compute nodes with the node half, as words of a command."""
    variables = {"PYTHONPATH": package, "PYTHONSAFEPATH": "1", **env}
    return ["env", *(f"{name}={value}" for name, value in variables.items()), settings.python]


async def cancel(where: Queue, *words: str) -> None:
    """Cancel jobs, by id or by name."""
    await where.request("run", words=["scancel", "--quiet", *words], timeout_s=60.0)


def _stderr(result: Mapping[str, Any]) -> str:
    return " ".join(clean(str(result.get("error", ""))).split())[-300:] or "nothing was printed"


def _not_started(program: str, code: object, text: str) -> NodeUnavailable:
    if any(word in text for word in ("busy", "Immediate", "Unable to allocate")):
        return NodeUnavailable(
            f"it was not free within {node_list.FREE_S} s: {text}", action="try again when its jobs have ended"
        )
    return NodeUnavailable(f"{program} ended with {code}: {text}", action="see the log of its slurmd")
