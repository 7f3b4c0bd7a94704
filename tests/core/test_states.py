"""Moves between stages, and what every reason must say."""

from __future__ import annotations

import pytest

from trainmaster.core.states import Reason, Stage, Status, TargetState, may_move, status_in


def test_forward_only_until_released() -> None:
    assert may_move(Stage.QUEUED, Stage.PLACING)
    assert may_move(Stage.STAGING, Stage.RELEASING)
    assert not may_move(Stage.RUNNING, Stage.STAGING)
    assert not may_move(Stage.RUNNING, Stage.RUNNING)
    assert not may_move(Stage.RUNNING, Stage.QUEUED), "a new attempt starts only after the old one was released"


def test_only_releasing_leads_back_to_queued() -> None:
    assert [stage for stage in Stage if may_move(stage, Stage.QUEUED)] == [Stage.RELEASING]


@pytest.mark.parametrize("stage", list(Stage))
def test_every_stage_has_a_status_that_is_not_final(stage: Stage) -> None:
    assert not status_in(stage).final


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_a_rule(reason: Reason) -> None:
    assert reason.rule.action


def test_cannot_reach_is_not_over() -> None:
    assert not TargetState.UNKNOWN.over
    assert TargetState.LOST.over
    assert [status for status in Status if status.final] == [Status.COMPLETED, Status.FAILED, Status.CANCELLED]
