"""Diagnosis of a failed rank, from its exit code and its last lines."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainmaster.core.errors import HostError
from trainmaster.core.failures import SIGNALS, find_failure, signal_of
from trainmaster.core.files import open_plain
from trainmaster.core.plan import EXIT_REASONS, WORK_FOLDER, rank_log
from trainmaster.core.states import Reason
from trainmaster.node.host import Host

EVIDENCE_LINES = 40
_SEARCHED_BYTES = 64 * 1024  # an NCCL abort prints its reason above a hundred lines of stack
_LINE_CHARACTERS = 500
# Time, level and rank of a line of our own trainer (train/run_log.py): the reason has them already.
_LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z [A-Z]+ \[rank \d+ node \d+\] ")
_ROOM_BYTES = 64 * 1024  # less is a full disk: file systems keep a few blocks they cannot hand out


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of an attempt: the exit record without its date."""

    reason: Reason | None  # None when it did what it was asked
    message: str = ""
    exit_codes: Mapping[str, int] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    resumable: bool = False


# Words of CPython, and of sh, bash and dash, about what is not there.
_NO_SCRIPT = re.compile(r"^\S*: can't open file '(.+)': \[Errno 2\]")
_NO_PROGRAM = re.compile(r"^\S*sh: (?:.*: )?(\S+): (?:command )?not found$")
# A file of the working folder that was sent, in the folder of its job.
_SENT = re.compile(rf"/jobs/[^/]+/{WORK_FOLDER}/")
_ROLLED_BACK = "the run has been rolled back"  # in the last words of our trainer (train/loop.py)
_OF_STORAGE = (Reason.FILE_SYSTEM_ERROR, Reason.STORAGE_ERROR, Reason.DISK_FULL)


def judge(*, rank: int, ranks: int, code: int, lines: list[str], oom_kills: int, full: str | None = None) -> Outcome:
    """Outcome of a failed rank.

    `lines` end its log, masked; `oom_kills` counts those in our control group since the start; `full` is a folder of
    the attempt whose disk is full, which a rank cannot say itself when its log lies on that disk too.
    """
    shown = [line[:_LINE_CHARACTERS] for line in lines[-EVIDENCE_LINES:]]
    evidence: dict[str, Any] = {"rank": rank, "exit_code": code, "log": rank_log(rank), "last_lines": shown}
    ended, number = f"exited with {code}", signal_of(code)
    if number is not None:
        evidence["signal"] = _signal_name(number)
        ended = f"was killed by {evidence['signal']}" if code < 0 else f"{ended} ({evidence['signal']})"
    reason, cause = Reason.SCRIPT_FAILED, ""
    match = find_failure(lines)
    if number == signal.SIGKILL and (match is None or match[0].reason is Reason.DISK_FULL):
        # It came from outside. A save that failed before was told as a warning, and training went on.
        match, full = None, None
    told = EXIT_REASONS.get(code)
    if told is Reason.DIVERGED and not any(_ROLLED_BACK in line for line in lines):
        told = None  # a program that is not ours
    if told is not None:
        reason = told
        # Our trainer says what it could not read; whether a mount or a store failed stands in its words.
        if match and reason in (Reason.BAD_DATA, Reason.BAD_CHECKPOINT) and match[0].reason in _OF_STORAGE:
            reason, cause = match[0].reason, match[1]
    elif number == signal.SIGKILL and oom_kills:
        reason, cause = Reason.OUT_OF_MEMORY, "the kernel's out-of-memory killer acted in this control group"
        evidence["oom_kills"] = oom_kills
    elif match:
        reason, cause = match[0].reason, match[1]
    elif full is not None:
        reason, cause = Reason.DISK_FULL, f"no space is left where {full} is"
    elif number is not None:
        reason = SIGNALS.get(number, Reason.SCRIPT_FAILED)
    if cause:
        evidence["cause"] = cause[:_LINE_CHARACTERS]
    explained = _explain(cause, shown, killed=code < 0)
    if reason is Reason.SCRIPT_FAILED and match is None:
        explained += _what_is_missing(shown)
    return Outcome(reason=reason, message=f"rank {rank} of {ranks} {ended}{explained}", evidence=evidence)


def _explain(cause: str, shown: list[str], *, killed: bool) -> str:
    """The cause, else the last line of the log. A program that exits prints its error last; a killed one does not."""
    last = next((line for line in reversed(shown) if line.strip()), "")
    text = _LOG_PREFIX.sub("", cause or last).strip()[:_LINE_CHARACTERS]
    if not text:
        return "; it printed nothing"
    return f'; its last line: "{text}"' if killed and not cause else f": {text}"


def _what_is_missing(shown: list[str]) -> str:
    """What to do where the last lines say that the script, or a program of a shell, is not there."""
    for line in reversed(shown):
        if (found := _NO_SCRIPT.search(line)) is not None:
            name, sent = Path(found[1]).name, _SENT.search(found[1])
            where = "in the working folder that was sent: check the name, and .trainmasterignore" if sent else ""
            return f"; {name} is not {where or 'on that machine: check its path'}"
        if (found := _NO_PROGRAM.search(line)) is not None:
            return f"; {advise_on_start(FileNotFoundError(2, '', found[1]))}"
    return ""


def advise_on_start(cause: OSError) -> str:
    """What to do about a program that could not be started."""
    name = str(cause.filename or "it")
    if isinstance(cause, PermissionError):
        return f"{name} may not be executed there: chmod +x it, or name its interpreter before it, as python3 or bash"
    if not isinstance(cause, FileNotFoundError):
        return "check the command of the spec"
    if "/" in name:
        return f"{name} or the interpreter in its first line is not on that machine: check the path"
    meant = ", or use python3" if name.startswith("py") and name != "python3" else ""
    return f"{name} is not in PATH on that machine: name the whole path{meant}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def read_tail(path: Path, *, since: int = 0) -> list[str]:
    """The last lines of a log from the byte `since` on, however large it is; none where there is no log."""
    try:
        with os.fdopen(open_plain(path, os.O_RDONLY), "rb") as file:
            start = max(since, file.seek(0, os.SEEK_END) - _SEARCHED_BYTES)
            file.seek(start)
            text = file.read(_SEARCHED_BYTES)
            if start > since:  # half a line could hold half a secret, which no mask would know
                text = text.partition(b"\n")[2]
            return text.decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []


def find_full(folders: Iterable[str]) -> str | None:
    """The first of the folders whose disk has no room for another line."""
    for folder in folders:
        with contextlib.suppress(OSError):
            disk = os.statvfs(folder)
            if disk.f_bavail * disk.f_frsize < _ROOM_BYTES:
                return folder
    return None


def count_oom_kills(host: Host) -> int:
    """How often the kernel's out-of-memory killer acted in our control group; in the machine, where that is hidden."""
    for path in (*_memory_groups(host), "/proc/vmstat"):
        try:
            words = dict(line.split(maxsplit=1) for line in host.read(path).splitlines())
            return int(words["oom_kill"])
        except (HostError, ValueError, KeyError):
            continue
    return 0


def _memory_groups(host: Host) -> Iterable[str]:
    try:
        groups = host.read("/proc/self/cgroup").splitlines()
    except HostError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            yield f"/sys/fs/cgroup{path}/memory.events"
        elif "memory" in controllers.split(","):  # version 1
            yield f"/sys/fs/cgroup/memory{path}/memory.oom_control"


# A name whose word ends in one of these; TOKENIZERS_PARALLELISM does not.
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(_|\d|$)")


def mask(value: Any, environments: Iterable[Mapping[str, str]]) -> Any:
    """The same data without the values of environment variables whose names look secret."""
    secrets = set()
    for environment in environments:
        for name, secret in environment.items():
            if _SECRET_NAME.search(name.upper()):
                # A key of several lines reaches a log line by line. Three characters hide nothing and spoil every line.
                secrets |= {part.strip() for part in (secret, *secret.splitlines()) if len(part.strip()) > 3}
    ordered = sorted(secrets, key=len, reverse=True)  # a secret inside a longer one must not leave its rest behind
    return _masked(value, ordered) if ordered else value


def _masked(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, "***")
        return value
    if isinstance(value, Mapping):
        return {key: _masked(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(item, secrets) for item in value]
    return value
