"""`trainmaster logs`: the output of a rank or of the agent."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect
from trainmaster.cli._server import ServerOption
from trainmaster.core.errors import UsageError
from trainmaster.core.plan import AGENT_LOG, node_file, rank_log

if TYPE_CHECKING:
    from trainmaster.cli._jobs import Jobs

_EVERY_S = 1.0


def logs(
    job: Annotated[str, typer.Argument(help="Job id, its unique beginning, or a name.")],
    rank: Annotated[int, typer.Option(min=0, help="Which rank.")] = 0,
    agent: Annotated[bool, typer.Option("--agent", help="The agent's own log instead of a rank's.")] = False,
    node: Annotated[int, typer.Option(min=0, help="With --agent: which node of a job on several.")] = 0,
    attempt: Annotated[int | None, typer.Option(min=1, help="Which attempt; the last one if not stated.")] = None,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Only the last lines, this many.")] = None,
    grep: Annotated[str | None, typer.Option("--grep", help="Only lines that contain this text.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Print a log, byte for byte; on a terminal without control characters. --follow waits for a job in the queue.

    [bold]Examples[/]

      trainmaster logs 3f2a -f

      trainmaster logs 3f2a --rank 1 --attempt 2

      trainmaster logs 3f2a --tail 50 --grep loss -f
    """
    if node and not agent:
        raise UsageError("--node chooses among agents' logs: add --agent, or choose a rank with --rank")
    stream = node_file(AGENT_LOG, node) if agent else rank_log(rank)
    with connect(home, server, reads=True) as jobs:
        job_id = jobs.find(job)
        if follow:
            _wait_for_start(jobs, job_id)
        if tail is None and grep is None:
            for piece in jobs.log(job_id, stream, attempt=attempt, follow=follow):
                _write(piece)
            return
        read = 0
        if tail is not None:
            pieces = list(jobs.log(job_id, stream, attempt=attempt, follow=False))
            read = sum(map(len, pieces))
            for line in deque(_lines(pieces, grep), maxlen=min(tail, sys.maxsize)):
                _write(line)
            if not follow:
                return
        for line in _lines(_skip(jobs.log(job_id, stream, attempt=attempt, follow=follow), read), grep):
            _write(line)


def _wait_for_start(jobs: Jobs, job_id: str) -> None:
    """Until the job has a log, or will have none; why it waits is said once."""
    told = False
    while not (job := jobs.line(job_id)).final and not jobs.log_streams(job_id):
        if not told:
            driver = "" if jobs.is_driven() else "; no server works on this home folder: trainmaster serve"
            _console.note(f"{job.name} is {job.stage or job.status}, waiting for its log{driver}")
            told = True
        time.sleep(_EVERY_S)


def _lines(pieces: Iterable[bytes], grep: str | None) -> Iterator[bytes]:
    """The lines of a log that contain the text, each with its end; the last may have none."""
    wanted, rest = (grep or "").encode(), b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in whole if wanted in line)
    if rest and wanted in rest:
        yield rest


def _skip(pieces: Iterable[bytes], count: int) -> Iterator[bytes]:
    for piece in pieces:
        if count < len(piece):
            yield piece[count:]
        count = max(0, count - len(piece))


def _write(piece: bytes) -> None:
    sys.stdout.buffer.write(_console.log_bytes(piece))
    sys.stdout.buffer.flush()
