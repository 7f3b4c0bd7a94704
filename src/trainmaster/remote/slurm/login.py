"""Login node of a Slurm cluster: everything that is done where its commands and the shared folder are.

Used in this process, or on a login node by the server of the ssh target; `answer` is the protocol. It keeps no state:
all is in the attempt's folders (layout.py) and in Slurm. Standard library only.

An sbatch is sent at most once per attempt: before it `intent` is written. Where its outcome is unknown the job is
looked for by its name, and never submitted again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import secrets as secrets_module
import shutil
import stat
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainmaster.core.container import SECRETS_FOLDER
from trainmaster.core.errors import TargetError, Unreachable
from trainmaster.core.files import read_small, write_whole
from trainmaster.core.plan import EXIT_FILE, MEMBERS_FILE, STOP_FILE
from trainmaster.core.states import TargetState
from trainmaster.remote import frames, job_user
from trainmaster.remote.attempt_host import AttemptHost
from trainmaster.remote.members import parse_members
from trainmaster.remote.package import install
from trainmaster.remote.slurm import layout, parse
from trainmaster.remote.slurm.commands import Commands, OutcomeUnknown, failure
from trainmaster.remote.slurm.parse import SlurmJob
from trainmaster.remote.slurm.states import translate

Answer = tuple[Mapping[str, Any], bytes]
_JSON_SINCE = (23, 2)  # before: squeue --json ignores its filters, and sacct --json has wrong exit codes
_SETTLE_S = 120.0  # a submission without an answer that Slurm does not list after this did not happen
_NO_ACCOUNTING = "accounting storage is disabled"
_GONE_S = 100.0
_LOG_BYTES = 4096
_VERSIONS: dict[str, tuple[int, int]] = {}  # of Slurm, by the folder of its commands
_RECORD_BYTES = 1 << 20


class LoginNode:
    """Requests about a Slurm cluster. Methods without an underscore are the protocol."""

    def __init__(
        self, *, commands: str | None = None, env: Mapping[str, str] | None = None, output: str = "auto"
    ) -> None:
        self._slurm = Commands(folder=commands, env=env)
        self._output = output
        self._host = AttemptHost()

    async def answer(self, call: str, params: Mapping[str, Any]) -> Answer:
        """Carry out one request."""
        if call.startswith("_") or call == "answer" or not hasattr(self, call):
            raise TargetError(f"slurm: there is no request {call[:40]!r}")
        reply: Answer = await getattr(self, call)(**params)
        return reply

    async def submit(
        self, base: str, name: str, package: str, files: Mapping[str, str], secrets: Mapping[str, str]
    ) -> Answer:
        """Submit an attempt, or find it submitted; the id of its job, null where it will never start."""
        home = str(Path.home())
        place = _path(base)
        job_user.make_private(place.parent.parent)
        place.mkdir(parents=True, exist_ok=True)
        async with _locked(place):
            if (known := _read_job(place)) is not None:
                return {"job": known}, b""
            if (place / layout.RELEASED_FILE).exists() or (place / STOP_FILE).exists():
                _write(place / layout.JOB_FILE, layout.NEVER)
                return {"job": layout.NEVER}, b""
            if (place / layout.INTENT_FILE).exists():
                return {"job": await self._resolve(place, name)}, b""
            await asyncio.to_thread(install, _path(package))
            for file, text in files.items():
                expanded = text if base == str(place) else text.replace("~/", f"{home}/")
                write_whole(place / file, expanded, durable=True, mode=0o600)
            for secret, value in secrets.items():
                (place / SECRETS_FOLDER).mkdir(mode=0o700, exist_ok=True)
                write_whole(place / SECRETS_FOLDER / Path(secret).name, value, durable=False, mode=0o600)
            return {"job": await self._send(place, name)}, b""

    async def _send(self, place: Path, name: str) -> str:
        """Send the one sbatch of an attempt."""
        _write(place / layout.INTENT_FILE, str(time.time()))
        words = ("sbatch", "--parsable", str(place / layout.BATCH_SCRIPT))
        try:
            result = await self._slurm.run(*words)
            if result.code != 0:
                raise failure(words, result)
            job = parse.parse_submitted(result.out)
        except OutcomeUnknown:
            return await self._resolve(place, name)
        except ValueError:
            return await self._resolve(place, name)
        except TargetError:  # it was refused, or nothing was sent: a later request may try again
            (place / layout.INTENT_FILE).unlink(missing_ok=True)
            raise
        _write(place / layout.JOB_FILE, job)
        return job

    async def _resolve(self, place: Path, name: str) -> str:
        """Id of a job whose submission had no clear answer, by its name. Nothing is submitted here."""
        ids = await self._find(name)
        if ids:
            _write(place / layout.JOB_FILE, ids[0])
            return ids[0]
        age_s = time.time() - float(read_small(place / layout.INTENT_FILE) or 0)
        if age_s < _SETTLE_S:
            raise Unreachable(f"slurm: sbatch gave no clear answer; looking for a job named {name}")
        raise TargetError(
            f"slurm: sbatch gave no clear answer {age_s:.0f} s ago and no job is named {name}; it was not started"
        )

    async def _find(self, name: str) -> list[str]:
        """Ids of this user's jobs of this name, in the queue or in accounting."""
        jobs = await self._list(f"--name={name}", f"--user={os.geteuid()}")
        if not jobs:
            try:
                jobs = await self._account(f"--name={name}", "--starttime=now-7days")
            except TargetError as error:
                if _NO_ACCOUNTING not in str(error):
                    raise  # it cannot be asked now, and may know the job
        return sorted({job.number for job in jobs if job.name == name}, key=int)

    async def listing(self, wanted: Sequence[str]) -> Answer:
        """Every job of this user in the queue; jobs of `wanted` that have left it, from accounting: two calls.

        One that accounting does not show as over is asked for by its id, before it counts as gone.
        """
        jobs, note = await self._queue(), ""
        listed = {job.number for job in jobs}
        if missing := [number for number in wanted if number not in listed and number.isdecimal()]:
            accounted: list[SlurmJob] = []
            try:
                accounted = await self._account(f"--jobs={','.join(missing)}")
            except Unreachable as error:
                note = str(error)
            except TargetError:
                pass  # there is no accounting: the exit records have to do
            live = {job.number for job in accounted if not translate(job.state).state.over}
            over = {job.number for job in accounted} - live
            jobs += [job for job in accounted if job.number in over]
            for number in missing:
                if number not in over:
                    jobs += await self._find_queued(number)
        return {"jobs": [asdict(job) for job in jobs], "accounting": note}, b""

    async def _find_queued(self, number: str) -> list[SlurmJob]:
        """The job of this id in the queue; none where the controller says that there is no such job."""
        try:
            return await self._list(f"--jobs={number}")
        except TargetError as error:
            if "Invalid job id" in str(error):
                return []
            raise

    async def _queue(self) -> list[SlurmJob]:
        if await self._wants_json():
            text = await self._slurm.query("squeue", "--json", "--states=all", f"--user={os.geteuid()}")
            return await asyncio.to_thread(parse.parse_squeue_json, text)
        return await self._list(f"--user={os.geteuid()}")

    async def _list(self, *select: str) -> list[SlurmJob]:
        """Jobs in the queue, from text. The separator is new each time: no name of a job can hold it."""
        mark = _separator()
        words = ("squeue", "--noheader", "--array", "--states=all", *select)
        text = await self._slurm.query(*words, f"--format={parse.SQUEUE_FORMAT.replace(parse.SEPARATOR, mark)}")
        return await asyncio.to_thread(parse.parse_squeue, text, mark)

    async def _account(self, *select: str) -> list[SlurmJob]:
        if await self._wants_json():
            return await asyncio.to_thread(
                parse.parse_sacct_json, await self._slurm.query("sacct", "--json", "--allocations", *select)
            )
        mark = _separator()
        words = ("sacct", "--noheader", "--parsable2", f"--delimiter={mark}", "--allocations")
        text = await self._slurm.query(*words, f"--format={parse.SACCT_FIELDS}", *select)
        return await asyncio.to_thread(parse.parse_sacct, text, mark)

    async def _wants_json(self) -> bool:
        if self._output == "auto":
            key = self._slurm.folder or ""
            if key not in _VERSIONS:  # a login node makes a new one for each request
                _VERSIONS[key] = parse.parse_version(await self._slurm.query("sinfo", "--version"))
            self._output = "json" if _VERSIONS[key] >= _JSON_SINCE else "text"
        return self._output == "json"

    async def facts(self, base: str, nodes: int, tasks: Sequence[int] | None = None, end: bool = False) -> Answer:
        """What the attempt's folders show: job id and requests; with `end` exit records and the last log lines."""
        return await asyncio.to_thread(_facts, _path(base), nodes, tasks, end=end), b""

    async def read(self, *, base: str, task: int | None, node: int, stream: str, offset: int, limit: int) -> Answer:
        """Bytes of a stream of one node; none where Slurm has restarted it meanwhile, and the next read goes on."""
        place = _path(base)
        folder = _current(place, task, node)
        handle = {"attempt": "", "folder": str(folder)}
        data = await self._host.read(handle, stream, offset=offset, limit=min(limit, frames.MAX_BODY_BYTES))
        if _current(place, task, node) != folder:
            return {}, b""
        return {}, data

    async def list_files(self, base: str, task: int | None, node: int) -> Answer:
        handle = {"attempt": "", "folder": str(_current(_path(base), task, node))}
        files = await self._host.list_files(handle)
        return {"files": [[file.name, file.size_bytes, file.fault] for file in files]}, b""

    async def cancel(self, base: str, nodes: int, tasks: Sequence[int] | None, job: str | None, reason: str) -> Answer:
        """Request save and stop. A job that still waits is taken out of the queue."""
        place = _path(base)
        job_user.make_private(place.parent.parent)
        place.mkdir(parents=True, exist_ok=True)
        if not (place / STOP_FILE).exists():  # the first reason counts
            _write(place / STOP_FILE, reason + "\n")
        for task, node in _units(nodes, tasks):
            folder = _current(place, task, node)
            if folder.is_dir() and not (folder / STOP_FILE).exists() and not (folder / EXIT_FILE).exists():
                shutil.copyfile(place / STOP_FILE, folder / STOP_FILE)
        job = job or _read_job(place)
        if job is not None and job != layout.NEVER:
            await self._slurm.run("scancel", "--quiet", "--state=PENDING", job)
        return {}, b""

    async def release(self, base: str, name: str, job: str | None) -> Answer:
        """End the job by force; returns when Slurm runs nothing of it, and nothing of it can start any more."""
        place = _path(base)
        if not place.exists():
            return {}, b""
        async with _locked(place):
            _write(place / layout.RELEASED_FILE, "")
            known = job or _read_job(place)
            ids = [known] if known not in (None, layout.NEVER) else []
            if not ids and (place / layout.INTENT_FILE).exists() and known is None:
                ids = await self._find(name)
        for job_id in ids:
            await self._end(str(job_id), name)
        await asyncio.to_thread(shutil.rmtree, place / SECRETS_FOLDER, ignore_errors=True)
        return {}, b""

    async def _end(self, job: str, name: str) -> None:
        """End a job. One of this id that is not ours, because Slurm uses ids again, is left alone."""
        until, sent = time.monotonic() + _GONE_S, False
        while True:
            ours = [row for row in await self._queue() if row.number == job and row.belongs(name)]
            live = [row for row in ours if not translate(row.state).state.over]
            if not live:
                return
            if any(translate(row.state).state is TargetState.RUNNING for row in live):
                await self._slurm.run("scancel", "--quiet", "--signal=KILL", "--full", job)
            if not sent or time.monotonic() > until - _GONE_S / 2:
                await self._slurm.run("scancel", "--quiet", job)
                sent = True
            if time.monotonic() > until:
                raise Unreachable(
                    f"slurm: job {job} is still {live[0].state} on {live[0].nodes or 'no node'} after scancel"
                )
            await asyncio.sleep(0.3)

    async def prepare(self, package: str) -> Answer:
        """Copy the node half to where the compute nodes find it; its folder."""
        place = _path(package)
        await asyncio.to_thread(install, place)
        return {"package": str(place)}, b""

    async def run(self, words: Sequence[str], timeout_s: float, slurm: bool = True) -> Answer:
        """Run one of Slurm's commands, or of the system's; its exit code and output."""
        commands = self._slurm if slurm else Commands(env=self._slurm.env)
        result = await commands.run(*words, timeout_s=timeout_s)
        return {"code": result.code, "error": result.err[-_RECORD_BYTES:]}, result.out.encode()[: frames.MAX_BODY_BYTES]


def _separator() -> str:
    return f"{parse.SEPARATOR}{secrets_module.token_hex(4)}{parse.SEPARATOR}"


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _current(base: Path, task: int | None, node: int) -> Path:
    return layout.node_folder(base, task, node, layout.read_restart(base, task))


def _units(nodes: int, tasks: Sequence[int] | None) -> Iterable[tuple[int | None, int]]:
    """Task and node of each node folder, in the order of their numbers."""
    return ((task, node) for task in (tasks if tasks is not None else [None]) for node in range(nodes))


def _facts(place: Path, nodes: int, tasks: Sequence[int] | None, *, end: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "job": _read_job(place),
        "intent": (place / layout.INTENT_FILE).exists(),
        "released": (place / layout.RELEASED_FILE).exists(),
        "stop": _text(place / STOP_FILE, 2000),
        "failed": _text(layout.failed_file(place, layout.read_restart(place, None)), 40),
        "first_over": _text(_current(place, None, 0) / EXIT_FILE, 1) is not None,
        "preempted": (_text(place / layout.PREEMPTED_FILE, 40) or "").strip(),
    }
    if facts["stop"] is not None:
        facts["stop_at"] = (place / STOP_FILE).stat().st_mtime
    if end:
        facts["records"] = [
            _text(_current(place, task, node) / EXIT_FILE, _RECORD_BYTES) for task, node in _units(nodes, tasks)
        ]
        facts["members"] = parse_members(_text(_current(place, None, 0) / MEMBERS_FILE, _RECORD_BYTES))
        logs = sorted(place.glob("slurm-*.log"), key=lambda path: path.lstat().st_mtime)
        facts["log"] = (_text(logs[-1], _LOG_BYTES, end=True) or "") if logs else ""
    return facts


def _read_job(base: Path) -> str | None:
    text = _text(base / layout.JOB_FILE, 100)
    return text.strip() or None if text is not None else None


def _text(path: Path, limit: int, *, end: bool = False) -> str | None:
    """The first bytes of a plain file, or its last. The workload owns the folder: links and pipes are not followed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            return ""  # something stands there that is no record
        raise
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            return ""
        return os.pread(fd, limit, max(0, facts.st_size - limit) if end else 0).decode(errors="replace")
    finally:
        os.close(fd)


def _write(path: Path, text: str) -> None:
    write_whole(path, text, durable=True, mode=0o600)


@contextlib.asynccontextmanager
async def _locked(base: Path) -> AsyncIterator[None]:
    """One request at a time changes an attempt, whatever process it comes from."""
    fd = os.open(base / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await asyncio.to_thread(fcntl.flock, fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
