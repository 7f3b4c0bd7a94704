"""State of an attempt with spares: each node is a Job of its own, and the agent of node 0 decides about the others.

Node 0 gives the place of a lost pod to a spare, or ends the attempt. So its end is that of the attempt, and the end of
another pod counts only where node 0 says nothing about it. A Job of an older cluster puts a new pod in the place of one
that was deleted: its agent is told by node 0 what to do, and is no new attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainmaster.core.plan import EXIT_FILE, MEMBERS_LOG, ExitRecord
from trainmaster.core.states import TargetState
from trainmaster.remote.members import SPARES, count_places, find_members, parse_members
from trainmaster.targets import Handle, Poll
from trainmaster.targets._spool import Spool
from trainmaster.targets.kubernetes import states
from trainmaster.targets.kubernetes.logs import start_of
from trainmaster.targets.kubernetes.pending import explain_pod
from trainmaster.targets.kubernetes.states import Object, PodEnd

BEGAN = "began"  # mark of the spool: the pods of every place have run
_MEMBERS_BYTES = 1 << 20
# Node 0 has replaced a node, or has ended, so long after the node's end; its agents agree within 30 s (agent/group.py).
# Before the first start node 0 waits longer (`timeouts.first_step_s`), because a machine may be slow. One that has left
# a failed record is not: a new attempt is there sooner than a spare that is not ready after a minute.
_DECIDED_S = 60.0
_RECORD_BYTES = 1 << 20


def read_members(spool: Spool, handle: Handle) -> list[int]:
    """Node of each place, as node 0 has told last."""
    first = spool.node(0)
    lines = first.read(MEMBERS_LOG, first.newest_base(MEMBERS_LOG), _MEMBERS_BYTES).split(b"\n")[:-1]
    told = parse_members(lines[-1]) if lines else None
    return find_members(told, places=count_places(handle), nodes=int(handle["nodes"]))


def judge(
    job: Object | None,
    pods: Sequence[Object],
    handle: Handle,
    *,
    spool: Spool,
    not_ready: frozenset[str],
    ended_s: Mapping[str, float],
    why: str = "",
) -> Poll:
    """The poll of a submitted attempt with spares; `job` is that of node 0.

    `ended_s`: how long ago the end of a start of a container (`start_of`) was seen here first.
    """
    nodes, attempt = int(handle["nodes"]), str(handle["attempt"])
    newest = states.newest_by_node(pods, nodes)
    members = read_members(spool, handle)
    ends = {node: end for node, pod in newest.items() if (end := states.find_end(pod, node, attempt)) is not None}
    ends |= {node: end for node in members if node not in newest and (end := _read_end(spool, node, attempt))}
    if 0 in ends:
        return _end(ends, members, newest, not_ready)
    if spool.find(BEGAN) is None and not all(_has_run(newest, node) for node in members):
        waited = find_ranked(pods, handle, spool)
        return states.judge(job, waited, {**handle, "nodes": len(members)}, not_ready=not_ready, why=why)
    spool.mark(BEGAN, "")
    result = _judge_first(job, pods, handle, not_ready, why)
    if result.state is not TargetState.RUNNING:
        return result
    for node in members:
        if node in newest and ended_s.get(start_of(newest[node]), 0.0) > _DECIDED_S and _has_failed(ends.get(node)):
            return _named(ends[node])  # node 0 did not hear of it: it failed before it could say so
    if lost := [node for node in members if _is_lost(node, ends, newest, not_ready)]:
        return replace(result, note=f"node {lost[0]} is lost; node 0 looks for a spare")
    return result if result.note else replace(result, note=_explain_spares(handle, members, newest))


def is_over(job: Object | None, pods: Sequence[Object], handle: Handle, *, not_ready: frozenset[str]) -> bool:
    """Whether node 0 has failed or is lost: then the attempt is over, whoever has the other places."""
    return _judge_first(job, pods, handle, not_ready).state in (TargetState.FAILED, TargetState.LOST)


def find_ranked(pods: Sequence[Object], handle: Handle, spool: Spool) -> list[Object]:
    """Pods that have a place: all of them without spares."""
    if SPARES not in handle:
        return list(pods)
    members = read_members(spool, handle)
    return [pod for pod in pods if states.node_rank(pod, int(handle["nodes"])) in members]


def is_needed(node: int, handle: Handle) -> bool:
    """Whether a node has its pod as long as the attempt lives: with spares only the first, without them each."""
    return SPARES not in handle or node == 0


def _judge_first(
    job: Object | None, pods: Sequence[Object], handle: Handle, not_ready: frozenset[str], why: str = ""
) -> Poll:
    """The poll of node 0 alone."""
    first = [pod for pod in pods if states.node_rank(pod, int(handle["nodes"])) == 0]
    return states.judge(job, first, {**handle, "nodes": 1}, not_ready=not_ready, why=why)


def _read_end(spool: Spool, node: int, attempt: str) -> PodEnd | None:
    """The end of a node whose pod was removed, as its log has it: its Job has a time of its own after which it goes."""
    own = spool.node(node)
    raw = own.read(EXIT_FILE, own.newest_base(EXIT_FILE), _RECORD_BYTES) if node else b""
    return PodEnd(node=node, record=ExitRecord.read(raw, attempt=attempt)) if raw else None


def _has_run(newest: Mapping[int, Object], node: int) -> bool:
    return node in newest and states.has_started([newest[node]])


def _explain_spares(handle: Handle, members: Sequence[int], newest: Mapping[int, Object]) -> str:
    """Which spare has no pod that runs, and why: the attempt runs without it, because its agents do not wait for it."""
    for node in range(count_places(handle), int(handle["nodes"])):
        if node not in members and not _has_run(newest, node):
            why = explain_pod(newest[node]) if node in newest else "it has no pod"
            return f"node {node}, a spare, is not there: {why}"
    return ""


def _end(
    ends: Mapping[int, PodEnd], members: Sequence[int], newest: Mapping[int, Object], not_ready: frozenset[str]
) -> Poll:
    """The end of an attempt whose node 0 has ended: well where each node with a place has ended well too."""
    first = ends[0]
    if first.record is None:
        return Poll(state=TargetState.LOST, reason=first.lost, note=first.text)
    if not first.record.ok:
        return _named(first)
    for node in members:
        end = ends.get(node)
        if end is None:
            return _wait_for(node, newest.get(node), not_ready)
        if end.record is None or not end.record.ok:
            return _named(end)
    return Poll(state=TargetState.SUCCEEDED, exit=first.record, note=first.record.message)


def _wait_for(node: int, pod: Object | None, not_ready: frozenset[str]) -> Poll:
    """The state of an attempt whose node 0 has ended well, and this node not: as without spares."""
    if pod is None:
        return Poll(state=TargetState.LOST, note=f"the pod of node {node} is lost, and left no exit record")
    if pod["spec"].get("nodeName") not in not_ready:
        return Poll(state=TargetState.RUNNING, note=f"node 0 has ended, node {node} not yet")
    if pod["metadata"].get("deletionTimestamp"):
        return states.given_up(pod, not_ready)
    return states.without_contact(str(pod["spec"]["nodeName"]))


def _has_failed(end: PodEnd | None) -> bool:
    return end is not None and end.record is not None and not end.record.ok


def _named(end: PodEnd) -> Poll:
    if end.record is None:
        return Poll(state=TargetState.LOST, reason=end.lost, note=end.text)
    return Poll(state=TargetState.FAILED, exit=end.record, note=end.record.message)


def _is_lost(node: int, ends: Mapping[int, PodEnd], newest: Mapping[int, Object], not_ready: frozenset[str]) -> bool:
    if node in ends:
        record = ends[node].record
        return record is None or not record.ok  # one that ended well waits for node 0's end
    pod = newest.get(node)
    return pod is None or pod["spec"].get("nodeName") in not_ready or bool(pod["metadata"].get("deletionTimestamp"))
