"""The time of one job along one axis: what its GPUs did and what that cost, stages of its attempts, and its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

Stage = Literal["queued", "provisioning", "checking", "starting", "working", "stalled", "idle", "unknown"]
Tone = Literal["good", "warn", "bad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BinCell:
    """A stretch of time and the shares of it by bin of the goodput ledger; seconds since the job was submitted."""

    start_s: float
    end_s: float
    attempt: int  # 0: none
    shares: Mapping[str, float]
    cents: float | None  # of all GPUs; null: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """A stretch in which an attempt was in one stage."""

    start_s: float
    end_s: float
    stage: Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptParts:
    """The stages of one attempt, in order."""

    attempt: int
    parts: tuple[StagePart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMark:
    """Something that was said of a node: its pre-flight, that it was a straggler, that it hung."""

    at_s: float
    kind: Literal["check", "straggler", "hang"]
    tone: Tone
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStrip:
    """One node, the attempts that it was part of, and what was said of it."""

    node: str
    attempts: tuple[int, ...]
    marks: tuple[NodeMark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The time of a job from its submission to its end, or to now.

    Each cell is a stretch of the ledger; of a long run it is an equal part of the whole with the share of each bin.
    While a long run is read for the first time there is none yet, and `whole` is false: ask again.
    """

    id: str
    start: datetime
    end: datetime
    cells: tuple[BinCell, ...]
    attempts: tuple[AttemptParts, ...]
    nodes: tuple[NodeStrip, ...]  # those of which something bad was said first
    more_nodes: int
    whole: bool
