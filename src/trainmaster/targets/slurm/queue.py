"""One listing of a cluster's jobs for all attempts: at most one squeue and one sacct per poll, however many jobs run.

A listing serves every poll until it is `poll_s` old. A job that it does not show is looked up in a new one before it
counts as gone. Final states are kept: a job that is over is not asked for again.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster.core.errors import TargetError, Unreachable
from trainmaster.remote.slurm.login import Answer, LoginNode
from trainmaster.remote.slurm.parse import SlurmJob
from trainmaster.remote.slurm.states import translate
from trainmaster.targets.slurm.settings import SlurmSettings

_FORGET_S = 600.0  # a job that no poll has asked for is not looked up any more


class Queue:
    """Jobs of one cluster, as its last listing shows them, and the way to its login node."""

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings
        self._login: LoginNode | None = None
        if settings.login is None:
            self._login = LoginNode(commands=settings.commands, env=dict(settings.env), output=settings.output)
        self._gate = asyncio.Lock()
        self._asked: dict[str, float] = {}  # job → when a poll last asked for it
        self._final: dict[str, list[SlurmJob]] = {}
        self._jobs: dict[str, list[SlurmJob]] = {}
        self._began = float("-inf")  # start of the listing that `_jobs` is from
        self.listings = 0  # made so far
        self.accounting = ""  # why accounting could not be asked for jobs that have left the queue

    async def request(self, call: str, **params: Any) -> Answer:
        """Send a request to the login node: in this process, or over SSH."""
        if self._login is not None:
            try:
                return await self._login.answer(call, params)
            except OSError as error:
                raise TargetError(f"slurm: {error}") from error
        from trainmaster.targets.ssh.hosts import read_known_hosts
        from trainmaster.targets.ssh.session import session

        login, known = self._settings.login, self._settings.known_hosts
        assert login is not None and known is not None
        node = session(login, read_known_hosts(known))
        how = {"commands": self._settings.commands, "env": dict(self._settings.env), "output": self._settings.output}
        reply = await node.request("slurm", call=call, how=how, params=params)
        return reply.result, reply.body

    async def find(self, job: str) -> list[SlurmJob]:
        """The tasks of a job (one without an array); empty where Slurm does not know it any more."""
        self._asked[job] = started = time.monotonic()
        if job in self._final:
            return self._final[job]
        if job not in self._jobs or self._began < started - self._settings.poll_s:
            async with self._gate:
                # Another poll may have made the listing while this one waited.
                if self._began < started - (self._settings.poll_s if job in self._jobs else 0.0):
                    await self._list()
        return self._jobs.get(job, [])

    async def _list(self) -> None:
        began = time.monotonic()
        self._asked = {job: at for job, at in self._asked.items() if began - at < _FORGET_S}
        self._final = {job: rows for job, rows in self._final.items() if job in self._asked}
        wanted = [job for job in self._asked if job not in self._final]
        result, _ = await self.request("listing", wanted=wanted)
        self._jobs = group(_rows(result))
        self.accounting = str(result.get("accounting", ""))
        self._began = began
        self.listings += 1
        for job in wanted:
            rows = self._jobs.get(job, [])
            # Without an exit code squeue has it for a while; accounting has the last word where it can be asked.
            if rows and all(translate(row.state).state.over for row in rows):
                self._final[job] = rows

    def forget(self, job: str) -> None:
        """Look a job up again at the next poll."""
        self._final.pop(job, None)
        self._jobs.pop(job, None)


def group(jobs: Sequence[SlurmJob]) -> dict[str, list[SlurmJob]]:
    """Tasks by the id of their job, in order. Of one that is listed twice, the row that is not over counts."""
    rows: dict[str, SlurmJob] = {}
    for job in jobs:
        if job.id not in rows or translate(rows[job.id].state).state.over:
            rows[job.id] = job
    by_number: dict[str, list[SlurmJob]] = defaultdict(list)
    for job in rows.values():
        by_number[job.number].append(job)
    return {number: sorted(rows, key=lambda row: row.task or 0) for number, rows in by_number.items()}


def _rows(result: Mapping[str, Any]) -> list[SlurmJob]:
    try:
        return [SlurmJob(**row) for row in result["jobs"]]
    except (KeyError, TypeError):
        raise Unreachable("slurm: the login node answered with no list of jobs") from None


_QUEUES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[SlurmSettings, Queue]]
_QUEUES = weakref.WeakKeyDictionary()


def queue(settings: SlurmSettings) -> Queue:
    """The queue of a cluster in the running event loop, shared by all its jobs."""
    ours = _QUEUES.setdefault(asyncio.get_running_loop(), {})
    return ours.setdefault(settings, Queue(settings))
