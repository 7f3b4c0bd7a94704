"""Attempts on the machine of this process: each has an agent, which outlives its submitter.

The target `local` is this and a plan; on a node it is what the requests of the control half reach (node_server.py).

All state is in the attempt's folder: the plan (submitted), the lock file's text (an agent has begun), the lock (it is
alive), the exit record (it has ended). This module keeps no state of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import pwd
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainmaster.core.attempt import FileSize, Handle, Owned, Poll, Submission
from trainmaster.core.errors import SpecError, TargetError, Unreachable
from trainmaster.core.files import is_hole, list_tree, open_whole, read_small, write_whole
from trainmaster.core.plan import (
    AGENT_BEGUN,
    AGENT_LOG,
    ATTEMPT_VARIABLE,
    EVENTS_FILE,
    EXIT_FILE,
    LOCK_FILE,
    OUTPUTS_FOLDER,
    OWNER_VARIABLE,
    PLAN_FILE,
    ROOM_VARIABLE,
    STOP_FILE,
    ExitRecord,
    Plan,
)
from trainmaster.core.spec import JobSpec
from trainmaster.core.states import TargetState
from trainmaster.remote import job_user, owned
from trainmaster.remote.confine import confine, find_fault

_STREAMS = frozenset({PLAN_FILE, EVENTS_FILE, AGENT_LOG, EXIT_FILE})
_RANK_LOG = re.compile(r"rank-[0-9]{1,6}\.log")
_RECORD_BYTES = 1 << 20  # the agent reserves 192 KiB for its record
_PLAN_BYTES = 16 << 20
_AGENT = (sys.executable, "-m", "trainmaster.agent")
# Shortages that may pass; every other error is permanent.
_SHORT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO})
logger = logging.getLogger(__name__)


def submission(plan: Plan) -> Submission:
    """Submission of a plan on the machine of this process."""
    path = Path(plan.folder) / PLAN_FILE
    return Submission(
        handle={"attempt": plan.attempt, "folder": plan.folder},
        files={str(path): plan.to_json() + "\n"},
        commands=((*_AGENT, "--detach", str(path)),),
    )


def check_range(stream: str, offset: int, limit: int) -> None:
    """TargetError where this is no stream of an attempt, or no range of one."""
    if stream not in _STREAMS and not _RANK_LOG.fullmatch(stream) and not _is_output(tuple(stream.split("/"))):
        raise TargetError(f"{stream!r:.200} is not a stream of an attempt")
    if offset < 0 or limit < 0:
        raise TargetError(f"offset {offset} and limit {limit} may not be negative")


class AttemptHost:
    """Runs attempts on this machine, as this Unix user; not stated: that of `--job-user`, else our own."""

    def __init__(self, user: str | None = None) -> None:
        self._user = user

    async def submit(self, submission: Submission) -> Handle:
        folder = _folder(submission.handle)
        try:
            if _begun(folder):
                return _submitted(submission.handle)
            user = job_user.find_user(self._user)
            job_user.claim(folder, user)
            with _submitting(folder) as fd:
                for path, text in submission.files.items():
                    await asyncio.to_thread(_write, Path(path), text)
                job_user.give(folder, user)
                for command in submission.commands:
                    fault = await (_launch(command, submission, fd) if user is None else _start_as(command, fd, user))
                    # A refusal is fine if another submit's agent has begun: one agent runs, as requested.
                    if fault is not None and not _begun(folder):
                        raise TargetError(f"local: the agent did not start: {fault}")
        except OSError as error:
            raise (Unreachable if error.errno in _SHORT else TargetError)(f"local: {error}") from error
        return _submitted(submission.handle)

    async def poll(self, handle: Handle) -> Poll:
        try:
            poll = await asyncio.to_thread(_read_state, _folder(handle))
        except (OSError, ValueError, SpecError) as error:
            return Poll(state=TargetState.UNKNOWN, note=f"the attempt's folder cannot be read: {error}")
        if poll.state is TargetState.WAITING and handle.get("submitted") and not (_folder(handle) / PLAN_FILE).exists():
            return Poll(state=TargetState.LOST, note=f"its folder {handle['folder']} was removed")
        return poll

    async def read(self, handle: Handle, stream: str, *, offset: int, limit: int) -> bytes:
        check_range(stream, offset, limit)
        return await asyncio.to_thread(_read, _folder(handle), tuple(stream.split("/")), offset, limit)

    async def list_files(self, handle: Handle) -> list[FileSize]:
        try:
            return await asyncio.to_thread(_list, _folder(handle))
        except OSError as error:
            raise Unreachable(f"local: {error}") from error

    async def cancel(self, handle: Handle, *, reason: str) -> None:
        folder = _folder(handle)
        try:
            if not (folder / EXIT_FILE).exists() and not (folder / STOP_FILE).exists():  # the first reason counts
                folder.mkdir(parents=True, exist_ok=True)  # an attempt that begins later finds it and stops at once
                await asyncio.to_thread(_write_stop, folder / STOP_FILE, reason + "\n")
        except OSError as error:
            raise TargetError(f"local: {error}") from error

    async def release(self, handle: Handle) -> None:
        folder = _folder(handle)
        try:
            over = (folder / EXIT_FILE).is_file() or not (folder / PLAN_FILE).exists()
            if over and await self._is_gone(str(handle["attempt"])):
                return  # it ended by itself and can never begin again, or was never submitted
            plan = await asyncio.to_thread(_plan_to_kill, handle)
            code, stderr = await _call(*_AGENT, "--kill", "/dev/stdin", text=plan.to_json())
        except OSError as error:
            raise TargetError(f"local: {error}") from error
        if code != 0:
            raise TargetError(f"local: the attempt could not be ended: {stderr}")

    async def _is_gone(self, attempt: str) -> bool:
        return attempt not in await asyncio.to_thread(owned.find)

    async def list_owned(self, *, partial: bool = False) -> list[Owned]:  # noqa: ARG002 (one machine: all or nothing)
        attempts = await asyncio.to_thread(owned.find)
        return [
            Owned(
                attempt=attempt,
                handle={"attempt": attempt, "folder": folder, "submitted": True},
                what=f"{len(pids)} {'process' if len(pids) == 1 else 'processes'}: {', '.join(map(str, pids[:8]))}",
            )
            for attempt, (folder, pids) in attempts.items()
            if folder is not None
        ]


def _plan_to_kill(handle: Handle) -> Plan:
    """The plan of an attempt; made from the handle where its file is gone or another one.

    The workload owns the folder, and what it wrote there must not name other attempts or other folders.
    """
    attempt, folder = str(handle["attempt"]), _folder(handle)
    with contextlib.suppress(TargetError, SpecError, ValueError, RecursionError):
        plan = Plan.from_json(_read(folder, (PLAN_FILE,), 0, _PLAN_BYTES).decode())
        if (plan.attempt, plan.folder) == (attempt, str(folder)):
            return plan
    spec = JobSpec(name="killed", command=("true",))
    return Plan(attempt=attempt, spec=spec, folder=str(folder), checkpoints=str(folder))


def _submitted(handle: Handle) -> Handle:
    """Handle of a started attempt: from now on an empty folder means lost, not waiting."""
    return {**handle, "submitted": True}


def _folder(handle: Handle) -> Path:
    return Path(str(handle["folder"]))


def _read_state(folder: Path) -> Poll:
    """State of an attempt, from its folder. After a found end the exit record is read again."""
    if (over := _read_exit(folder)) is not None:
        return over
    if not _begun(folder):
        if not (folder / PLAN_FILE).exists():
            return Poll(state=TargetState.WAITING, note="not submitted yet")
        if _locked(folder, fcntl.LOCK_EX):
            return Poll(state=TargetState.WAITING, note="being submitted")
        if not _begun(folder):
            return Poll(state=TargetState.LOST, note="it was submitted, and no agent has begun it")
    if _locked(folder / LOCK_FILE, fcntl.LOCK_SH):
        return Poll(state=TargetState.RUNNING, note=_find_stopped(folder / LOCK_FILE))
    # It may have ended between the two reads; the agent writes the record before it releases the lock.
    return _read_exit(folder) or Poll(state=TargetState.LOST, note="the agent is gone and left no exit record")


def _find_stopped(lock: Path) -> str:
    """A note where the agent or a rank was stopped (SIGSTOP).

    Without its agent a job hears no request and keeps no limit; without a rank it does nothing. The number of an agent
    in a PID namespace is that of another process here, or of none: nothing is said then.
    """
    with contextlib.suppress(OSError, ValueError):
        agent = int(read_small(lock).decode().removeprefix("pid "))
        if b"trainmaster.agent" not in Path(f"/proc/{agent}/cmdline").read_bytes():
            return ""
        if _is_stopped(agent):
            return f"its agent (process {agent}) is stopped; `kill -CONT {agent}` lets it go on"
        for pid in map(int, Path(f"/proc/{agent}/task/{agent}/children").read_text().split()):
            if _is_stopped(pid):
                name = "its fork server" if _is_fork_server(pid) else "a rank"
                return f"{name} (process {pid}) is stopped; `kill -CONT {pid}` lets it go on"
    return ""


def _is_fork_server(pid: int) -> bool:
    """Its ranks have the same command line; they write over the room that it was started with."""
    try:
        return f"{ROOM_VARIABLE}=-".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # of another account, or it has just ended
        return False


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:  # it has just ended
        return False


def _read_exit(folder: Path) -> Poll | None:
    if not os.path.lexists(folder / EXIT_FILE):
        return None
    try:
        raw = _read(folder, (EXIT_FILE,), 0, _RECORD_BYTES)
    except TargetError:  # a workload owns the folder and may put anything there: a folder, a link, a pipe
        raw = b""
    record = ExitRecord.read(raw, attempt=folder.name)
    return Poll(state=TargetState.SUCCEEDED if record.ok else TargetState.FAILED, exit=record, note=record.message)


def _begun(folder: Path) -> bool:
    """Whether an agent ever took the attempt: it writes into the lock file, under the lock."""
    try:
        return (folder / LOCK_FILE).stat().st_size > 0
    except FileNotFoundError:
        return (folder / EXIT_FILE).exists()


def _locked(path: Path, mode: int) -> bool:
    """Somebody holds a lock on it that goes against `mode`. Asking takes it for a moment, so it is asked only where
    no agent is about to begin."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def _submitting(folder: Path) -> Iterator[int]:
    """Hold the folder itself, so that a poll meanwhile says `waiting` and not `lost`.

    The starting command inherits it: if we are killed, it holds the folder until its agent has begun.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)  # several may submit; only one agent will begin
        yield fd
    finally:
        os.close(fd)


def _write(path: Path, text: str) -> None:
    write_whole(path, text, durable=True, mode=0o600)


def _write_stop(path: Path, text: str) -> None:
    with open_whole(path, durable=True, mode=0o600) as file:
        os.fchmod(file.fileno(), 0o644)  # for an agent of another user; its folder is closed to everybody else
        file.write(text.encode())


def _is_output(parts: tuple[str, ...]) -> bool:
    return len(parts) > 1 and parts[0] == OUTPUTS_FOLDER and all(_is_name(part) for part in parts[1:])


def _is_name(part: str) -> bool:
    return part not in ("", ".", "..") and "\x00" not in part


def _list(folder: Path) -> list[FileSize]:
    """Records and outputs. The workload owns the folder: no link is followed, and an output that is one has a fault."""
    if not folder.exists():
        return []  # cancelled before anything was submitted, or removed by the workload
    files = [
        FileSize(name=entry.name, size_bytes=entry.stat(follow_symlinks=False).st_size)
        for entry in os.scandir(folder)
        if (entry.name in _STREAMS - {PLAN_FILE} or _RANK_LOG.fullmatch(entry.name))
        and entry.is_file(follow_symlinks=False)
    ]
    files += [
        FileSize(name=file.name, size_bytes=file.size_bytes, fault=file.fault)
        for file in list_tree(folder, OUTPUTS_FOLDER)
    ]
    return sorted(files, key=lambda file: file.name)


def _read(folder: Path, parts: tuple[str, ...], offset: int, limit: int) -> bytes:
    """Bytes of a plain file. The workload owns the folder: links and pipes are not followed."""
    no_link = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with contextlib.ExitStack() as opened:
            place = None
            for part in (str(folder), *parts[:-1]):
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | (0 if place is None else os.O_NOFOLLOW)
                place = os.open(part, flags, dir_fd=place)
                opened.callback(os.close, place)
            fd = os.open(parts[-1], no_link, dir_fd=place)
            opened.callback(os.close, fd)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise TargetError(f"local: {'/'.join(parts)} is not a plain file")
            if parts[0] == OUTPUTS_FOLDER and is_hole(fd, offset, limit):
                return bytes(limit)
            return os.pread(fd, limit, offset)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise TargetError(f"local: {error}") from error


# Starts the agent in the background of a shell that ends at once: an interpreter only to start another takes longer.
_BACKGROUND = 'log=$1; shift; "$@" </dev/null >>"$log" 2>&1 &'


async def _launch(command: Sequence[str], submission: Submission, keep_fd: int) -> str | None:
    """Start the agent in a session of its own; None once it has begun, else why it has not."""
    plan = Path(command[-1])
    mark = Plan.from_json(submission.files[command[-1]]).mark
    ours, theirs = os.pipe()
    try:
        agent = [*_AGENT, "--ready-fd", str(theirs), str(plan)]
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", _BACKGROUND, "sh", str(plan.with_name(AGENT_LOG)), *agent,
            env={**_environment(), ATTEMPT_VARIABLE: mark},
            pass_fds=(theirs, keep_fd),
            start_new_session=True,
        )  # fmt: skip
        await process.wait()
    finally:
        os.close(theirs)
    with open(ours, "rb") as answers:  # noqa: ASYNC230, PTH123 (a pipe has no path; it is read in a thread)
        answer = await asyncio.to_thread(answers.read)
    if answer == AGENT_BEGUN:
        return None
    return answer.decode(errors="replace") or f"it ended before it began; see {AGENT_LOG} in {plan.parent}"


async def _start_as(command: Sequence[str], keep_fd: int, user: pwd.struct_passwd) -> str | None:
    """Start the agent as another user, confined; None once it has begun, else why it has not."""
    plan = Path(command[-1])
    ours, theirs = os.pipe()
    with open(ours, "rb", buffering=0) as answers:  # noqa: ASYNC230, PTH123 (a pipe has no path; read in a thread)
        try:
            words = [*_AGENT, "--ready-fd", str(theirs), str(plan)]
            confined = await asyncio.to_thread(confine, words, user, tmp=plan.with_name(job_user.TMP_FOLDER))
            if confined is None:
                logger.warning("%s runs as %s without a namespace: %s", plan.parent, user.pw_name, find_fault())
                code, stderr = await _call(*command, keep_fd=keep_fd, user=user)
                return stderr if code != 0 else None
            with _open_log(plan.with_name(AGENT_LOG), user) as log:
                process = await asyncio.create_subprocess_exec(
                    "sh", "-c", '"$@" &', "sh", *confined, env=_environment_of(user), stdin=asyncio.subprocess.DEVNULL,
                    stdout=log, stderr=log, pass_fds=(theirs, keep_fd), start_new_session=True,
                )  # fmt: skip
            await process.wait()
        finally:
            os.close(theirs)
        # One read, not to the end: the agent writes once, and what wraps it keeps the pipe open.
        answer = await asyncio.to_thread(answers.read, 1 << 16) or b""
    if answer == AGENT_BEGUN:
        return None
    return answer.decode(errors="replace") or f"it ended before it began; see {AGENT_LOG} in {plan.parent}"


@contextlib.contextmanager
def _open_log(path: Path, user: pwd.struct_passwd) -> Iterator[int]:
    """The log of an agent of another user: its own file, opened through no link, since it owns the folder."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchown(fd, user.pw_uid, user.pw_gid)
        yield fd
    finally:
        os.close(fd)


def _environment_of(user: pwd.struct_passwd) -> dict[str, str]:
    own = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
    return {**job_user.job_environment(os.environ), **own}


def _environment() -> dict[str, str]:
    """Environment of an agent. One that a command in the foreground had started ends with that command."""
    owner = {name: os.environ[name] for name in (OWNER_VARIABLE,) if name in os.environ}
    return job_user.job_environment(os.environ) | owner


async def _call(
    *command: str, keep_fd: int | None = None, user: pwd.struct_passwd | None = None, text: str | None = None
) -> tuple[int, str]:
    """Run an agent command to its end, with `text` as its input; its exit code and output."""
    environment = _environment() if user is None else _environment_of(user)
    other: dict[str, Any] = {}
    if user is not None:
        other = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    process = await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL if text is None else asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=() if keep_fd is None else (keep_fd,),
        **other,
    )
    _, stderr = await process.communicate(None if text is None else text.encode())
    assert process.returncode is not None
    return process.returncode, stderr.decode(errors="replace").strip()
