"""Parsers of squeue, sacct and scontrol: text with our own separator, and the JSON of Slurm 20.11 and newer.

Pure. JSON changed its shape over the versions: a number may be {"set": true, "number": 3}, a state may be a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainmaster.core.compat import UTC, parse_iso_time
from trainmaster.core.errors import TargetError
from trainmaster.remote.slurm.layout import COMMENT
from trainmaster.remote.slurm.states import choose, normalize

SEPARATOR = "\x1f"
# In the order of `SlurmJob`; the two formats that may hold any text come last.
SQUEUE_FORMAT = SEPARATOR.join(["%i", "%T", "%N", "%Z", "%r", "%j", "%k"])
_SQUEUE_CELLS, _SACCT_CELLS = 7, 9
SACCT_FIELDS = "JobID,State,NodeList,WorkDir,Reason,JobName,Comment,ExitCode,End"
# `17`, `17_3` and `17_[0-3]` of an array, `17+1` of a heterogeneous job.
_ID = re.compile(r"([0-9]{1,20})(?:\+[0-9]{1,9}|_([0-9]{1,9}|\[[^\]]*\]))?")
_MAX_TASKS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """One job, or one task of an array, as Slurm lists it."""

    id: str  # "17", or "17_3" for a task of an array
    state: str  # Slurm's own word
    nodes: str = ""
    folder: str = ""
    reason: str = ""
    name: str = ""
    comment: str = ""
    exit_code: int | None = None
    signal: int | None = None
    ended_at: str | None = None  # ISO, where accounting has it

    @property
    def number(self) -> str:
        """Id of the job that `scancel` takes: of an array, that of all its tasks."""
        return self.id.partition("_")[0]

    def belongs(self, name: str) -> bool:
        """Whether it is the job of this name: an id may be that of another job since."""
        attempt = self.comment.removeprefix(COMMENT)
        return self.name == name or (attempt != self.comment and name.endswith(f".{attempt}"))

    @property
    def task(self) -> int | None:
        word = self.id.partition("_")[2]
        return int(word) if word else None


def parse_squeue(text: str, separator: str = SEPARATOR) -> list[SlurmJob]:
    """Jobs of `squeue --noheader --array --format=SQUEUE_FORMAT`, with another separator where one is given."""
    jobs: list[SlurmJob] = []
    for cells in _split(text, separator, _SQUEUE_CELLS, "squeue"):
        jobs += _expand(cells)
    return jobs


def parse_sacct(text: str, separator: str = SEPARATOR) -> list[SlurmJob]:
    """Jobs of `sacct --noheader --parsable2 --delimiter=SEPARATOR --allocations --format=SACCT_FIELDS`."""
    jobs: list[SlurmJob] = []
    for *cells, code, end in _split(text, separator, _SACCT_CELLS, "sacct"):
        if _ID.fullmatch(cells[0]) is None:  # accounting is asked for jobs of ours alone
            raise TargetError(f"{cells[0][:80]!r} is no job id of Slurm")
        status, signal = _exit(code)
        jobs += _expand(cells, exit_code=status, signal=signal, ended_at=_local_time(end))
    return jobs


def parse_squeue_json(text: str) -> list[SlurmJob]:
    """Jobs of `squeue --json`."""
    jobs = []
    for row in _list(text, "squeue"):
        status, signal = _exit_of(row.get("exit_code"))
        for identity in _ids(row.get("job_id"), row.get("array_job_id"), row):
            jobs.append(
                SlurmJob(
                    id=identity,
                    state=_state(row.get("job_state")),
                    nodes=str(row.get("nodes") or ""),
                    folder=str(row.get("current_working_directory") or ""),
                    reason=_known(str(row.get("state_reason") or "")),
                    name=str(row.get("name") or ""),
                    comment=str(row.get("comment") or ""),
                    exit_code=status,
                    signal=signal,
                )
            )
    return jobs


def parse_sacct_json(text: str) -> list[SlurmJob]:
    """Jobs of `sacct --json`."""
    jobs = []
    for row in _list(text, "sacct"):
        status, signal = _exit_of(row.get("exit_code"))
        state, array, times = (_mapping(row.get(name)) for name in ("state", "array", "time"))
        end = _number(times.get("end"))
        for identity in _ids(row.get("job_id"), array.get("job_id"), {"array_task_id": array.get("task_id")}):
            jobs.append(
                SlurmJob(
                    id=identity,
                    state=_state(state.get("current")),
                    nodes=_known(str(row.get("nodes") or "")),
                    folder=str(row.get("working_directory") or ""),
                    reason=_known(str(state.get("reason") or "")),
                    name=str(row.get("name") or ""),
                    comment=str(_mapping(row.get("comment")).get("job") or ""),
                    exit_code=status,
                    signal=signal,
                    ended_at=_moment(end),
                )
            )
    return jobs


def parse_version(text: str) -> tuple[int, int]:
    """Major and minor of `slurm-wlm 22.05.8`; (0, 0) where it cannot be read."""
    match = re.search(r"\b([0-9]{2})\.([0-9]{2})", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def parse_submitted(text: str) -> str:
    """Job id of `sbatch --parsable`: `17`, or `17;cluster`. The last line: plugins may print before it."""
    last = text.strip().rpartition("\n")[2].partition(";")[0]
    if not re.fullmatch(r"[0-9]{1,20}", last):
        raise ValueError(f"sbatch printed no job id: {text.strip()[:200]!r}")
    return last


def expand_tasks(text: str) -> list[int]:
    """Task ids of an array expression: `0-3,7`, `0-15:4`, with or without `%2`, as far as they are listed."""
    tasks: list[int] = []
    for part in filter(None, text.strip("[]").partition("%")[0].split(",")):
        match = re.fullmatch(r"([0-9]+)(?:-([0-9]+)(?::([0-9]+))?)?", part)
        if match is None:
            break  # squeue cuts long lists: `0-9,11-…`
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if step < 1 or (last - first) // step + len(tasks) >= _MAX_TASKS:
            raise TargetError(f"{part!r} lists more than {_MAX_TASKS:,} tasks")
        tasks += range(first, last + 1, step)
    return tasks


def _split(text: str, separator: str, cells: int, program: str) -> Iterator[list[str]]:
    """Cells of each record. Names and comments may hold line breaks, ids and separators of other answers may not."""
    if not text.strip():
        return
    pieces, per_row = text.split(separator), cells - 1
    if len(pieces) == 1 or (len(pieces) - 1) % per_row:
        raise TargetError(f"{program} printed text that is not whole or not in the requested format: {text[:200]!r}")
    identity = pieces[0].rpartition("\n")[2]  # a plugin may print before the first
    for first in range(1, len(pieces), per_row):
        *middle, last = pieces[first : first + per_row]
        if first + per_row < len(pieces):
            last, _, following = last.rpartition("\n")
        else:
            last, following = last.removesuffix("\n"), ""
        yield [identity, *middle, last]
        identity = following


def _expand(cells: Sequence[str], **more: Any) -> Iterator[SlurmJob]:
    """The job of the cells that both formats have, or each task of an array.

    A job whose id has another form is left out: it is not ours.
    """
    identity, state, *texts = cells
    named = dict(zip(("nodes", "folder", "reason", "name", "comment"), map(_known, texts), strict=True))
    facts = {"state": normalize(state), **named, **more}
    match = _ID.fullmatch(identity)
    if match is None:
        return
    if match[2] and match[2].startswith("["):
        try:
            tasks = expand_tasks(match[2])
        except TargetError:  # more than a job of ours may have
            tasks = []
        yield from (SlurmJob(id=f"{match[1]}_{task}", **facts) for task in tasks)
    else:
        yield SlurmJob(id=identity.partition("+")[0], **facts)


def _known(text: str) -> str:
    if text in ("(null)", "None assigned", "None", "N/A", "null"):
        return ""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _moment(seconds: int | None) -> str | None:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat() if seconds else None
    except (OverflowError, OSError, ValueError):
        return None


def _exit(text: str) -> tuple[int | None, int | None]:
    """`3:0` is exit code 3; `0:9` is signal 9."""
    code, _, signal = text.partition(":")
    return (int(code), int(signal)) if code.isdecimal() and signal.isdecimal() else (None, None)


def _local_time(text: str) -> str | None:
    try:
        return parse_iso_time(text).astimezone().isoformat()
    except ValueError:
        return None  # Unknown: it has not ended


def _list(text: str, program: str) -> list[Mapping[str, Any]]:
    try:
        rows = json.loads(text)["jobs"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise TargetError(f"{program} printed no JSON with jobs: {text.strip()[:200]!r}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise TargetError(f"{program} printed jobs that are no list of objects")
    return rows


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> int | None:
    """A number, or {"set": true, "number": 3}; None where it is not set."""
    if isinstance(value, dict):
        return _number(value.get("number")) if value.get("set", True) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _state(value: object) -> str:
    words = value if isinstance(value, list) else [value]
    return normalize(choose([str(word) for word in words if word]))


def _exit_of(value: object) -> tuple[int | None, int | None]:
    """Exit code and signal: a wait status in old versions, an object in newer ones."""
    if isinstance(value, dict):
        signal = _mapping(value.get("signal"))
        signal_number = _number(signal.get("id", signal.get("signal_id")))
        return _number(value.get("return_code")), signal_number
    status = _number(value)
    return (None, None) if status is None else (status >> 8, status & 0x7F)


def _ids(job: object, array: object, facts: Mapping[str, Any]) -> list[str]:
    number, whole = _number(job), _number(array)
    if number is None:
        raise TargetError("Slurm's JSON has a job without an id")
    if not whole:
        return [str(number)]
    task = _number(facts.get("array_task_id"))
    if task is not None:
        return [f"{whole}_{task}"]
    try:
        tasks = expand_tasks(str(facts.get("array_task_string") or ""))
    except TargetError:  # more than a job of ours may have
        return []
    return [f"{whole}_{task}" for task in tasks]
