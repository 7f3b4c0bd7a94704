"""Replica groups of a node: a group that has lost a rank is started again while the others go on (node/quorum.py).

The agent decides who is a member. A group is lost with its first rank; once none of its ranks runs any more the others
are told, and its ranks are forked anew. It is a member again when it says that it is ready. Where no other group is a
member, or the cause is none that may pass, nothing is decided here, and the failure is one of all ranks.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainmaster.agent.diagnose import Outcome
from trainmaster.agent.leader import free_port
from trainmaster.agent.ranks import NotStarted, Rank, Starter
from trainmaster.agent.recovery import GROUP, Recovery
from trainmaster.agent.watch import Watch
from trainmaster.core.plan import GROUPS_VARIABLE, RESUMABLE_EXIT, Plan
from trainmaster.core.states import Reason
from trainmaster.node.quorum import Quorum, View

_FOLDER = "groups"
# Between the first group that says it cannot reach its peers and the decision of whom it is about: whoever is alive
# says the same within a look, and a process that has died is seen at once.
_BROKEN_S = 3.0


class Elastic:
    """The replica groups of one attempt."""

    def __init__(self, plan: Plan, starter: Starter, recovery: Recovery) -> None:
        self._plan, self._starter, self._recovery = plan, starter, recovery
        self._folder = Path(plan.folder) / _FOLDER
        self._quorum = Quorum(self._folder)
        self._each = plan.spec.resources.ranks // plan.groups
        self._view = View(epoch=0, members={}, lead=0)
        self._lost: dict[int, Outcome] = {}  # groups that are being ended, with why
        self._away: dict[int, int] = {}  # groups that are not members yet, with the start that they are of
        self._left: set[int] = set()  # groups whose ranks have all ended with 0
        self._broken_at: float | None = None

    def start(self, watch: Watch, more: Mapping[str, str]) -> list[Rank]:
        """Start every group: all of them are members."""
        self._lost, self._away, self._left, self._broken_at = {}, {}, set(), None
        members = dict.fromkeys(range(self._plan.groups), self._recovery.restart)
        self._publish(View(epoch=self._view.epoch + 1, members=members, lead=0))
        return [rank for group in members for rank in self._start(group, watch, more)]

    def look(
        self, ranks: list[Rank], stopped: set[int], watch: Watch, judge_failed: Callable[[Sequence[Rank]], Outcome]
    ) -> tuple[list[Rank], list[Rank]]:
        """Look after the groups. Returns ranks whose failure is one of all, and ranks that were started.

        The latter have taken the places of others in `ranks`.
        """
        for group in range(self._plan.groups):
            mine = self._ranks(ranks, group)
            codes = [rank.process.returncode for rank in mine]
            failed = [rank for rank in mine if rank.process.returncode not in (None, 0)]
            if group in self._lost or group in self._left:
                continue
            if set(codes) == {0}:
                self._leave(group)
            elif failed and (RESUMABLE_EXIT in codes or not self._lose(group, mine, judge_failed(failed))):
                return failed, []
            elif not failed and stopped & {rank.number for rank in mine}:
                number = min(stopped & {rank.number for rank in mine})
                self._lose(group, mine, self._outcome(number, "was stopped and does not go on"))
        self._look_for_broken(ranks)
        new = [rank for group in list(self._lost) for rank in self._replace(group, ranks, watch)]
        for group, start in list(self._away.items()):
            if self._quorum.is_ready(group, start):
                del self._away[group]
                self._publish(self._view.after_join(group, start))
        return [], new

    def _lose(self, group: int, mine: Sequence[Rank], failure: Outcome) -> bool:
        """End what is left of a group; False if it is not for the others to go on."""
        others = [member for member in self._view.members if member != group and member not in self._lost]
        if not others or self._view.finished or self._recovery.find_obstacle(failure) is not None:
            return False
        self._recovery.see(failure)
        self._lost[group] = failure
        self._away.pop(group, None)
        for rank in mine:
            rank.send(signal.SIGKILL)
        return True

    def _replace(self, group: int, ranks: list[Rank], watch: Watch) -> list[Rank]:
        """Start a lost group again once none of its ranks runs: one that still runs could still write."""
        if any(rank.process.poll() is None for rank in self._ranks(ranks, group)):
            return []
        failure = self._lost.pop(group)
        if group in self._view.members:
            self._publish(self._view.after_loss(group, at=self._recovery.failed_at))
        self._recovery.begin(failure, how=GROUP)
        self._recovery.check()
        try:
            new = self._start(group, watch, {})
        except NotStarted as error:
            # Its ranks keep the codes with which they ended, and the next look finds them failed.
            self._recovery.refuse(failure, f"rank {error.number} could not be started: {error.cause}")
            return []
        self._away[group] = self._recovery.restart
        for rank in new:
            ranks[rank.number - self._starter.numbers.start] = rank
        return new

    def _leave(self, group: int) -> None:
        """All ranks of a group have ended with 0. The run is over with the lead; without another the rest goes on."""
        self._left.add(group)
        self._away.pop(group, None)
        finished = self._view.finished or group == self._view.lead
        view = self._view.after_loss(group, at=None)
        self._publish(View(epoch=view.epoch, members=view.members, lead=view.lead, finished=finished))

    def _look_for_broken(self, ranks: list[Rank]) -> None:
        """Groups that cannot reach each other although all run: those that say nothing hang, and are ended."""
        broken = self._quorum.list_broken(self._view)
        if not broken or self._lost:
            self._broken_at = None
            return
        self._broken_at = self._broken_at or time.monotonic()
        if time.monotonic() - self._broken_at < _BROKEN_S:
            return
        self._broken_at = None
        silent = set(self._view.members) - broken
        for group in silent:
            mine = self._ranks(ranks, group)
            self._lose(group, mine, self._outcome(mine[0].number, "does not answer the other groups"))
        if not silent:
            view = self._view
            self._publish(View(epoch=view.epoch + 1, members=view.members, lead=view.lead, lost_at=time.time()))

    def _start(self, group: int, watch: Watch, more: Mapping[str, str]) -> list[Rank]:
        first = self._starter.numbers.start + group * self._each
        own = {"MASTER_PORT": str(free_port(self._plan.master_addr)), GROUPS_VARIABLE: str(self._folder)}
        variables = {**self._recovery.environment, **more, **own}
        return self._starter.start(watch, variables, range(first, first + self._each))

    def _publish(self, view: View) -> None:
        self._view = view
        self._quorum.publish(view)

    def _ranks(self, ranks: Sequence[Rank], group: int) -> Sequence[Rank]:
        return ranks[group * self._each : (group + 1) * self._each]

    def _outcome(self, number: int, what: str) -> Outcome:
        message = f"rank {number} of {self._plan.spec.resources.ranks} {what}"
        return Outcome(reason=Reason.COLLECTIVE_TIMEOUT, message=message, evidence={"rank": number})
