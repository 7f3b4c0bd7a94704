"""Requests about the queue, the machines and sets of runs, answered from a home folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainmaster.api.jobs import Job
    from trainmaster.api.queue import MachinesPage, QueuePage
    from trainmaster.api.sets import SetLine, SetPage, SubmittedSet
    from trainmaster.core.config.sweep import Sweep
    from trainmaster.store.database import Database

_BY = "local"  # the name of the command line in the audit trail


class HomeQueue:
    """The queue of one home folder."""

    home: Path
    db: Database

    def queue(self, *, project: str | None, limit: int) -> QueuePage:
        from trainmaster.pages import queue

        page = queue.read(self.db, project=project, limit=limit)
        return page if project is None else replace(page, others=queue.count_others(self.db, project=project))

    def machines(self, *, project: str | None) -> MachinesPage:
        from trainmaster.pages import machines

        return machines.read(self.db, home=self.home, project=project)

    def drain_machine(self, node: str, *, reason: str, target: str | None) -> None:
        from trainmaster.control.queueing import machines
        from trainmaster.pages.parts.node_journal import read_targets

        machines.drain(self.db, node, reason=reason, on=target, checked_on=read_targets(self.home).get(node))

    def readmit_machine(self, node: str, *, target: str | None) -> None:
        from trainmaster.control.queueing import machines

        machines.readmit(self.db, node, on=target)

    def set_share(self, project: str, *, weight: float, quota: int | None) -> None:
        from trainmaster.store import audit
        from trainmaster.store.capacity import devices

        detail = {"weight": weight, "quota": quota}
        with self.db.write() as conn:
            devices.set_share(conn, project, weight=weight, quota=quota)
            audit.record(conn, who=_BY, action="share.set", subject=f"share:{project}", detail=detail)

    def set_priority(self, job_id: str, priority: str) -> Job:
        """Of a job that waits in our own queue."""
        from trainmaster.control.queueing import priority as priorities
        from trainmaster.pages.parts import shapes

        return shapes.job(priorities.change(self.db, job_id, priority))

    def submit_set(self, sweep: Sweep, *, key: str | None) -> SubmittedSet:
        from trainmaster.api.sets import SubmittedSet
        from trainmaster.control import known_targets
        from trainmaster.control.queueing import sets

        for trial in sweep.trials:
            known_targets.refuse_job_file(trial.spec.target, self.home)
        row, new = sets.submit_set_once(self.db, sweep, key=key)
        page = self._set(row.id)
        return SubmittedSet(set=page.set, trials=page.trials, new=new)

    def find_set(self, word: str) -> SetPage | None:
        """The set of runs with this id, a unique beginning of it, or the newest of this name."""
        from trainmaster.pages import sets

        return sets.read_one(self.db, word)

    def sets(self, *, project: str | None, find: str | None = None) -> Sequence[SetLine]:
        """Sets, newest first; `find`: of this name, or whose id begins so."""
        from trainmaster.pages import sets

        return list(sets.read(self.db, project=project, find=find).sets)

    def cancel_set(self, set_id: str) -> SetPage:
        from trainmaster.control.queueing import sets

        sets.cancel(self.db, set_id)
        return self._set(set_id)

    def pause_set(self, set_id: str) -> SetPage:
        """No time of its schedule comes until it is resumed."""
        from trainmaster.control.queueing import schedules

        schedules.pause(self.db, set_id)
        return self._set(set_id)

    def resume_set(self, set_id: str) -> SetPage:
        """Its schedule goes on with the next time from now."""
        from trainmaster.control.queueing import schedules

        schedules.go_on(self.db, set_id, now=datetime.now(UTC))
        return self._set(set_id)

    def _set(self, set_id: str) -> SetPage:
        page = self.find_set(set_id)
        assert page is not None
        return page
