"""State of an attempt on several machines, from the answers of each.

With spares the agent of node 0 decides what becomes of a machine that is lost: it puts a spare in its place, or ends
the attempt. What a machine that was replaced still says does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainmaster.core.attempt import Handle, Poll
from trainmaster.core.errors import TargetError
from trainmaster.core.plan import ExitRecord
from trainmaster.core.states import TargetState
from trainmaster.remote.members import SPARES, find_members
from trainmaster.targets._answers import clean
from trainmaster.targets.ssh.session import Reply, Session


def count_places(handle: Handle) -> int:
    """Machines of an attempt that have ranks."""
    return len(handle["nodes"]) - int(handle.get(SPARES, 0))


def read_poll(node: Session, reply: Reply | TargetError) -> Poll:
    if isinstance(reply, TargetError):
        return Poll(state=TargetState.LOST if node.lost else TargetState.UNKNOWN, note=str(reply))
    result = reply.result
    try:
        state = TargetState(str(result.get("state")))
    except ValueError:
        return Poll(state=TargetState.UNKNOWN, note=f"{node.host.name}: a state that is none")
    record = result.get("exit")
    exit_ = ExitRecord.read(record.encode(), attempt=node.host.name) if isinstance(record, str) else None
    if state in (TargetState.SUCCEEDED, TargetState.FAILED) and exit_ is None:
        return Poll(state=TargetState.UNKNOWN, note=f"{node.host.name}: an end without a record")
    if state is TargetState.SUCCEEDED and exit_ is not None and not exit_.ok:
        state = TargetState.FAILED
    return Poll(state=state, exit=exit_, note=clean(str(result.get("note", "")))[:2000])


def combine(polls: Sequence[Poll], handle: Handle, replies: Sequence[Reply | TargetError]) -> Poll:
    """State of the whole attempt. One agent that failed ends it: its peers only wait for it."""
    if not polls:
        return Poll(state=TargetState.WAITING, note="not placed yet")
    names, members = list(handle["nodes"]), _find_members(handle, replies)
    failed = [(poll.exit.ended_at, rank) for rank in members if (poll := polls[rank]).exit and not poll.exit.ok]
    if failed:
        rank = min(failed)[1]
        return _named(polls[rank], names[rank], len(names))
    spares = [rank for rank in range(count_places(handle), len(names)) if rank not in members]
    may_replace = polls[0].state is TargetState.RUNNING and any(
        polls[rank].state is TargetState.RUNNING for rank in spares
    )
    for state in (TargetState.LOST, TargetState.UNKNOWN, TargetState.RUNNING, TargetState.WAITING):
        for rank in members:
            poll = polls[rank]
            if poll.state is not state:
                continue
            if state is TargetState.WAITING and handle.get("submitted"):
                return Poll(state=TargetState.LOST, note=f"{names[rank]}: its folder there was removed")
            if state in (TargetState.LOST, TargetState.UNKNOWN) and may_replace:
                return Poll(state=TargetState.RUNNING, note=f"{names[rank]}: {poll.note}; a spare waits for its place")
            return _named(poll, names[rank], len(names))
    return polls[0]


def _find_members(handle: Handle, replies: Sequence[Reply | TargetError]) -> list[int]:
    """Machine of each place, as that of node 0 says; without a word of it: the first ones."""
    first, nodes = replies[0], count_places(handle)
    told = first.result.get("members") if isinstance(first, Reply) and handle.get(SPARES) else None
    return find_members(told, places=nodes, nodes=len(handle["nodes"]))


def _named(poll: Poll, name: str, nodes: int) -> Poll:
    """A node's state with its name where there are several."""
    if nodes > 1 and poll.exit is not None and not poll.exit.message.startswith(f"{name}:"):
        poll = replace(poll, exit=replace(poll.exit, message=f"{name}: {poll.exit.message}"))
    if not poll.note or poll.note.startswith(f"{name}:") or (nodes == 1 and poll.exit is not None):
        return poll
    return replace(poll, note=f"{name}: {poll.note}")
