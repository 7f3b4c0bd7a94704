"""Recovery settings: what happens when a rank of our trainer has died."""

from __future__ import annotations

from dataclasses import dataclass

from trainmaster.core.schema import field


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """Recovery in place: all ranks are started again inside the same attempt, without a new pre-flight."""

    in_place: bool = field(
        default=True,
        doc="start the ranks again on their nodes when one has died of a cause that may pass. false: a dead rank ends "
        "the attempt",
    )
    tries: int = field(
        default=3,
        ge=1,
        le=100,
        doc="recoveries in a row without a new checkpoint, after which the attempt ends; 1 to 100",
    )
