"""What a drill will do, before it does it: what it changes, where it strikes, and that the seed decides."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from trainmaster.core.config.managed import ManagedConfig
from trainmaster.core.config.recovery import RecoveryConfig
from trainmaster.core.config.train import CheckpointConfig, WatchConfig
from trainmaster.core.errors import UsageError
from trainmaster.core.results import Verdict
from trainmaster.train.drill import failpoints
from trainmaster.train.drill import plan as plans
from trainmaster.train.drill.plan import DrillPlan
from trainmaster.train.drill.record import Attempt
from trainmaster.train.drill.run import Drill

from .runs import tiny

CONFIG = tiny(steps=5000, epoch_steps=500, batch_sequences=12, eval_sequences=12, checkpoint={"every_steps": 500})


def make(kills: int = 4, seed: int = 0, **changes: object) -> DrillPlan:
    wanted = {"processes": 4, "other": None, **changes}
    return plans.make(CONFIG, kills=kills, seed=seed, **wanted)  # type: ignore[arg-type]


def test_a_long_run_is_cut_short_and_each_cut_is_told() -> None:
    plan = make()
    assert (plan.config.steps, plan.config.checkpoint.every_steps, plan.config.epoch_steps) == (40, 5, 10)
    assert "steps 40 (the config has 5000)" in plan.changes
    assert plan.config.model == CONFIG.model
    assert plan.config.data == CONFIG.data


def test_nobody_finds_the_drill_among_their_runs() -> None:
    config = replace(
        CONFIG,
        watch=WatchConfig(tensorboard="boards", wandb_project="ours"),
        checkpoint=CheckpointConfig(managed=ManagedConfig(namespace="x", s3="s3://bucket/x")),
    )
    plan = plans.make(config, processes=1, other=0, kills=1, seed=0)
    assert (plan.config.watch.tensorboard, plan.config.watch.wandb_project) == (None, None)
    assert plan.config.checkpoint.managed is None
    assert {"watch.tensorboard left out", "watch.wandb_project left out"} < set(plan.changes)


def test_what_the_user_stated_stays() -> None:
    plan = make(given={"steps", "checkpoint.every_steps"})
    assert (plan.config.steps, plan.config.checkpoint.every_steps) == (5000, 500)
    assert not any(change.startswith(("steps", "checkpoint.every_steps")) for change in plan.changes)


def test_too_few_steps_are_refused_with_the_number_to_use() -> None:
    config = tiny(steps=8, checkpoint={"every_steps": 4})
    with pytest.raises(UsageError, match="use 16"):
        plans.make(config, processes=1, other=0, kills=2, seed=0, given={"steps", "checkpoint.every_steps"})


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kills", [1, 2, 4, 9])
def test_kills_come_in_order_with_room_before_and_after(kills: int, seed: int) -> None:
    plan = make(kills=kills, seed=seed)
    planned = [attempt.kill for attempt in plan.attempts if attempt.kill]
    steps = [kill.step for kill in planned]
    assert len(planned) == kills
    assert steps == sorted(steps)
    assert steps[0] > 2 * 5
    assert steps[-1] <= 40 - 5
    assert {kill.place for kill in planned} <= set(failpoints.FAILPOINTS)
    assert planned[0].place.startswith("save:")
    assert [attempt.ranks for attempt in plan.attempts] == [4] * kills + [2]
    assert sum(attempt.damage for attempt in plan.attempts) == 1
    assert not plan.attempts[0].damage
    assert make(kills=kills, seed=seed) == plan


def test_another_seed_strikes_elsewhere() -> None:
    assert len({make(seed=seed).attempts for seed in range(10)}) == 10


def test_the_other_number_of_ranks_must_share_the_batch() -> None:
    assert plans.pick_other(CONFIG, 4, limit=8) == 2
    assert plans.pick_other(CONFIG, 3, limit=6) == 1
    assert plans.pick_other(CONFIG, 1, limit=2) == 2
    assert plans.pick_other(CONFIG, 1, limit=1) is None  # one GPU: no other number there
    assert make(other=0).attempts[-1].ranks == 4
    assert make(other=3).attempts[-1].ranks == 3


@pytest.mark.parametrize(
    ("limit", "other", "verdict"),
    [(1, None, Verdict.SKIP), (None, 0, Verdict.SKIP), (3, None, Verdict.ERROR)],
    ids=["one GPU", "left out", "three GPUs that cannot share the batch"],
)
def test_another_number_of_ranks_is_left_out_where_one_gpu_cannot_have_it(
    limit: int | None, other: int | None, verdict: Verdict, tmp_path: Path
) -> None:
    config = tiny(steps=5000, batch_sequences=1, eval_sequences=0)
    plan = plans.make(config, processes=1, other=other, kills=1, seed=0, limit=limit)
    whole = Attempt(ranks=1, codes=(0,), events=(), samples={})
    assert Drill(plan, tmp_path, lambda *_: None)._other_ranks(whole, []).verdict is verdict


def test_kills_in_place_are_of_one_attempt_and_the_last_is_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    *ranks, agent = make().in_place
    assert [kill.place for kill in ranks] == ["save:shards", "step:backward", "step:updated"]
    assert agent.agent and agent.step > ranks[-1].step > ranks[0].step and ranks[1].step == 0
    for name, value in plans.join_kills((*ranks, agent)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(failpoints, "_step", 99)
    monkeypatch.setattr(failpoints, "_reached", {})
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    for restart, kill in enumerate((*ranks, agent)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        monkeypatch.setenv("RANK", str(kill.rank or 0))
        for place in failpoints.FAILPOINTS:
            failpoints.reach(place)
        assert killed == [(os.getppid() if kill.agent else os.getpid(), signal.SIGKILL)], kill
        killed.clear()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "4")
    failpoints.reach("step:start")
    assert killed == [], "the start after the last kill is left alone"


def test_without_recovery_in_place_none_is_drilled() -> None:
    config = replace(CONFIG, recovery=RecoveryConfig(in_place=False))
    plan = plans.make(config, processes=1, other=0, kills=1, seed=0)
    assert plan.in_place == ()
    assert (
        Drill(plan, Path())._in_place(Attempt(ranks=1, codes=(0,), events=(), samples={}), []).verdict is Verdict.SKIP
    )
