"""Times of a start: how long each part took, from the agent's request to the end of the first step.

Each part is an event of its own, so that a start that takes minutes says where it is. After a recovery the agent's
parts (`core.plan.START_VARIABLE`) stand before those of the start, and the whole is one event.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from trainmaster.core.plan import START_VARIABLE
from trainmaster.node.owner import start_of
from trainmaster.train.run_log import RunLog


class StartTimes:
    """Clock of one start; `done` ends a part, `finish` the start."""

    def __init__(
        self, run_log: RunLog, environ: Mapping[str, str], *, restart: int = 0, born: float | None = None
    ) -> None:
        """`born` is when the start began where there is no agent; not stated: when this process did."""
        self._run_log, self._restart = run_log, restart
        told: dict[str, Any] = json.loads(environ.get(START_VARIABLE) or "{}")
        born = time.time() - (_age_s() or 0.0) if born is None else born
        self._recovery: dict[str, Any] | None = told.get("recovery")
        self._began = self._last = min(born, float(told.get("at", born)))
        self._parts: dict[str, float] = {}
        self._over = False
        if self._recovery is not None:
            # The fork server has made its imports by then: what passed until this process was there is the fork.
            self._parts["fork"] = round(born - self._began, 3)
            self._last = born

    def done(self, part: str, *, of_it: Mapping[str, float] | None = None) -> None:
        """A part is done; `of_it` are parts inside of it that are told apart, each with its seconds."""
        if self._over:
            return
        now = time.time()
        seconds, self._last = now - self._last, now
        inside = {name: took for name, took in (of_it or {}).items() if took > 0}
        for name, took in {**inside, part: max(0.0, seconds - sum(inside.values()))}.items():
            self._parts[name] = round(self._parts.get(name, 0.0) + took, 3)
            self._run_log.start_part(part=name, seconds=round(took, 3), restart=self._restart)

    def finish(self, *, step: int, resumed_from: int | None, tier: str | None) -> None:
        """The first step is done: the start is over."""
        if self._over:
            return
        self._over = True
        seconds = round(self._last - self._began, 3)
        self._run_log.start_done(step=step, seconds=seconds, parts=self._parts, restart=self._restart)
        if self._recovery is not None:
            self._run_log.recovered(
                how=str(self._recovery["how"]),
                restart=self._restart,
                step=step,
                resumed_from=resumed_from,
                tier=tier,
                seconds=round(self._last - self._recovery["failed_at"], 3),
                parts={**self._recovery["parts"], **self._parts},
            )


def _age_s() -> float | None:
    """How long ago this process began; None where the kernel does not say."""
    ticks, clock = start_of(os.getpid()), getattr(time, "CLOCK_BOOTTIME", None)
    if ticks is None or clock is None:
        return None
    return max(0.0, time.clock_gettime(clock) - int(ticks) / os.sysconf("SC_CLK_TCK"))
