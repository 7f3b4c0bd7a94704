"""The account of a target's jobs: whose rights they have, and whose files lie beside theirs."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Which account a job runs as, and on which disk. A target that cannot say gives None, and that is refused."""

    name: str  # a Unix user, a namespace and its service account, a role
    places: frozenset[str] = field(default=frozenset())  # machines, clusters or buckets where that account is one
    server: str = ""  # why it has the rights of the server itself; "": it has not
    note: str = ""  # what is not limited there, for those who grant it
    alone: bool = False  # a machine of its own for each attempt: nothing of other jobs lies there

    def is_shared_with(self, other: Account) -> bool:
        """Whether jobs of the two could read, forge and end each other."""
        return not self.alone and self.name == other.name and bool(self.places & other.places)
