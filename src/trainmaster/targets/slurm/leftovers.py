"""What runs without a job in a database hold of a Slurm cluster: allocations, by their comment, and reservations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster.core.errors import TargetError
from trainmaster.remote.slurm import layout
from trainmaster.remote.slurm.states import translate
from trainmaster.targets import Handle, Owned
from trainmaster.targets.slurm import retest
from trainmaster.targets.slurm.node_list import call
from trainmaster.targets.slurm.queue import Queue


async def list_runs(where: Queue, jobs: Sequence[Mapping[str, Any]]) -> list[Owned]:
    """Everything that runs hold, of any home: their jobs among those listed, and their reservations."""
    owned: list[Owned] = []
    for row in jobs:
        home, _, run = str(row["comment"]).removeprefix(layout.RUN_COMMENT).partition(":")
        if not run or not str(row["comment"]).startswith(layout.RUN_COMMENT) or translate(str(row["state"])).state.over:
            continue
        name, number = str(row["name"]), str(row["id"])
        handle = {"attempt": f"{name}.{number}", "name": name, "slurm_job": number, "home": home, "run": run}
        what = f"Slurm job {number} ({name})" + (f" on {row['nodes']}" if row["nodes"] else "")
        owned.append(Owned(attempt=f"{name}.{number}", handle=handle, what=what))
    try:
        reservations = await retest.list_reservations(where)
    except TargetError:
        reservations = []  # an account that may not see them has made none
    for reservation in reservations:
        handle = {"attempt": reservation.name, "reservation": reservation.name, "node": reservation.node}
        handle |= {"home": reservation.owner.home, "run": reservation.owner.run}
        owned.append(
            Owned(attempt=reservation.name, handle=handle, what=f"reservation of {reservation.node} for a retest")
        )
    return owned


async def remove(where: Queue, handle: Handle) -> None:
    """Cancel a job of a run, or drain the node of its reservation and delete it. What is gone is no error."""
    if "reservation" in handle:
        if any(reservation.name == handle["reservation"] for reservation in await retest.list_reservations(where)):
            await retest.end(where, str(handle["reservation"]), str(handle["node"]))
        return
    # The name, too: Slurm uses ids again.
    await call(where, ["scancel", "--quiet", f"--name={handle['name']}", str(handle["slurm_job"])])
