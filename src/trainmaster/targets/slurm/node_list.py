"""Nodes of a Slurm cluster, as scontrol describes them, and the options of srun and salloc for one of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from trainmaster.core.errors import TargetError, UsageError
from trainmaster.remote.slurm import layout
from trainmaster.targets._answers import clean
from trainmaster.targets._drain import PREFIX
from trainmaster.targets._nodes import Node
from trainmaster.targets._runs import Owner
from trainmaster.targets.slurm.queue import Queue
from trainmaster.targets.slurm.settings import SlurmSettings

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

    def describe(self, *, retest: bool) -> Node:
        closed = None if retest and self.ours else self.out_of_service
        return Node(name=self.name, address=self.address or None, gpus=count_gpus(self), closed=closed)


def count_gpus(node: SlurmNode) -> int:
    """GPUs of a node's GRES: `gpu:h100:8` is 8."""
    return sum(int(count) for count in re.findall(r":(\d+)(?:,|$)", node.gpus))


async def list_nodes(where: Queue, settings: SlurmSettings) -> list[SlurmNode]:
    """Nodes of the cluster file's partition (else all), without those that it excludes; at least one."""
    described = {node.name: node for node in parse_nodes(await scontrol(where, "show", "node", "--oneliner"))}
    partition = ["--partition", settings.defaults.partition] if settings.defaults.partition else []
    excluded = [word for name in settings.defaults.exclude for word in await _expand(where, name)]
    wanted = [word for name in settings.defaults.nodelist for word in await _expand(where, name)]
    names = (await call(where, ["sinfo", "--noheader", "--Node", "--format=%N", *partition])).split()
    chosen = [name for name in dict.fromkeys(names) if name not in excluded and (not wanted or name in wanted)]
    if nodes := [described[name] for name in chosen if name in described]:
        return nodes
    raise UsageError("no node is listed by Slurm, or the cluster file excludes all")


def parse_nodes(text: str) -> list[SlurmNode]:
    """Nodes of `scontrol show node --oneliner`."""
    nodes: dict[str, SlurmNode] = {}
    for line in _lines(text):
        name, state = re.search(r"\bNodeName=(\S+)", line), re.search(r"\bState=(\S+)", line)
        if name is None or state is None:
            raise TargetError(f"scontrol printed a line that describes no node: {line[:200]!r}")
        if name[1] in nodes:
            raise TargetError(f"scontrol describes the node {name[1]} twice: see `scontrol show node` and its reasons")
        gres, address = re.search(r"\bGres=(\S+)", line), re.search(r"\bNodeAddr=(\S+)", line)
        gpus = re.findall(r"gpu(?::[\w.-]+)?:\d+", gres[1] if gres else "")
        words = tuple(filter(None, re.split(r"[+*~#!%$@^-]", state[1])))
        nodes[name[1]] = SlurmNode(
            name=name[1], states=(*words, *(("NOT_RESPONDING",) if "*" in state[1] else ())), gpus=",".join(gpus),
            reason=parse_reason(line) if "DRAIN" in words else "", address=address[1] if address else "",
        )  # fmt: skip
    return list(nodes.values())


def parse_reason(line: str) -> str:
    """Why a node is drained. Slurm ends it with its author and time: `trainmaster: … [root@2026-03-01T12:00:00]`."""
    reason = re.search(r"\bReason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?\s*(?: Comment=.*)?$", line.strip())
    return reason[1] if reason else ""


def _lines(text: str) -> list[str]:
    """One line per node: a reason may hold line breaks and control characters."""
    lines: list[str] = []
    for line in text.split("\n"):
        if line.startswith("NodeName=") or not lines:
            lines.append(line)
        else:
            lines[-1] += f" {line}"
    return [clean(line).rstrip() for line in lines if line.strip()]


def options(
    nodes: Sequence[SlurmNode], settings: SlurmSettings, *, name: str, owner: Owner, limit_s: float, per_node: int = 1
) -> list[str]:
    """Options of srun and salloc for whole nodes with all their GPUs."""
    words = [
        f"--nodelist={','.join(node.name for node in nodes)}", f"--nodes={len(nodes)}",
        f"--ntasks={per_node * len(nodes)}", f"--job-name={name}", f"--time={int(limit_s // 60) + 2}",
        f"--immediate={FREE_S}", "--exclusive", f"--comment={layout.RUN_COMMENT}{owner.home}:{owner.run}",
    ]  # fmt: skip
    words += [f"--ntasks-per-node={per_node}"] if len(nodes) > 1 else []
    words += [f"--gres={nodes[0].gpus}"] if nodes[0].gpus and len({node.gpus for node in nodes}) == 1 else []
    for option in ("partition", "account", "qos"):
        if (value := getattr(settings.defaults, option)) is not None:
            words.append(f"--{option}={value}")
    return words


async def _expand(where: Queue, names: str) -> list[str]:
    return (await scontrol(where, "show", "hostnames", names)).split()


async def scontrol(where: Queue, *words: str) -> str:
    """Output of scontrol."""
    return await call(where, ["scontrol", *words])


async def call(where: Queue, words: Sequence[str], *, program: bool = True) -> str:
    """Output of a command at the site; TargetError where it fails. `program`: one of Slurm's."""
    result, body = await where.request("run", words=list(words), timeout_s=60.0, slurm=program)
    if result.get("code") != 0:
        text = " ".join(str(result.get("error", "")).split())[:300]
        raise TargetError(f"{shlex.join(words)} ended with {result.get('code')}: {text}")
    return body.decode(errors="replace")
