"""What to do about a job that a failed pre-flight ended, where the server's own queue chose its machines."""

from __future__ import annotations

from collections.abc import Collection

from trainmaster import targets
from trainmaster.core.errors import TrainmasterError
from trainmaster.store.capacity import machines
from trainmaster.store.database import Database
from trainmaster.store.rows import JobRow


def advise(db: Database, job: JobRow, names: Collection[str]) -> str:
    """How to keep jobs off the machines `names` that it ran on, and to have it tried on another; "" where another
    program chooses the machines."""
    try:
        target = targets.load(job.spec.target)
        known = target.list_machines() if isinstance(target, targets.ListsDevices) else []
    except TrainmasterError:  # its file is gone
        return ""
    if not known:
        return ""
    closed = {row.machine for row in machines.list_machines(db, place=targets.find_place(job.spec.target))}
    node = next(iter(names)) if len(names) == 1 else "NODE"
    drain = f"an admin keeps jobs away from it with `trainmaster nodes drain {node} --reason TEXT`"
    if not set(known) - closed - set(names):
        return f"{drain}; no other machine of its target takes jobs, so the next one goes there too"
    again = "; with `limits: { attempts: 2 }` a job is tried on another machine by itself"
    return drain + (again if job.spec.limits.attempts == 1 else "")
