"""Recovery in place: whether the ranks are started again inside the attempt, and what they are told.

Only ranks of our own trainer, which resume by themselves. On several nodes the agents agree first (group.py), and that
of node 0 decides.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster import checks
from trainmaster.agent import preflight
from trainmaster.agent.diagnose import Outcome
from trainmaster.core.files import open_plain
from trainmaster.core.plan import EVENTS_FILE, START_VARIABLE, Plan
from trainmaster.core.results import judge_overall
from trainmaster.core.states import Reason
from trainmaster.node.emit import Emitter
from trainmaster.node.host import Host

IN_PLACE, SPARE, GROUP = "in_place", "spare", "group"
SILENT_S = "silent_s"  # of the evidence of a lost node
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
    return train is not None and train.recovery.in_place and plan.spec.container is None and sys.platform == "linux"


class Recovery:
    """Recoveries of one attempt on this node."""

    def __init__(self, plan: Plan, events: Emitter) -> None:
        self._plan, self._events = plan, events
        self._file = Path(plan.folder) / EVENTS_FILE
        self._possible = is_possible(plan)
        self._read_to = 0
        self._failed_at = 0.0
        self._parts: dict[str, float] = {}
        self._how = IN_PLACE
        self.restart = 0
        self.without_save = 0

    @property
    def failed_at(self) -> float:
        """When the last failure was seen, in seconds since 1970."""
        return self._failed_at

    def see(self, failure: Outcome) -> None:
        """A failure was seen just now. The loss of a node began when it was last heard: part `silence`."""
        silent_s = failure.evidence.get(SILENT_S)
        self._failed_at, self._parts = time.time() - (silent_s or 0.0), {}
        if silent_s is not None:
            self.add_part("silence", silent_s)

    def is_passing(self, failure: Outcome) -> bool:
        """Whether the cause may pass, and the user does not want to look at it first."""
        reason = failure.reason
        return reason in PASSING and self._plan.spec.limits.retry.get(reason.value, True)

    def find_obstacle(self, failure: Outcome, *, replaced: bool = False) -> str | None:
        """Why no recovery in place may follow a failure; None: it may. `replaced`: the node that had it is gone."""
        train = self._plan.spec.train
        if not self._possible or train is None:
            return "it cannot be recovered in place"
        if not self.is_passing(failure) and not (replaced and failure.reason is Reason.NODE_LOST):
            return f"{failure.reason} does not pass by itself, or limits.retry refuses it"
        if self._has_saved():
            self.without_save = 0
        if self.without_save >= train.recovery.tries:
            return f"{self.without_save} recoveries in a row without a new checkpoint (train.recovery.tries)"
        return None

    def may_follow(self, failure: Outcome) -> bool:
        """Whether a recovery in place may follow, on a job of one node; an event says why a rank is not tried again."""
        obstacle = self.find_obstacle(failure)
        if obstacle is not None and self._possible and self.is_passing(failure):
            self.refuse(failure, obstacle)
        return obstacle is None

    def refuse(self, failure: Outcome, why: str) -> None:
        """Say why the attempt ends although it was to be recovered."""
        self._events.emit("RECOVERY", "refused", reason=str(failure.reason), message=failure.message, why=why)

    def begin(self, failure: Outcome, *, how: str = IN_PLACE, replaced: Mapping[str, str] | None = None) -> None:
        """Count and tell of a recovery; `replaced` are nodes and the hosts that take their place."""
        assert failure.reason is not None
        self.restart, self.without_save, self._how = self.restart + 1, self.without_save + 1, how
        self._events.emit(
            "RECOVERY",
            "start",
            how=how,
            restart=self.restart,
            without_save=self.without_save,
            rank=failure.evidence.get("rank"),
            reason=failure.reason.value,
            message=failure.message,
            replaced=dict(replaced or {}),
        )

    def check(self) -> Outcome | None:
        """The ranks are gone: look at the GPUs. An Outcome says that none may start here again."""
        self.add_part("stop", time.time() - self._failed_at - self._parts.get("silence", 0.0))
        began = time.time()
        refusal = self._check_gpus()
        self.add_part("check", time.time() - began)
        return refusal

    def add_part(self, name: str, seconds: float) -> None:
        self._parts[name] = round(seconds, 3)

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of ranks that are started now."""
        if self._plan.spec.train is None:
            return {}
        told: dict[str, Any] = {"at": time.time()}
        if self._failed_at:
            told["recovery"] = {"how": self._how, "failed_at": self._failed_at, "parts": self._parts}
        return {START_VARIABLE: json.dumps(told), "TORCHELASTIC_RESTART_COUNT": str(self.restart)}

    def _has_saved(self) -> bool:
        """Whether a checkpoint was committed since the last look, as the trainer's events say."""
        try:
            with os.fdopen(open_plain(self._file, os.O_RDONLY), "rb") as file:
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
