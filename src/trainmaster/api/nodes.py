"""Machines: checked nodes and rented instances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from trainmaster.core.money.cost import Cents
from trainmaster.core.results import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node with the result of its newest checks."""

    node: str
    attempt: str
    job_id: str
    project: str
    at: datetime | None
    verdict: Verdict  # the worst of its checks
    checks: Mapping[str, int]  # number of checks by verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    nodes: tuple[Node, ...]
    limit: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A machine that was, is or may be rented."""

    id: int
    attempt: str
    target: str
    nonce: str
    provider_id: str | None
    kind: str | None
    region: str | None
    state: str
    price_cents_per_hour: float | None
    address: str | None
    created_at: datetime
    launched_at: datetime | None
    gone_at: datetime | None
    detail: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    instances: tuple[Instance, ...]
    limit: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU of a node in the newest checks. `key` follows it from node to node: serial:…, uuid:…, bus:…, place:…"""

    key: str
    device: str
    verdict: Verdict
    checks: tuple[str, ...]  # with this verdict, where it is bad
    reason: str
    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """An open job that holds a node."""

    job_id: str
    name: str
    project: str
    submitted_by: str | None
    price_cents_per_hour: float | None = None  # of the job, for all its machines; null: unknown
    cost_cents: Cents | None = None  # of the job so far; null: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedNode:
    """A machine of the map. `verdict` is null where it was never checked; `out_since` is set while it is drained."""

    node: str
    target: str | None
    verdict: Verdict | None
    at: datetime | None
    checks: Mapping[str, int]
    reason: str  # of the first bad check that is not of one GPU
    gpus: tuple[Gpu, ...]
    used_by: tuple[NodeUse, ...]
    job_id: str | None  # whose pre-flight the verdict is; null: a check by the operator
    out_since: str | None = None
    out_reason: str | None = None  # of a machine of our own queue
    standing: str = ""  # the check of an older run that decides the verdict: it was not measured again
    used_by_others: int = 0  # open jobs there of projects that the caller does not see


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMap:
    """Machines, the worst first, a page at a time."""

    nodes: tuple[MappedNode, ...]
    total: int  # that fit the filter
    counts: Mapping[str, int]  # all, bad, used, free, out: before the filter
    state: str | None
    find: str | None
    limit: int
    offset: int
    made_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLine:
    """One GPU, or the rest of one node, in one run of checks."""

    at: datetime | None
    key: str
    node: str
    device: str | None
    verdict: Verdict
    checks: tuple[str, ...]
    reason: str
    job_id: str | None  # null: a check by the operator


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """A drain or a give-back of a node."""

    at: datetime
    who: str
    drained: bool  # False: given back
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    """What checks said of a node and its GPUs, or of one GPU on whatever node it was; newest first."""

    word: str  # the node, or the serial number or key of the GPU
    gpu: bool
    lines: tuple[HistoryLine, ...]
    runs: int
    failed: int  # runs in which it, or one of its GPUs, failed
    target: str | None  # of the newest pre-flight
    used_by: tuple[NodeUse, ...]
    out_since: str | None
    out_reason: str | None = None  # of a machine of our own queue
    verdict: Verdict | None = None  # of a node; a check that was not measured again keeps its last one
    standing: str = ""  # the check of an older run that decides it
    used_by_others: int = 0  # open jobs there of projects that the caller does not see
    changes: tuple[NodeChange, ...] = ()  # newest first; for callers who see the whole server
    made_at: datetime
