"""Recovery in place: whether the ranks of this node are started again inside the attempt, and what they are told.

Only ranks of our own trainer, which resume by themselves, and only where the node is the whole job: on several nodes
the survivors would have to agree on a new rendezvous.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster import checks
from trainmaster.agent import preflight
from trainmaster.agent.diagnose import Outcome
from trainmaster.core.plan import EVENTS_FILE, START_VARIABLE, Plan
from trainmaster.core.results import judge_overall
from trainmaster.core.states import Reason
from trainmaster.node.emit import Emitter
from trainmaster.node.host import Host

IN_PLACE = "in_place"
# Causes that may pass on the same node. A lost node, a full disk or a fault of the program do not.
PASSING = frozenset(
    {
        Reason.CRASHED,
        Reason.GPU_ERROR,
        Reason.FABRIC_ERROR,
        Reason.COLLECTIVE_TIMEOUT,
        Reason.FILE_SYSTEM_ERROR,
        Reason.STORAGE_ERROR,
        Reason.TARGET_ERROR,
    }
)
_GPU_CHECKS = ("gpu_count", "gpu_recovery")  # all are there and answer; the driver wants none reset
_DRIVER = Path("/dev/nvidiactl")


def is_possible(plan: Plan) -> bool:
    """Whether the ranks of this plan can be recovered in place at all."""
    train = plan.spec.train
    return (
        train is not None
        and train.recovery.in_place
        and plan.spec.container is None
        and plan.spec.resources.nodes == 1
        and sys.platform == "linux"
    )


class Recovery:
    """Recoveries of one attempt on this node."""

    def __init__(self, plan: Plan, events: Emitter) -> None:
        self._plan, self._events = plan, events
        self._file = Path(plan.folder) / EVENTS_FILE
        self._possible = is_possible(plan)
        self._read_to = 0
        self._failed_at = 0.0
        self._parts: dict[str, float] = {}
        self.restart = 0
        self.without_save = 0

    def may_follow(self, failure: Outcome) -> bool:
        """Whether a recovery in place may follow this failure, which was seen just now."""
        self._failed_at = time.time()
        train, retry = self._plan.spec.train, self._plan.spec.limits.retry
        if not self._possible or train is None or failure.reason not in PASSING:
            return False
        if not retry.get(failure.reason.value, True):  # the user wants to look at it first
            return False
        if self._has_saved():
            self.without_save = 0
        return self.without_save < train.recovery.tries

    def begin(self, failure: Outcome) -> Outcome | None:
        """The ranks are gone: tell of the recovery and look at the GPUs. An Outcome ends the attempt."""
        assert failure.reason is not None
        self.restart, self.without_save = self.restart + 1, self.without_save + 1
        stopped = time.time()
        self._events.emit(
            "RECOVERY",
            "start",
            how=IN_PLACE,
            restart=self.restart,
            without_save=self.without_save,
            rank=failure.evidence.get("rank"),
            reason=failure.reason.value,
            message=failure.message,
        )
        refusal = self._check_gpus()
        self._parts = {"stop": stopped - self._failed_at, "check": time.time() - stopped}
        return refusal

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of ranks that are started now."""
        if self._plan.spec.train is None:
            return {}
        told: dict[str, Any] = {"at": time.time()}
        if self.restart:
            parts = {name: round(seconds, 3) for name, seconds in self._parts.items()}
            told["recovery"] = {"how": IN_PLACE, "failed_at": self._failed_at, "parts": parts}
        return {START_VARIABLE: json.dumps(told), "TORCHELASTIC_RESTART_COUNT": str(self.restart)}

    def _has_saved(self) -> bool:
        """Whether a checkpoint was committed since the last look, as the trainer's events say."""
        try:
            with self._file.open("rb") as file:
                file.seek(self._read_to)
                new = file.read()
        except OSError:
            return False
        self._read_to += len(new)
        return any(
            line.get("phase") == "CHECKPOINT" and line.get("event") == "saved" for line in map(_parse, new.splitlines())
        )

    def _check_gpus(self) -> Outcome | None:
        """A look at the GPUs in about a second, in place of a pre-flight. Not measured is no pass here either."""
        train, spec = self._plan.spec.train, self._plan.spec.preflight
        if train is None or train.device == "cpu" or not _DRIVER.exists():
            return None
        results = checks.run(Host(), spec.expect, level=1, only=_GPU_CHECKS)
        overall = judge_overall(results, planned=_GPU_CHECKS)
        # Who starts without a pre-flight has not asked for a node that can be measured.
        return preflight.judge(overall, results, _GPU_CHECKS, allow_incomplete=spec.allow_incomplete or spec.level == 0)


def _parse(line: bytes) -> Mapping[str, object]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
