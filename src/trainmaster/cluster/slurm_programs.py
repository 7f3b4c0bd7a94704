"""Programs on the nodes of a Slurm cluster, by the contract of `cluster/launch.py`: srun instead of SSH.

Each node is allocated whole before its first program and kept until `close`: between two programs no other job may get
the node, or it would look slow or dead. The allocations of one link have one name of their own; `close` cancels by that
name, also those whose answer was lost. Should this process be killed, they end at their time limit.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster import targets
from trainmaster.cluster.exchange import Program, ProgramResult, find_answer, unwrap_runs
from trainmaster.cluster.slurm_nodes import FREE_S, SlurmNode, SlurmNodes, options
from trainmaster.core.errors import TargetError
from trainmaster.targets.slurm.queue import Queue, queue
from trainmaster.targets.slurm.target import node_half
from trainmaster.targets.ssh.channel import clean
from trainmaster.targets.ssh.connect import NodeUnavailable
from trainmaster.targets.ssh.hosts import SshHost

_STEP = ("--cpu-bind=none", "--quit-on-interrupt", "--kill-on-bad-exit=1")
_START_S = 30.0  # for srun itself, beside its program


class SlurmLink:
    """Way to start programs on the nodes of a cluster."""

    def __init__(self, cluster: SlurmNodes, *, limit_s: float) -> None:
        self._cluster, self._limit_s = cluster, limit_s
        self._nodes = {node.name: node for node in cluster.nodes}
        self._name = f"trainmaster-{secrets.token_hex(6)}"
        self._gates = {node.name: asyncio.Lock() for node in cluster.nodes}
        self._jobs: dict[str, str] = {}
        self._package: str | None = None

    async def start(self, host: SshHost, runs: Sequence[Program], *, timeout_s: float) -> Sequence[ProgramResult]:
        """Run modules of the node half on a node, all at once, until the last has ended or the time is over."""
        node, where = self._nodes[host.name], queue(self._cluster.settings)
        try:
            async with self._gates[node.name]:
                if node.name not in self._jobs:
                    self._jobs[node.name] = await self._allocate(where, node)
            return await self._run(where, node, runs, timeout_s=timeout_s)
        except NodeUnavailable:
            raise
        except TargetError as wrong:
            raise NodeUnavailable(str(wrong), action="see `scontrol show node` and the log of its slurmd") from None

    def address(self, name: str) -> None:
        del name  # NodeAddr is in the list of nodes

    async def close(self) -> None:
        """Give every node back."""
        try:
            where = queue(self._cluster.settings)
            await where.ask("run", words=["scancel", "--quiet", f"--name={self._name}"], timeout_s=60.0)
        finally:
            await targets.close()

    async def _allocate(self, where: Queue, node: SlurmNode) -> str:
        """Id of the job that holds a node."""
        if node.out_of_service is not None:
            action = "give it back with `trainmaster readmit`" if node.ours else "repair and resume it"
            raise NodeUnavailable(node.out_of_service, action=action)
        words = ["salloc", "--no-shell", *options(node, self._cluster.settings, name=self._name, limit_s=self._limit_s)]
        result, _ = await where.ask("run", words=words, timeout_s=FREE_S + _START_S)
        said = _said(result)
        if found := re.search(r"Granted job allocation (\d+)", said):
            return found[1]
        raise _not_started("salloc", result.get("code"), said)

    async def _run(
        self, where: Queue, node: SlurmNode, runs: Sequence[Program], *, timeout_s: float
    ) -> list[ProgramResult]:
        job = self._jobs[node.name]
        if self._package is None:
            result, _ = await where.ask("prepare", package=node_half(self._cluster.settings))
            self._package = str(result["package"])
        words = ["srun", f"--jobid={job}", "--overlap", "--nodes=1", "--ntasks=1"]
        words += [f"--gres={node.gpus}"] if node.gpus else []
        order = {"runs": [{"module": run.module, "words": list(run.words), "env": dict(run.env)} for run in runs]}
        try:
            data = await run_bootstrap(
                where, words, order, python=self._cluster.settings.python, package=self._package, timeout_s=timeout_s
            )
        except asyncio.CancelledError:
            # srun is dead by now, its step is not: the next program on the node must not meet it.
            await where.ask("run", words=["scancel", "--quiet", "--signal=TERM", job], timeout_s=60.0)
            raise
        return unwrap_runs(data, len(runs))


async def run_bootstrap(
    where: Queue,
    srun: Sequence[str],
    order: Mapping[str, Any],
    *,
    python: str,
    package: str,
    timeout_s: float,
    wait_s: float = 0.0,
) -> bytes:
    """The answer of the bootstrap on one node, started by these words of srun. NodeUnavailable where there is none."""
    nonce = secrets.token_hex(16)
    whole = {"nonce": nonce, "package": package, "deadline_s": timeout_s - min(3.0, timeout_s / 5), **order}
    text = base64.b64encode(json.dumps(whole).encode()).decode()
    program = ["env", f"PYTHONPATH={package}", "PYTHONSAFEPATH=1", python, "-m", "trainmaster.remote.bootstrap"]
    words = [*srun, *_STEP, *program, text]
    result, body = await where.ask("run", words=words, timeout_s=timeout_s + wait_s + _START_S)
    data = find_answer(body, nonce)
    if data is None:
        raise _not_started("srun", result.get("code"), _said(result))
    return data


def _said(result: Mapping[str, Any]) -> str:
    return " ".join(clean(str(result.get("error", ""))).split())[-300:] or "nothing was printed"


def _not_started(program: str, code: object, said: str) -> NodeUnavailable:
    if any(word in said for word in ("busy", "Immediate", "Unable to allocate")):
        return NodeUnavailable(
            f"it was not free within {FREE_S} s: {said}", action="try again when its jobs have ended"
        )
    return NodeUnavailable(f"{program} ended with {code}: {said}", action="see the log of its slurmd")
