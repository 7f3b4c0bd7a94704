"""Checks on the nodes of a Slurm cluster: one srun per node, all at once, every answer kept.

A node that Trainmaster has drained is retested: it is resumed inside a reservation that no other job may use, checked,
and drained again with its reason; `trainmaster readmit` then resumes it. Should this process die in between, the
reservation stays, without an end, and keeps jobs away until the next check.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shlex
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from trainmaster import targets
from trainmaster.cluster import compare
from trainmaster.cluster.exchange import Answer
from trainmaster.cluster.gather import CheckRequest, TransferStats, accept
from trainmaster.cluster.remedy import PREFIX
from trainmaster.cluster.schedulers import Slurm as SlurmCommands
from trainmaster.core.errors import TargetError
from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
from trainmaster.core.results import Verdict
from trainmaster.targets.slurm.node_check import MARK
from trainmaster.targets.slurm.queue import Queue, queue
from trainmaster.targets.slurm.settings import SlurmSettings
from trainmaster.targets.slurm.target import node_half
from trainmaster.targets.ssh.hosts import SshHost

FREE_S = 30  # for a node that is in use to become free
AT_ONCE = 64
_RESERVATION = "trainmaster_retest_"
_OUT = ("DOWN", "DRAIN", "FAIL", "UNKNOWN", "POWERED_DOWN", "POWERING_DOWN", "REBOOT", "MAINT", "NOT_RESPONDING")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """A node as scontrol describes it."""

    name: str
    states: tuple[str, ...]
    reason: str
    gpus: str  # GRES of all its GPUs, as srun takes it; empty without

    @property
    def ours(self) -> bool:
        """Drained by Trainmaster."""
        return "DRAIN" in self.states and self.reason.startswith(PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNodes:
    """Nodes of a cluster that are to be checked."""

    settings: SlurmSettings
    nodes: tuple[SlurmNode, ...]

    @property
    def hosts(self) -> tuple[SshHost, ...]:
        return tuple(SshHost(host=node.name, name=node.name) for node in self.nodes)


def list_nodes(settings: SlurmSettings) -> SlurmNodes:
    """Nodes of the cluster file's partition (else all), without those that it excludes."""

    async def ask() -> SlurmNodes:
        try:
            where = queue(settings)
            described = parse_nodes(await _scontrol(where, "show", "node", "--oneliner"))
            partition = ["--partition", settings.defaults.partition] if settings.defaults.partition else []
            left = [word for name in settings.defaults.exclude for word in await _expand(where, name)]
            wanted = [word for name in settings.defaults.nodelist for word in await _expand(where, name)]
            names = (await _ask(where, ["sinfo", "--noheader", "--Node", "--format=%N", *partition])).split()
            chosen = [name for name in dict.fromkeys(names) if name not in left and (not wanted or name in wanted)]
            found = {node.name: node for node in described}
            return SlurmNodes(settings=settings, nodes=tuple(found[name] for name in chosen if name in found))
        finally:
            await targets.close()

    return asyncio.run(ask())


def parse_nodes(text: str) -> list[SlurmNode]:
    """Nodes of `scontrol show node --oneliner`."""
    nodes = []
    for line in filter(None, text.splitlines()):
        name, state = re.search(r"\bNodeName=(\S+)", line), re.search(r"\bState=(\S+)", line)
        if name is None or state is None:
            raise TargetError(f"scontrol printed a line that describes no node: {line[:200]!r}")
        gres = re.search(r"\bGres=(\S+)", line)
        gpus = re.findall(r"gpu(?::[\w.-]+)?:\d+", gres[1] if gres else "")
        words = tuple(filter(None, re.split(r"[+*~#!%$@^-]", state[1])))
        states = (*words, *(("NOT_RESPONDING",) if "*" in state[1] else ()))
        drained = SlurmCommands().parse(name[1], line)
        nodes.append(SlurmNode(name=name[1], states=states, reason=drained.reason, gpus=",".join(gpus)))
    return nodes


def gather(
    cluster: SlurmNodes,
    request: CheckRequest,
    *,
    bundle: Path | None = None,
    on_answer: Callable[[str, str], None] | None = None,
    stats: TransferStats | None = None,
) -> ClusterHealth:
    """Health of every node, or the reason it is silent."""
    cost = stats or TransferStats()

    async def one(node: SlurmNode, where: Queue, package: str, gate: asyncio.Semaphore) -> NodeHealth | Silent:
        started = time.monotonic()
        host = SshHost(host=node.name, name=node.name)
        try:
            async with gate, _open(where, node) as within:
                answer = await _check(where, node, request, cluster.settings, package=package, within=within)
            cost.received_bytes += answer.received_bytes
            found: NodeHealth | Silent = accept(host, answer, request, bundle)
        except _Silent as wrong:
            found = _silent(node.name, wrong.reason, wrong.action)
        except TargetError as wrong:
            found = _silent(node.name, str(wrong), "see `scontrol show node` and the log of its slurmd")
        except Exception as wrong:  # an internal error about one node must not hide the others
            found = _silent(node.name, f"internal error: {type(wrong).__name__}: {wrong}", "report it as a bug")
        cost.took_s[node.name] = round(time.monotonic() - started, 3)
        if isinstance(found, Silent):
            found = replace(found, took_s=cost.took_s[node.name])
        if on_answer is not None:
            on_answer(node.name, str(found.overall) if isinstance(found, NodeHealth) else "silent")
        return found

    async def ask_all() -> list[NodeHealth | Silent]:
        try:
            where, gate = queue(cluster.settings), asyncio.Semaphore(AT_ONCE)
            result, _ = await where.ask("prepare", package=node_half(cluster.settings))
            return await asyncio.gather(*(one(node, where, str(result["package"]), gate) for node in cluster.nodes))
        finally:
            await targets.close()

    started_at, started = datetime.now().astimezone().isoformat(timespec="seconds"), time.monotonic()
    found = asyncio.run(ask_all())
    nodes = tuple(item for item in found if isinstance(item, NodeHealth))
    return ClusterHealth(
        asked=tuple(node.name for node in cluster.nodes),
        nodes=nodes,
        silent=tuple(item for item in found if isinstance(item, Silent)),
        cluster=compare.compare(nodes) if len(cluster.nodes) > 1 else (),
        started_at=started_at,
        took_s=round(time.monotonic() - started, 3),
    )


class _Silent(Exception):
    """A node that cannot be checked now."""

    def __init__(self, reason: str, action: str) -> None:
        super().__init__(reason)
        self.reason, self.action = reason, action


@contextlib.asynccontextmanager
async def _open(where: Queue, node: SlurmNode) -> AsyncIterator[str | None]:
    """The reservation to check a node in; None for a node in service. Afterwards the node is drained as before."""
    name = f"{_RESERVATION}{node.name}"
    left_over = node.name if await _has_reservation(where, name) else None
    bad = [state for state in node.states if state in _OUT]
    if not node.ours and left_over is None:
        if bad:
            why = f": {node.reason}" if node.reason else ""
            raise _Silent(
                f"Slurm shows it as {'+'.join(node.states)}{why}", "repair and resume it, then check it again"
            )
        yield None
        return
    if any(state not in ("DRAIN", "MAINT") for state in bad):
        raise _Silent(f"Slurm shows it as {'+'.join(node.states)}", "start its slurmd, then check it again")
    reason = node.reason if node.ours else f"{PREFIX} a retest was interrupted"
    if left_over is None:
        user = (await _ask(where, ["id", "-un"], program=False)).strip()
        fields = [
            f"ReservationName={name}", f"Nodes={node.name}", f"Users={user}", "StartTime=now", "Duration=UNLIMITED",
            "Flags=MAINT,IGNORE_JOBS",
        ]  # fmt: skip
        try:
            await _scontrol(where, "create", "reservation", *fields)
        except TargetError as wrong:
            text = f"it is drained ({node.reason}), and a retest needs the rights of an operator: {wrong}"
            raise _Silent(text, "run the check as an operator of Slurm") from None
    try:
        if "DRAIN" in node.states:
            await _scontrol(where, "update", f"nodename={node.name}", "state=resume")
        yield name
    finally:
        await _scontrol(where, "update", f"nodename={node.name}", "state=drain", f"reason={reason}")
        await _scontrol(where, "delete", f"ReservationName={name}")


async def _has_reservation(where: Queue, name: str) -> bool:
    return f"ReservationName={name} " in await _scontrol(where, "show", "reservation", "--oneliner")


async def _check(
    where: Queue, node: SlurmNode, request: CheckRequest, settings: SlurmSettings, *, package: str, within: str | None
) -> Answer:
    """Run the checks on a node and read its answer."""
    started = time.monotonic()
    minutes = int(request.timeout_s // 60) + 2
    options = [
        f"--nodelist={node.name}", "--nodes=1", "--ntasks=1", "--job-name=trainmaster-check", f"--time={minutes}",
        f"--immediate={FREE_S}", "--exclusive", "--cpu-bind=none", "--quit-on-interrupt", "--kill-on-bad-exit=1",
    ]  # fmt: skip
    options += [f"--gres={node.gpus}"] if node.gpus else []
    options += [f"--reservation={within}"] if within else []
    for name in ("partition", "account", "qos"):
        if (value := getattr(settings.defaults, name)) is not None:
            options.append(f"--{name}={value}")
    program = ["env", f"PYTHONPATH={package}", "PYTHONSAFEPATH=1", settings.python, "-m"]
    words = ["srun", *options, *program, "trainmaster.targets.slurm.node_check", *request.words(node.name)]
    result, body = await where.ask("run", words=words, timeout_s=request.timeout_s + FREE_S + 30)
    text = body.decode(errors="replace")
    line = next((line for line in text.splitlines() if line.startswith(MARK)), None)
    if line is None:
        said = " ".join(str(result.get("error", "")).split())[-300:] or "nothing was printed"
        if "busy" in said or "Immediate" in said or "Unable to allocate" in said:
            raise _Silent(f"it was not free within {FREE_S} s: {said}", "check it when its jobs have ended")
        raise _Silent(
            f"srun ended with {result.get('code')}: {said}", f"run it by hand: {shlex.join(words[:5])} hostname"
        )
    try:
        answer = json.loads(line.removeprefix(MARK))
        if answer["code"] not in (0, 1, 3):
            raise _Silent(f"the checks ended with {answer['code']}: {answer['error']}", "run the checks on it by hand")
        files = {str(name): str(content) for name, content in answer["files"].items()}
        health = str(answer["health"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _Silent("its answer cannot be parsed", "check it again") from None
    return Answer(
        health=health, files=files, sent_bytes=0, received_bytes=len(body), took_s=round(time.monotonic() - started, 3)
    )


async def _expand(where: Queue, names: str) -> list[str]:
    return (await _scontrol(where, "show", "hostnames", names)).split()


async def _scontrol(where: Queue, *words: str) -> str:
    return await _ask(where, ["scontrol", *words])


async def _ask(where: Queue, words: Sequence[str], *, program: bool = True) -> str:
    """Output of a command at the site; TargetError where it fails."""
    result, body = await where.ask("run", words=list(words), timeout_s=60.0, slurm=program)
    if result.get("code") != 0:
        said = " ".join(str(result.get("error", "")).split())[:300]
        raise TargetError(f"{shlex.join(words)} ended with {result.get('code')}: {said}")
    return body.decode(errors="replace")


def _silent(node: str, reason: str, action: str) -> Silent:
    return Silent(node=node, verdict=Verdict.ERROR, reason=reason, action=action)
