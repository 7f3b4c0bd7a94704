"""State of an attempt on several machines with a spare, from what each of them says: pure, without a machine."""

from __future__ import annotations

import pytest

from trainmaster.core.attempt import FileSize, Poll
from trainmaster.core.errors import Unreachable
from trainmaster.core.plan import ExitRecord
from trainmaster.core.states import Reason, TargetState
from trainmaster.targets._node_files import find_stream, rename
from trainmaster.targets.ssh.combine import combine
from trainmaster.targets.ssh.session import Reply

HANDLE = {"attempt": "job.1", "nodes": ["n1", "n2", "n3"], "spares": 1, "submitted": True}
RUNS, DONE = Poll(state=TargetState.RUNNING), Poll(state=TargetState.SUCCEEDED)
LOST = Poll(state=TargetState.LOST, note="no answer")
WAITS = Poll(state=TargetState.UNKNOWN, note="no answer yet")
FAILED = Poll(
    state=TargetState.FAILED,
    exit=ExitRecord(attempt="job.1", ok=False, ended_at="2026-11-17T00:00:00Z", reason=Reason.CHECK_FAILED),
)
REPLACED = [0, 2]


@pytest.mark.parametrize(
    ("polls", "members", "state"),
    [
        ((RUNS, RUNS, RUNS), None, TargetState.RUNNING),
        ((RUNS, LOST, RUNS), None, TargetState.RUNNING),  # node 0 puts the spare in its place
        ((RUNS, WAITS, RUNS), None, TargetState.RUNNING),
        ((RUNS, LOST, LOST), None, TargetState.LOST),  # no spare is left
        ((RUNS, LOST, FAILED), None, TargetState.LOST),
        ((LOST, RUNS, RUNS), None, TargetState.LOST),  # nobody leads
        ((RUNS, FAILED, RUNS), None, TargetState.FAILED),  # its pre-flight, before there was a group
        ((RUNS, RUNS, FAILED), None, TargetState.RUNNING),  # a spare that failed its pre-flight is none
        ((RUNS, LOST, RUNS), REPLACED, TargetState.RUNNING),
        ((RUNS, FAILED, RUNS), REPLACED, TargetState.RUNNING),  # what a replaced machine says does not count
        ((RUNS, LOST, LOST), REPLACED, TargetState.LOST),
        ((DONE, LOST, DONE), REPLACED, TargetState.SUCCEEDED),
        ((DONE, DONE, RUNS), None, TargetState.SUCCEEDED),  # a spare is not waited for
        ((RUNS, FAILED, RUNS), [0, 9], TargetState.FAILED),  # no machine of the attempt: not believed
        ((RUNS, FAILED, RUNS), [2, 2], TargetState.FAILED),
    ],
)
def test_a_lost_machine_is_the_matter_of_node_0_while_a_spare_waits(
    polls: tuple[Poll, ...], members: list[int] | None, state: TargetState
) -> None:
    replies = [Reply(result={"members": members}, body=b""), Unreachable("gone"), Unreachable("gone")]
    assert combine(polls, HANDLE, replies).state is state


def test_a_spare_has_its_own_name_for_the_log_of_a_rank_that_it_took_over() -> None:
    of_node = rename(FileSize(name="rank-1.log", size_bytes=1), 1, nodes=2).name
    of_spare = rename(FileSize(name="rank-1.log", size_bytes=1), 2, nodes=2).name
    assert (of_node, of_spare) == ("rank-1.log", "rank-1.node-2.log")
    assert find_stream(of_node, nodes=3, ranks_per_node=1) == (1, "rank-1.log")
    assert find_stream(of_spare, nodes=3, ranks_per_node=1) == (2, "rank-1.log")
