"""Node end of the ssh target: the attempts of this machine, requested over one SSH channel.

`python -m trainmaster.remote.node_server FOLDER NAME`, started by the bootstrap. One process per connection; it
holds no state of its own and ends with the connection, while the agents that it started go on. Standard library only.

    FOLDER/jobs/JOB/attempts/N-NAME/   an attempt on this machine, as on the local target
    FOLDER/jobs/JOB/checkpoints/       outlives the attempts
    FOLDER/claims/NAME/JOB.N.json      the attempt has a slot of this machine

NAME is the machine's name in the hosts file: FOLDER may be on a file system that all machines share.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from trainmaster.core import schema
from trainmaster.core.compat import waiting
from trainmaster.core.container import SECRETS_FOLDER
from trainmaster.core.errors import TargetError, TrainmasterError, Unreachable
from trainmaster.core.files import read_small, write_whole
from trainmaster.core.ids import UUID_PATTERN
from trainmaster.core.plan import LOCK_FILE, MEMBERS_FILE, WORK_FOLDER, Plan
from trainmaster.core.states import TargetState
from trainmaster.remote import devices, frames
from trainmaster.remote.attempt_host import AttemptHost, submission
from trainmaster.remote.data import kind_of
from trainmaster.remote.files import Answer, NodeFiles
from trainmaster.remote.members import parse_members
from trainmaster.remote.pull import Object, pull

_ATTEMPT = re.compile(rf"({UUID_PATTERN})\.([0-9]{{1,6}})")
_UNUSED_S = 900.0  # a claim without a submission is dropped after this: its control plane died between the two
_DIAL_S = 10.0


class Node(NodeFiles):
    """Requests about attempts on this machine. Methods without an underscore are the protocol."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__()
        self._folder, self._name = folder, name
        self._claims = folder / "claims" / name
        self._host = AttemptHost()
        self._gate = asyncio.Lock()
        self._pulls: dict[str, asyncio.Future[bool]] = {}
        self._listening: dict[int, asyncio.Server] = {}

    async def offer(self, attempts: Sequence[str], slots: int) -> Answer:
        """Free slots, which of these attempts have one already, whose jobs were here before; `bare`: it has no GPU."""
        knows = [attempt for attempt in attempts if self._attempt_folder(attempt).parent.parent.exists()]
        async with self._locked():
            live = await self._live()
        held = [attempt for attempt in attempts if attempt in live]
        return {"free": slots - len(live), "held": held, "knows": knows, "bare": devices.has_none()}, b""

    async def claim(self, attempt: str, slots: int) -> Answer:
        """Take a slot for an attempt, or find it taken. At most `slots` attempts have one."""
        async with self._locked():
            held = await self._live()
            if attempt not in held and len(held) >= slots:
                return {"held": False}, b""
            if attempt in held:
                self._claim(attempt).touch()  # in use: staging may take hours
            else:
                write_whole(self._claim(attempt), json.dumps({"attempt": attempt}), durable=True)
        return {"held": True}, b""

    async def rendezvous(self, attempt: str, address: str | None) -> Answer:
        """Address and port where the ranks of a claimed attempt meet: chosen once, and then always the same."""
        path = self._claim(attempt)
        async with self._locked():
            try:
                claim = json.loads(read_small(path))
            except FileNotFoundError:
                raise TargetError(f"{attempt} has no slot here") from None
            if "port" not in claim:
                own = address or _own_address()
                with socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET) as probe:
                    probe.bind((own, 0))
                    claim |= {"address": own, "port": probe.getsockname()[1]}
                write_whole(path, json.dumps(claim), durable=True)
        return {"address": claim["address"], "port": claim["port"]}, b""

    async def listen(self, address: str, port: int) -> Answer:
        """Accept connections there until `unlisten`, so that the other nodes can try."""
        self._listening[port] = await asyncio.start_server(lambda _, writer: writer.close(), address, port)
        return {}, b""

    async def unlisten(self, port: int) -> Answer:
        if (server := self._listening.pop(port, None)) is not None:
            server.close()
        return {}, b""

    async def dial(self, address: str, port: int) -> Answer:
        """Whether this node reaches another one."""
        try:
            async with waiting.timeout(_DIAL_S):
                _, writer = await asyncio.open_connection(address, port)
        except OSError as error:  # TimeoutError is one
            return {"reached": False, "why": str(error) or f"no answer in {_DIAL_S:g} s"}, b""
        writer.close()
        return {"reached": True}, b""

    async def has_work(self, attempt: str) -> Answer:
        """The working folder of the attempt's job, and whether it is here."""
        work = self._attempt_folder(attempt).parent.parent / WORK_FOLDER
        return {"folder": str(work), "present": work.exists()}, b""

    async def pull(self, attempt: str, objects: Sequence[Mapping[str, Any]]) -> Answer:
        """Pull objects into the job's folder, all at the same time; a second request for one waits for the first."""
        job = self._attempt_folder(attempt).parent.parent
        work = []
        for fields in objects:
            place = (job / str(fields["to"])).resolve()
            if not place.is_relative_to(job.resolve()):
                raise TargetError(f"{fields['to']!r:.200} leads out of the job's folder")
            stated = {name: value for name, value in fields.items() if name != "to"}
            wanted = Object(**stated, place=str(place), machine=self._name)
            if wanted.place not in self._pulls or self._pulls[wanted.place].done():
                self._pulls[wanted.place] = asyncio.ensure_future(asyncio.to_thread(pull, wanted))
            work.append(self._pulls[wanted.place])
        for task in work:
            await asyncio.shield(task)  # a request that is given up does not end the pull; the next one finds it
        return {"folder": str(job)}, b""

    async def submit(self, plan: str, secrets: Mapping[str, str] | None = None) -> Answer:
        """Start the agent of a plan whose folders begin with `~/` or are absolute, or find it started.

        Secrets become files that the agent reads and removes.
        """
        made = _expand(plan)
        if Path(made.folder) != self._attempt_folder(made.attempt):
            raise TargetError(f"{made.folder} is not the folder of {made.attempt} here")
        if secrets and not (Path(made.folder) / LOCK_FILE).exists():
            place = Path(made.folder) / SECRETS_FOLDER
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name, value in secrets.items():
                write_whole(place / Path(name).name, value, durable=False, mode=0o600)
        return dict(await self._host.submit(submission(made))), b""

    async def poll(self, attempt: str) -> Answer:
        poll = await self._host.poll(self._handle(attempt))
        record = None if poll.exit is None else poll.exit.to_json()
        members = await asyncio.to_thread(_read_members, self._attempt_folder(attempt) / MEMBERS_FILE)
        return {"state": poll.state.value, "exit": record, "note": poll.note, "members": members}, b""

    async def read(self, attempt: str, stream: str, offset: int, limit: int) -> Answer:
        limit = min(limit, frames.MAX_BODY_BYTES)
        return {}, await self._host.read(self._handle(attempt), stream, offset=offset, limit=limit)

    async def read_many(self, attempt: str, streams: Sequence[str], limit: int) -> Answer:
        """The beginnings of several streams, one after another; size null where one cannot be read."""
        sizes: list[int | None] = []
        parts: list[bytes] = []
        for stream in streams:
            try:
                part = await self._host.read(self._handle(attempt), stream, offset=0, limit=limit)
            except TargetError:
                sizes.append(None)
                continue
            sizes.append(len(part))
            parts.append(part)
        return {"sizes": sizes}, b"".join(parts)

    async def list_files(self, attempt: str) -> Answer:
        files = await self._host.list_files(self._handle(attempt))
        return {"files": [[file.name, file.size_bytes, file.fault] for file in files]}, b""

    async def cancel(self, attempt: str, reason: str) -> Answer:
        await self._host.cancel(self._handle(attempt), reason=reason)
        return {}, b""

    async def release(self, attempt: str) -> Answer:
        """Kill the attempt and free its slot; its files stay."""
        await self._host.release(self._handle(attempt))
        async with self._locked():
            self._claim(attempt).unlink(missing_ok=True)
        return {}, b""

    async def owned(self) -> Answer:
        """Attempts that hold a slot or have processes here."""
        async with self._locked():
            what_by_attempt = dict.fromkeys(await self._live(), "a slot")
        for item in await self._host.list_owned():
            # Any process may carry any name: one that is no attempt's must not hide the others.
            if _ATTEMPT.fullmatch(item.attempt) is None:
                continue
            if item.handle["folder"] == str(self._attempt_folder(item.attempt)):  # not another user's or folder's
                what_by_attempt[item.attempt] = item.what
        return {"owned": sorted(what_by_attempt.items())}, b""

    async def list_gpus(self) -> Answer:
        """GPUs of this machine with the processes on each."""
        try:
            gpus = await devices.ask_gpus()
        except devices.DevicesUnknown as error:
            raise TargetError(str(error)) from error
        return {"gpus": [[gpu.uuid, gpu.model, gpu.parent, list(map(list, gpu.users))] for gpu in gpus]}, b""

    async def identify(self) -> Answer:
        """Serial numbers of the GPUs, else their UUIDs: a machine may come back under another name.

        None where the driver hangs: the checks find that.
        """
        return {"gpus": await asyncio.to_thread(devices.read_serials)}, b""

    async def slurm(self, call: str, how: Mapping[str, Any], params: Mapping[str, Any]) -> Answer:
        """A request of the slurm target, whose login node this machine is."""
        from trainmaster.remote.slurm.login import LoginNode

        return await LoginNode(**how).answer(call, params)

    async def _live(self) -> set[str]:
        """Attempts with a slot. One that has ended has none, whether it was released or not."""
        held = set()
        running = {item.attempt for item in await self._host.list_owned()}
        for path in self._claims.glob("*.json"):
            attempt = path.name.removesuffix(".json")
            if not _ATTEMPT.fullmatch(attempt):
                continue
            state = (await self._host.poll(self._handle(attempt))).state
            unused = state is TargetState.WAITING and time.time() - path.stat().st_mtime > _UNUSED_S
            gone = state is TargetState.LOST and attempt not in running
            if unused or gone or state in (TargetState.SUCCEEDED, TargetState.FAILED):
                path.unlink(missing_ok=True)
            else:
                held.add(attempt)
        return held

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        """Hold the claims: several control planes and connections may ask at once."""
        async with self._gate:  # a lock on a file would block this thread, and with it the holder
            self._claims.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._claims / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                await asyncio.to_thread(fcntl.flock, fd, fcntl.LOCK_EX)
                yield
            finally:
                os.close(fd)

    def _handle(self, attempt: str) -> dict[str, Any]:
        folder = self._attempt_folder(attempt)
        return {"attempt": attempt, "folder": str(folder)}

    def _attempt_folder(self, attempt: str) -> Path:
        match = _ATTEMPT.fullmatch(attempt)
        if match is None:
            raise TargetError(f"{attempt[:80]!r} is not the name of an attempt")
        return self._folder / "jobs" / match[1] / "attempts" / f"{match[3]}-{self._name}"

    def _claim(self, attempt: str) -> Path:
        self._attempt_folder(attempt)
        return self._claims / f"{attempt}.json"


def _expand(plan: str) -> Plan:
    """A plan with the home folder of this machine in its paths."""
    document = json.loads(plan)
    for name in ("folder", "checkpoints"):
        document[name] = str(Path(document[name]).expanduser())
    return schema.build(Plan, document)


def _read_members(path: Path) -> list[int] | None:
    try:
        return parse_members(read_small(path))
    except OSError:
        return None


def _own_address() -> str:
    """The address of this machine that the SSH client used."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else "127.0.0.1"


async def answer(node: Node, head: Mapping[str, Any], body: bytes) -> tuple[bytes, bytes]:
    """The frame that answers a request, and its body."""
    try:
        name = str(head["method"])
        method: Callable[..., Awaitable[Answer]] | None = None if name.startswith("_") else getattr(node, name, None)
        if method is None:
            raise TargetError(f"there is no request {name!r}")
        result, data = await method(**head["params"], **({"body": body} if body else {}))
        return frames.encode({"id": head["id"], "result": result}, len(data)), data
    except Exception as error:
        kind = "unreachable" if isinstance(error, Unreachable) else kind_of(error)
        known = isinstance(error, (TrainmasterError, OSError))
        text = str(error) if known else f"{type(error).__name__}: {error}"
        return frames.encode({"id": head.get("id"), "error": text[:2000], "kind": kind}), b""


async def serve(node: Node, requests: int, answers: int) -> None:
    """Answer frames from one descriptor on another until the first is closed."""
    reader = asyncio.StreamReader(limit=frames.MAX_HEAD_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(requests, "rb"))
    writing, under_way = asyncio.Lock(), set[asyncio.Task[None]]()

    async def work(head: Mapping[str, Any], body: bytes) -> None:
        frame, data = await answer(node, head, body)
        async with writing:
            await asyncio.to_thread(frames.write, answers, frame)
            if data:
                await asyncio.to_thread(frames.write, answers, data)

    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head_size, body_size = frames.sizes(await reader.readexactly(frames.SIZES_BYTES))
            head = frames.decode(await reader.readexactly(head_size))
            body = await reader.readexactly(body_size)
            task = asyncio.create_task(work(head, body))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
    for task in under_way:
        task.cancel()


def main(words: list[str]) -> None:
    folder = Path(words[0]).expanduser()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever else prints here must not stand between two frames
    asyncio.run(serve(Node(folder.resolve(), words[1]), 0, answers))


if __name__ == "__main__":
    main(sys.argv[1:])
