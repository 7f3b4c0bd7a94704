"""Nodes of a Slurm cluster, as scontrol describes them."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from trainmaster import targets
from trainmaster.cluster.remedy import PREFIX
from trainmaster.cluster.schedulers import Slurm as SlurmCommands
from trainmaster.core.errors import TargetError
from trainmaster.targets.slurm.queue import Queue, queue
from trainmaster.targets.slurm.settings import SlurmSettings
from trainmaster.targets.ssh.channel import clean
from trainmaster.targets.ssh.hosts import SshHost

FREE_S = 30  # for a node that is in use to become free
OUT = ("DOWN", "DRAIN", "FAIL", "UNKNOWN", "POWERED_DOWN", "POWERING_DOWN", "REBOOT", "MAINT", "NOT_RESPONDING")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """A node as scontrol describes it."""

    name: str
    states: tuple[str, ...]
    reason: str
    gpus: str  # GRES of all its GPUs, as srun takes it; empty without
    address: str = ""  # NodeAddr: where other nodes reach it

    @property
    def ours(self) -> bool:
        """Drained by Trainmaster."""
        return "DRAIN" in self.states and self.reason.startswith(PREFIX)

    @property
    def out_of_service(self) -> str | None:
        """Slurm's words for a node that gets no job; None for one in service."""
        if not any(state in OUT for state in self.states):
            return None
        return f"Slurm shows it as {'+'.join(self.states)}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNodes:
    """Nodes of a cluster that are to be checked."""

    settings: SlurmSettings
    nodes: tuple[SlurmNode, ...]

    @property
    def hosts(self) -> tuple[SshHost, ...]:
        return tuple(SshHost(host=node.name, name=node.name, address=node.address or None) for node in self.nodes)


def list_nodes(settings: SlurmSettings) -> SlurmNodes:
    """Nodes of the cluster file's partition (else all), without those that it excludes."""

    async def listing() -> SlurmNodes:
        try:
            where = queue(settings)
            described = parse_nodes(await scontrol(where, "show", "node", "--oneliner"))
            partition = ["--partition", settings.defaults.partition] if settings.defaults.partition else []
            left = [word for name in settings.defaults.exclude for word in await _expand(where, name)]
            wanted = [word for name in settings.defaults.nodelist for word in await _expand(where, name)]
            names = (await ask(where, ["sinfo", "--noheader", "--Node", "--format=%N", *partition])).split()
            chosen = [name for name in dict.fromkeys(names) if name not in left and (not wanted or name in wanted)]
            found = {node.name: node for node in described}
            return SlurmNodes(settings=settings, nodes=tuple(found[name] for name in chosen if name in found))
        finally:
            await targets.close()

    return asyncio.run(listing())


def parse_nodes(text: str) -> list[SlurmNode]:
    """Nodes of `scontrol show node --oneliner`."""
    nodes: list[SlurmNode] = []
    for line in _lines(text):
        name, state = re.search(r"\bNodeName=(\S+)", line), re.search(r"\bState=(\S+)", line)
        if name is None or state is None:
            raise TargetError(f"scontrol printed a line that describes no node: {line[:200]!r}")
        if name[1] in [node.name for node in nodes]:
            raise TargetError(f"scontrol describes the node {name[1]} twice: see `scontrol show node` and its reasons")
        gres = re.search(r"\bGres=(\S+)", line)
        gpus = re.findall(r"gpu(?::[\w.-]+)?:\d+", gres[1] if gres else "")
        words = tuple(filter(None, re.split(r"[+*~#!%$@^-]", state[1])))
        states = (*words, *(("NOT_RESPONDING",) if "*" in state[1] else ()))
        drained = SlurmCommands().parse(name[1], line)
        address = re.search(r"\bNodeAddr=(\S+)", line)
        nodes.append(
            SlurmNode(
                name=name[1], states=states, reason=drained.reason, gpus=",".join(gpus),
                address=address[1] if address else "",
            )
        )  # fmt: skip
    return nodes


def _lines(text: str) -> list[str]:
    """One line per node: a reason may hold line breaks and control characters."""
    found: list[str] = []
    for line in text.split("\n"):
        if line.startswith("NodeName=") or not found:
            found.append(line)
        else:
            found[-1] += f" {line}"
    return [clean(line).rstrip() for line in found if line.strip()]


def options(node: SlurmNode, settings: SlurmSettings, *, name: str, limit_s: float) -> list[str]:
    """Options of srun and salloc for the whole node with all its GPUs."""
    found = [
        f"--nodelist={node.name}", "--nodes=1", "--ntasks=1", f"--job-name={name}", f"--time={int(limit_s // 60) + 2}",
        f"--immediate={FREE_S}", "--exclusive",
    ]  # fmt: skip
    found += [f"--gres={node.gpus}"] if node.gpus else []
    for option in ("partition", "account", "qos"):
        if (value := getattr(settings.defaults, option)) is not None:
            found.append(f"--{option}={value}")
    return found


async def _expand(where: Queue, names: str) -> list[str]:
    return (await scontrol(where, "show", "hostnames", names)).split()


async def scontrol(where: Queue, *words: str) -> str:
    """Output of scontrol."""
    return await ask(where, ["scontrol", *words])


async def ask(where: Queue, words: Sequence[str], *, program: bool = True) -> str:
    """Output of a command at the site; TargetError where it fails."""
    result, body = await where.ask("run", words=list(words), timeout_s=60.0, slurm=program)
    if result.get("code") != 0:
        said = " ".join(str(result.get("error", "")).split())[:300]
        raise TargetError(f"{shlex.join(words)} ended with {result.get('code')}: {said}")
    return body.decode(errors="replace")
