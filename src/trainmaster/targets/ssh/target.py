"""The ssh target: reserve a slot on as many machines as a job wants, start one agent on each, poll all of them.

`place` reserves before anything is started, and the handle with the machines' names is in the database before `submit`
begins: whatever is cut off afterwards, the machines that may hold something of the attempt are known. All agents of an
attempt start, or what has started is killed again. The attempt is over when every agent has ended, or one has failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from trainmaster.core.errors import NoAccess, NoCapacity, NodeLost, TargetError, Unreachable
from trainmaster.core.plan import OUTPUTS_FOLDER, PLAN_FILE, WORK_FOLDER, Plan
from trainmaster.core.states import TargetState
from trainmaster.core.workdir import find_digest
from trainmaster.queueing.state import DeviceListing
from trainmaster.remote import job_user
from trainmaster.remote.attempt_host import check_range
from trainmaster.remote.devices import Gpu
from trainmaster.remote.members import SPARES
from trainmaster.targets import FileSize, Handle, NodeAccess, Owned, Placement, Poll, Pull, Submission
from trainmaster.targets._answers import clean, malformed
from trainmaster.targets._devices import KEY, find_gpus, to_device
from trainmaster.targets._node_files import find_stream, rename
from trainmaster.targets.ssh import slots, transfer
from trainmaster.targets.ssh.combine import combine, count_places, read_poll
from trainmaster.targets.ssh.hosts import SshHost, SshHosts, parse_hosts, read_known_hosts, with_user
from trainmaster.targets.ssh.session import Reply, Session, session
from trainmaster.targets.ssh.streams import read_files, read_gpus, split_body

_LISTING_S = 10.0  # for nvidia-smi of a machine; one that hangs is not waited for


class Ssh:
    """Runs attempts on the machines of a hosts file."""

    fetches_inputs = True

    def __init__(self, path: Path, *, user: str | None = None) -> None:
        self._path, self._user = path, user

    def plan(self, placement: Placement) -> Submission:
        hosts, resources = self.hosts().hosts, placement.spec.resources
        if resources.machines > len(hosts):
            asks = f"{resources.nodes} nodes" + (f" and {resources.spares} spares" if resources.spares else "")
            raise TargetError(f"ssh: the spec asks for {asks}, {self._path.name} lists {len(hosts)}")
        return plan_on(hosts[: resources.machines], placement)

    async def place(self, submission: Submission) -> Handle:
        """Reserve one slot on each of as many machines as the job has nodes and spares."""
        wanted, spares = len(submission.files), int(submission.handle.get(SPARES, 0))
        sessions = self._sessions()
        missing = [node.host.key for node in sessions if not _has_key(node.host)]
        if sessions and len(missing) == len(sessions):  # no machine can be asked, however long one waits
            raise NoAccess(f"ssh: the key {missing[0]} cannot be read here; nothing was sent")
        if KEY in submission.handle:
            taken = self._nodes({"nodes": list(submission.handle[KEY])})
            await _all_held(taken, str(submission.handle["attempt"]))
        else:
            taken = await _reserve(sessions, submission)
        prices = [node.host.price_per_hour for node in taken]
        priced = {} if None in prices else {"price_cents_per_hour": 100 * sum(price for price in prices if price)}
        held = {SPARES: len(taken) - (wanted - spares)} if spares else {}
        return {**submission.handle, "nodes": [node.host.name for node in taken], **held, **priced}

    async def submit(self, submission: Submission) -> Handle:
        handle, nodes = submission.handle, self._nodes(submission.handle)
        plans = [Plan.from_json(text) for text in submission.files.values()]
        secrets = job_user.find_secrets(plans[0].spec)
        try:
            for node in nodes:
                if not await slots.claim(node, str(handle["attempt"]), counted=KEY not in handle):
                    raise TargetError(f"ssh: {node.host.name} gave the slot of this attempt to another job")
            if submission.work is not None:
                await transfer.upload_work(submission.work, nodes, str(handle["attempt"]))
            if submission.pulls:
                await _all(_fetch(node, str(handle["attempt"]), submission.pulls) for node in nodes)
            address, port = await _rendezvous(nodes, str(handle["attempt"])) if len(nodes) > 1 else ("127.0.0.1", None)
            for rank, (node, plan) in enumerate(zip(nodes, plans, strict=False)):  # it may have fewer spares
                folder, checkpoints = _folders(node.host, plan.attempt, plan.spec.resume_from, name=node.host.name)
                ours = replace(plan, folder=folder, checkpoints=checkpoints, gpus=find_gpus(handle, node.host.name))
                ours = replace(ours, node_rank=rank, master_addr=address, master_port=port)
                await node.request("submit", plan=ours.to_json(), secrets=secrets)
        except Unreachable as error:
            if any(node.lost for node in nodes):
                raise NodeLost(str(error)) from None
            raise  # asked again: every step finds what was done before
        except TargetError:
            await _each(node.request("release", attempt=handle["attempt"]) for node in nodes)
            raise
        return {**handle, "submitted": True}

    async def list_devices(self) -> DeviceListing:
        """GPUs of every machine that answers in time; hosts without any are given out by their slots."""
        sessions = self._sessions()
        replies = await _each(_in_time(node.request("list_gpus")) for node in sessions)
        gpus: dict[str, list[Gpu]] = {}
        silent: dict[str, str] = {}
        for name, reply in zip([node.host.name for node in sessions], replies, strict=True):
            try:
                if isinstance(reply, TargetError):
                    raise reply
                gpus[name] = read_gpus(name, reply)
            except TargetError as error:
                silent[name] = clean(str(error))[:300]
        listed = [to_device(name, gpu) for name, some in gpus.items() for gpu in some]
        return DeviceListing(devices={"gpu": listed}, silent=silent, answered=list(gpus))

    def list_machines(self) -> list[str]:
        return [host.name for host in self.hosts().hosts]

    def open_nodes(self, *, limit_s: float, home: Path, retest: bool = False) -> NodeAccess:  # noqa: ARG002 (no marks)
        from trainmaster.targets.ssh.nodes import SshNodes

        return SshNodes(self.hosts())

    def count_nodes(self, handle: Handle) -> int:
        return len(handle["nodes"])

    async def poll(self, handle: Handle) -> Poll:
        nodes = self._nodes(handle)
        replies = await _each(node.request("poll", attempt=handle["attempt"]) for node in nodes)
        return combine([read_poll(node, reply) for node, reply in zip(nodes, replies, strict=True)], handle, replies)

    async def read(self, handle: Handle, stream: str, *, offset: int, limit: int) -> bytes:
        rank, name = _find_stream(stream, handle)
        check_range(name, offset, limit)
        nodes = self._nodes(handle)
        if not nodes:
            return b""
        try:
            reply = await nodes[rank].request(
                "read", attempt=handle["attempt"], stream=name, offset=offset, limit=limit
            )
        except Unreachable as error:
            if nodes[rank].lost:
                raise TargetError(f"{stream} is on a machine that is lost: {error}") from None
            raise
        if len(reply.body) > limit:
            raise malformed(f"{nodes[rank].host.name}: {len(reply.body):,} bytes where {limit:,} were asked for")
        return reply.body

    async def read_many(self, handle: Handle, streams: Sequence[str], *, limit: int) -> list[bytes | None]:
        bodies: dict[str, bytes | None] = {}
        for rank, node in enumerate(self._nodes(handle)):
            names = {stream: name for stream in streams for at, name in [_find_stream(stream, handle)] if at == rank}
            if not names:
                continue
            try:
                reply = await node.request(
                    "read_many", attempt=handle["attempt"], streams=list(names.values()), limit=limit
                )
            except Unreachable:
                if node.lost:
                    continue
                raise
            bodies |= zip(names, split_body(node, reply, len(names)), strict=True)
        return [bodies.get(stream) for stream in streams]

    async def list_files(self, handle: Handle) -> list[FileSize]:
        files: list[FileSize] = []
        for rank, node in enumerate(self._nodes(handle)):
            try:
                reply = await node.request("list_files", attempt=handle["attempt"])
            except Unreachable:
                if not node.lost:
                    raise
                fault = f"{node.host.name} is lost, and with it what it had"
                files.append(FileSize(name=f"{OUTPUTS_FOLDER}/node-{rank}", size_bytes=0, fault=fault))
                continue
            files += [rename(file, rank, nodes=count_places(handle)) for file in read_files(node, reply)]
        return sorted(files, key=lambda file: file.name)

    async def cancel(self, handle: Handle, *, reason: str) -> None:
        await _all(node.request("cancel", attempt=handle["attempt"], reason=reason) for node in self._nodes(handle))

    async def release(self, handle: Handle) -> None:
        if handle["nodes"]:
            # What a lost machine still runs is listed as owned, and ended, when it answers again.
            nodes = self._nodes(handle)
            replies = await _each(node.request("release", attempt=handle["attempt"]) for node in nodes)
            for node, reply in zip(nodes, replies, strict=True):
                if isinstance(reply, TargetError) and not node.lost:
                    raise reply
        else:  # cut off while it was placed: a slot may be reserved, and on a machine that is away it lapses by itself
            await _each(node.request("release", attempt=handle["attempt"]) for node in self._sessions())

    async def list_owned(self, *, partial: bool = False) -> list[Owned]:
        sessions = self._sessions()
        replies = await _each(node.request("owned") for node in sessions)
        silent = [str(reply) for reply in replies if isinstance(reply, TargetError)]
        if silent and not partial:
            raise Unreachable(f"ssh: {len(silent)} of {len(sessions)} machines cannot be asked: {silent[0]}")
        places_of: dict[str, list[tuple[str, str]]] = {}
        for node, reply in zip(sessions, replies, strict=True):
            for attempt, what in _pairs(reply):
                places_of.setdefault(attempt, []).append((node.host.name, what))
        return [
            Owned(
                attempt=attempt,
                handle={"attempt": attempt, "nodes": [name for name, _ in places], "submitted": True},
                what="; ".join(f"{name}: {what}" for name, what in places),
            )
            for attempt, places in places_of.items()
        ]

    def hosts(self) -> SshHosts:
        """Machines of the hosts file, read again: a server picks up changes."""
        from trainmaster.documents import yaml_file

        document = yaml_file.load(self._path, what="target: hosts file")
        return with_user(document.read(lambda value: parse_hosts(value, self._path.parent)), self._user)

    def _sessions(self) -> list[Session]:
        hosts = self.hosts()
        known = read_known_hosts(hosts.known_hosts)
        return [session(host, known) for host in hosts.hosts]

    def _nodes(self, handle: Handle) -> list[Session]:
        """Sessions with the machines of an attempt. One that left the hosts file cannot be asked any more."""
        by_name = {node.host.name: node for node in self._sessions()}
        missing = [name for name in handle["nodes"] if name not in by_name]
        if missing:
            raise Unreachable(
                f"ssh: {', '.join(missing)} is no longer in {self._path.name}; put it back until the job ends"
            )
        return [by_name[name] for name in handle["nodes"]]


async def _reserve(sessions: Sequence[Session], submission: Submission) -> list[Session]:
    """Machines by their slots: none that is drained, and none with GPUs, which are the queue's to give out.

    The first attempt waits for every spare; a later one, after a loss, takes those that are there.
    """
    attempt, wanted = str(submission.handle["attempt"]), len(submission.files)
    least = wanted if attempt.endswith(".1") else wanted - int(submission.handle.get(SPARES, 0))
    open_ones = [node for node in sessions if node.host.name not in submission.avoid]
    if len(open_ones) < least:
        closed = "; ".join(f"{name}: {why}" for name, why in submission.avoid.items())
        raise NoCapacity(f"ssh: {len(open_ones)} of {len(sessions)} machines take new jobs ({closed or 'too few'})")
    bare = not all(map(_hides_gpus, submission.files.values()))
    for count in range(min(wanted, len(open_ones)), least, -1):
        with contextlib.suppress(NoCapacity):
            return await slots.reserve(open_ones, attempt, count, bare=bare, last=submission.last)
    return await slots.reserve(open_ones, attempt, least, bare=bare, last=submission.last)


def _hides_gpus(plan: str) -> bool:
    """Whether the ranks of a plan see no GPU by their own environment."""
    return Plan.from_json(plan).spec.env.get("CUDA_VISIBLE_DEVICES") == ""


def _has_key(host: SshHost) -> bool:
    """Whether the key file that a hosts file names can be read; without one the agent or ~/.ssh decides."""
    return host.key is None or os.access(Path(host.key).expanduser(), os.R_OK)


def plan_on(hosts: Sequence[SshHost], placement: Placement) -> Submission:
    """Submission for these machines, whose names are not known yet; spares are the last of them."""
    spec, nodes = placement.spec, len(hosts)
    files = {}
    for rank, host in enumerate(hosts):
        folder, checkpoints = _folders(host, placement.attempt, spec.resume_from, name=f"NODE-{rank}")
        plan = Plan(
            attempt=placement.attempt,
            spec=spec,
            folder=folder,
            checkpoints=checkpoints,
            node_rank=rank,
            master_addr="127.0.0.1" if nodes == 1 else "ADDRESS-OF-NODE-0",
            master_port=None if nodes == 1 else 1,
        )
        files[f"node {rank}: {plan.folder}/{PLAN_FILE}"] = plan.to_json() + "\n"
    agent = ("python3", "-m", "trainmaster.agent", "--detach", PLAN_FILE)
    return Submission(
        handle={
            "attempt": placement.attempt,
            "nodes": [],
            "ranks_per_node": spec.resources.processes_per_node,
            **({SPARES: spec.resources.spares} if spec.resources.spares else {}),
        },
        files=files,
        commands=tuple(("ssh", f"NODE-{rank}", *agent) for rank in range(nodes)),
        work=placement.job_folder / WORK_FOLDER if find_digest(spec.workdir) is not None else None,
    )


def _folders(host: SshHost, attempt: str, resume_from: str | None, *, name: str) -> tuple[str, str]:
    """Folders of an attempt on a host: its own, and that of the job's checkpoints."""
    job, _, number = attempt.partition(".")
    root = f"{host.folder.rstrip('/')}/jobs"
    return f"{root}/{job}/attempts/{number}-{name}", f"{root}/{resume_from or job}/checkpoints"


async def _each(questions: Iterable[Awaitable[Reply]]) -> list[Reply | TargetError]:
    """Answers, with the error of each question that has none."""

    async def reply_or_error(question: Awaitable[Reply]) -> Reply | TargetError:
        try:
            return await question
        except TargetError as error:
            return error

    return await asyncio.gather(*map(reply_or_error, questions))


async def _in_time(question: Awaitable[Reply]) -> Reply:
    try:
        return await asyncio.wait_for(question, _LISTING_S)
    except TimeoutError:
        raise Unreachable(f"it did not say within {_LISTING_S:g} s which GPUs it has") from None


async def _all_held(nodes: Sequence[Session], attempt: str) -> None:
    """Hold the machines whose devices the queue gave to an attempt."""
    for node in nodes:
        if not await slots.claim(node, attempt, counted=False):
            raise NoCapacity(f"ssh: {node.host.name} takes no more jobs")


async def _all(questions: Iterable[Awaitable[Reply]]) -> None:
    """Every question is asked; the first error is raised after that."""
    for reply in await _each(questions):
        if isinstance(reply, TargetError):
            raise reply


async def _fetch(node: Session, attempt: str, pulls: Sequence[Pull]) -> Reply:
    """Bring inputs to a node: it pulls those that have an address, the others are sent."""
    wanted = [
        {
            "name": pull.name, "url": pull.url, "to": pull.to, "size_bytes": pull.size_bytes,
            "version": pull.version, "md5": pull.md5, "sha256": pull.sha256, "mode": pull.mode,
        }
        for pull in pulls if pull.source is None
    ]  # fmt: skip
    reply = await node.request("pull", attempt=attempt, objects=wanted)
    for pull in pulls:
        if pull.source is not None:
            await transfer.upload(node, pull.source, f"{reply.result['folder']}/{pull.to}")
    return reply


async def _rendezvous(nodes: Sequence[Session], attempt: str) -> tuple[str, int]:
    """Where the ranks meet: a port of the first node that every other node has reached."""
    first = nodes[0]
    reply = await first.request("rendezvous", attempt=attempt, address=first.host.address)
    address, port = reply.result.get("address"), reply.number("port")
    if not isinstance(address, str) or not re.fullmatch(r"[A-Za-z0-9.:%_-]{1,255}", address) or not 0 < port < 65536:
        raise malformed(f"{first.host.name}: no address to meet at")
    polled = [read_poll(node, await node.request("poll", attempt=attempt)) for node in nodes]
    if any(poll.state is not TargetState.WAITING for poll in polled):
        return address, port  # agents have begun: the port is theirs
    await first.request("listen", address=address, port=port)
    try:
        for peer, dialled in zip(nodes[1:], await _each(_dial(nodes[1:], address, port)), strict=True):
            if isinstance(dialled, TargetError):
                raise dialled
            if not dialled.flag("reached"):
                why = clean(str(dialled.result.get("why", "")))[:200]
                raise TargetError(
                    f"ssh: {peer.host.name} cannot reach {first.host.name} at {address} port {port} ({why}); open the "
                    "ports between the nodes, or state the right `address` in the hosts file"
                )
    finally:
        await first.request("unlisten", port=port)
    return address, port


def _dial(nodes: Sequence[Session], address: str, port: int) -> list[Awaitable[Reply]]:
    return [node.request("dial", address=address, port=port) for node in nodes]


def _pairs(reply: Reply | TargetError) -> list[tuple[str, str]]:
    """Attempts that a machine says it holds; none of one that cannot be asked."""
    listed = reply.result.get("owned") if isinstance(reply, Reply) else None
    pairs = [item for item in listed if isinstance(item, list) and len(item) == 2] if isinstance(listed, list) else []
    return [(str(attempt), clean(str(what))[:300]) for attempt, what in pairs]


def _find_stream(stream: str, handle: Handle) -> tuple[int, str]:
    return find_stream(stream, nodes=len(handle["nodes"]), ranks_per_node=int(handle.get("ranks_per_node", 1)))
