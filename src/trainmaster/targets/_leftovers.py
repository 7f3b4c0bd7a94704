"""What killed runs of a home have left at a target: removed before the next run of that home makes its own."""

from __future__ import annotations

import logging
from pathlib import Path

from trainmaster.core.errors import TargetError
from trainmaster.targets import Lists, Target
from trainmaster.targets._runs import is_left_over

log = logging.getLogger(__name__)


async def remove_leftovers(target: Target, home: Path) -> None:
    """Remove what killed runs of this home have left at a target. What cannot be removed hinders nothing."""
    try:
        for owned in await target.list_owned(partial=True) if isinstance(target, Lists) else ():
            if is_left_over(home, owned.handle):
                log.warning("removing what an earlier run left: %s", owned.what)
                await target.release(owned.handle)
    except TargetError as error:
        log.info("what earlier runs left could not be listed or removed: %s", error)
