"""The scheduler that drains the nodes of a target."""

from __future__ import annotations

from trainmaster import targets
from trainmaster.core.errors import UsageError
from trainmaster.targets import Scheduler


def load(word: str) -> Scheduler:
    """The scheduler that a target stands for, as `slurm:FILE`. UsageError for one that does not drain."""
    stated = targets.find_traits(word)
    if stated is not None and stated.drains:
        return targets.load_scheduler(word)
    names = targets.spell_all("remedy")
    if stated is None:
        raise UsageError(f"--on {word}: {word.partition(':')[0]!r} is no scheduler; use one of {', '.join(names)}")
    raise UsageError(f"--on {word}: nodes are drained by {' or '.join(names)}; {stated.alternative('remedy')}")
