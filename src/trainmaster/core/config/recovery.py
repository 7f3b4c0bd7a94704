"""Recovery settings: what happens when a rank of our trainer has died."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainmaster.core.errors import Fault
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
    groups: int = field(
        default=1,
        ge=1,
        le=64,
        doc="replica groups: each has the weights once, sharded over its ranks. While one that has lost a rank is "
        "started again, the others go on with its part of every batch. On one node; what goes between the groups goes "
        "through its memory",
    )

    def faults(self) -> Iterator[Fault]:
        if self.groups > 1 and not self.in_place:
            message = f"{self.groups} groups come back in the same attempt; leave out this, or in_place: false"
            yield Fault(path="groups", message=message)

    def faults_on(self, ranks: int) -> Iterator[Fault]:
        """What is wrong with it on that many ranks."""
        if ranks % self.groups:
            fit = max(groups for groups in range(1, self.groups + 1) if ranks % groups == 0)
            yield Fault(path="groups", message=f"{self.groups} does not divide {ranks} ranks; use {fit}")
