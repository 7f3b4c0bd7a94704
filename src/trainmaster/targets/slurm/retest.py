"""Retest of nodes that Trainmaster has drained: resumed inside a reservation that no other job may use, measured, and
drained again with their reason; `trainmaster readmit` then resumes them.

The name of the reservation says which run of which home made it. Should that run be killed, the reservation stays,
without an end, and keeps jobs away until the next check of the home, or `trainmaster reap`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from trainmaster.core.errors import NodeUnavailable, TargetError
from trainmaster.targets._drain import PREFIX
from trainmaster.targets._runs import Owner
from trainmaster.targets.slurm.node_list import OUT, SlurmNode, call, scontrol
from trainmaster.targets.slurm.queue import Queue

_PREFIX = "trainmaster_retest_"
_NAME = re.compile(rf"\bReservationName=({_PREFIX}([0-9a-f]{{8}})_(\w{{12,13}})_(\S+)) ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A reservation of ours."""

    name: str
    owner: Owner
    node: str


@contextlib.asynccontextmanager
async def reserve(where: Queue, node: SlurmNode, owner: Owner) -> AsyncIterator[str | None]:
    """The reservation to measure a node in; None for a node in service. Afterwards the node is drained as before."""
    if not node.ours:
        if node.out_of_service is not None:
            raise NodeUnavailable(node.out_of_service, action="repair and resume it, then check it again")
        yield None
        return
    if any(state in OUT and state not in ("DRAIN", "MAINT") for state in node.states):
        raise NodeUnavailable(
            f"Slurm shows it as {'+'.join(node.states)}", action="start its slurmd, then check it again"
        )
    name = f"{_PREFIX}{owner.home}_{owner.run}_{node.name}"
    user = (await call(where, ["id", "-un"], program=False)).strip()
    fields = [
        f"ReservationName={name}", f"Nodes={node.name}", f"Users={user}", "StartTime=now", "Duration=UNLIMITED",
        "Flags=MAINT,IGNORE_JOBS",
    ]  # fmt: skip
    creating = asyncio.ensure_future(scontrol(where, "create", "reservation", *fields))
    try:
        await asyncio.shield(creating)
    except asyncio.CancelledError:  # Slurm makes it all the same: it is waited for, and ended
        with contextlib.suppress(TargetError):
            await creating
            await end(where, name, node.name, node.reason)
        raise
    except TargetError as error:
        text = f"it is drained ({node.reason}), and a retest needs the rights of an operator: {error}"
        raise NodeUnavailable(text, action="run the check as an operator of Slurm") from None
    try:
        await scontrol(where, "update", f"nodename={node.name}", "state=resume")
        yield name
    finally:
        await end(where, name, node.name, node.reason)


async def end(where: Queue, name: str, node: str, reason: str = f"{PREFIX} a retest was interrupted") -> None:
    """Drain the node again, and only then let go of it."""
    await scontrol(where, "update", f"nodename={node}", "state=drain", f"reason={reason}")
    await scontrol(where, "delete", f"ReservationName={name}")


async def list_reservations(where: Queue) -> list[Reservation]:
    """Reservations of any home's retests."""
    text = await scontrol(where, "show", "reservation", "--oneliner")
    return [
        Reservation(name=match[1], owner=Owner(home=match[2], run=match[3]), node=match[4])
        for match in _NAME.finditer(text)
    ]
