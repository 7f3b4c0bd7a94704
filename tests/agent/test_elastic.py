"""Replica groups: how a batch is divided, who is a member when, and a killed rank whose run does not stop."""

from __future__ import annotations

import random
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainmaster.agent.diagnose import Outcome
from trainmaster.agent.elastic import Elastic
from trainmaster.agent.processes import living
from trainmaster.agent.ranks import Rank
from trainmaster.agent.recovery import Recovery
from trainmaster.core import heartbeat
from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import SpecError, UsageError
from trainmaster.core.plan import EVENTS_FILE, PLAN_FILE, RESUMABLE_EXIT, Plan
from trainmaster.core.schema import build
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason
from trainmaster.node.emit import Emitter
from trainmaster.node.quorum import Quorum, View
from trainmaster.train.__main__ import find_quorum
from trainmaster.train.drill import plan as drill_plan
from trainmaster.train.drill import sample_log
from trainmaster.train.drill.judge import TOLERANCE
from trainmaster.train.parallel.division import Division
from trainmaster.train.parallel.rank_info import RankInfo

TRAIN: dict[str, Any] = {
    "model": {"layers": 1, "width": 16, "heads": 2, "kv_heads": 1, "ffn_width": 16},
    "optimizer": {"warmup_steps": 1},
    "steps": 100_000,
    "epoch_steps": 100_000,
    "batch_sequences": 8,
    "sequence_tokens": 16,
    "eval_sequences": 0,
    "device": "cpu",
    "checkpoint": {"every_steps": 5},
    "recovery": {"groups": 2},
}


# Division of a batch.


def test_every_sample_of_a_step_is_computed_once_whoever_is_left() -> None:
    dice = random.Random(0)
    for _ in range(500):
        groups, each, micro = dice.randint(1, 6), dice.randint(1, 4), dice.choice([None, 1, 2])
        batch = groups * each * (micro or 1) * dice.randint(1, 4)
        config = build(TrainConfig, {"batch_sequences": batch, "micro_sequences": micro})
        live = sorted(dice.sample(range(groups), dice.randint(1, groups)))
        taken: list[int] = []
        shares = []
        for group in live:
            for rank in range(each):
                number = group * each + rank
                whole = RankInfo(
                    rank=number, world_size=groups * each, local_rank=number, local_world_size=groups * each,
                    node_rank=0, nodes=1, master=None,
                )  # fmt: skip
                info = whole.in_group(groups)
                assert (info.group, info.rank, info.number, info.ranks) == (group, rank, number, groups * each)
                division = Division.of(config, info)
                passes = division.passes(division.share(live, group), rank)
                most = micro or batch // (groups * each)
                assert {len(part) for part in passes} == {most}, "no pass is larger than at full strength"
                taken += [sample for part in passes for sample in part]
            shares.append(len(passes))
        assert sorted(taken) == list(range(batch)) and max(shares) - min(shares) <= 1


# Members.


class Fleet:
    """Groups whose processes are made up, under a real Elastic."""

    def __init__(self, folder: Path, groups: int, each: int) -> None:
        train = {**TRAIN, "recovery": {"groups": groups, "tries": 100}, "batch_sequences": groups * each}
        spec = {"name": "a", "train": train, "resources": {"processes_per_node": groups * each}}
        plan = Plan(attempt="job.1", spec=parse_spec(spec), folder=str(folder), checkpoints="/none")
        self.numbers, self.killed, self.started = range(groups * each), list[int](), list[list[int]]()
        self.recovery = Recovery(plan, Emitter(folder / EVENTS_FILE))
        self.elastic = Elastic(plan, self, self.recovery)  # type: ignore[arg-type]
        self.quorum, self.each = Quorum(folder / "groups"), each
        self.dies_late = False  # what is killed still runs
        self.ranks = self.elastic.start(None, {})  # type: ignore[arg-type]

    def start(self, _: object, variables: Mapping[str, str], numbers: range) -> list[Rank]:
        self.started.append(list(numbers))
        ranks = [Rank(number, Made()) for number in numbers]
        for rank in ranks:
            rank.send = lambda _, rank=rank: self.dies_late or self.end(rank, -signal.SIGKILL)  # type: ignore[method-assign]
        return ranks

    def end(self, rank: Rank, code: int) -> None:
        self.killed.append(rank.number)
        rank.process.returncode = rank.process.returncode if rank.process.returncode is not None else code  # type: ignore[misc]

    def look(self, *, stopped: Sequence[int] = (), reason: Reason = Reason.CRASHED) -> list[int]:
        """The ranks whose failure is one of all."""

        def judge(failed: Sequence[Rank]) -> Outcome:
            return Outcome(reason=reason, message="killed", evidence={"rank": failed[0].number})

        failed, _ = self.elastic.look(self.ranks, set(stopped), None, judge)  # type: ignore[arg-type]
        return [rank.number for rank in failed]

    def ready(self, group: int) -> None:
        self.quorum.say_ready(group, self.recovery.restart)

    @property
    def view(self) -> View:
        return self.quorum.read()


class Made:
    """A process that only has a return code."""

    def __init__(self) -> None:
        self.pid, self.returncode = 0, None

    def poll(self) -> int | None:
        return self.returncode


@pytest.fixture(autouse=True)
def slotted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose signals can be made up: a slotted class takes no other method."""
    monkeypatch.setattr(f"{__name__}.Rank", type("Rank", (Rank,), {"__slots__": ("send",)}))


def test_a_lost_group_is_ended_replaced_and_a_member_again_when_it_is_ready(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, groups=2, each=2)
    first = fleet.view
    assert (dict(first.members), first.lead) == ({0: 0, 1: 0}, 0)
    fleet.end(fleet.ranks[1], -9)
    assert fleet.look() == []
    assert 0 in fleet.killed and not {2, 3} & set(fleet.killed), "the rest of its group, and no other"
    lost = fleet.view
    assert (dict(lost.members), lost.lead, lost.epoch) == ({1: 0}, 1, first.epoch + 1) and lost.lost_at
    assert fleet.started[-1] == [0, 1] and fleet.look() == []
    fleet.ready(0)
    assert fleet.look() == []
    back = fleet.view
    assert (dict(back.members), back.lead, back.epoch) == ({0: 1, 1: 0}, 1, first.epoch + 2), "the lead stays"
    assert fleet.recovery.restart == 1


def test_a_group_is_replaced_only_when_none_of_its_ranks_runs(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, groups=2, each=2)
    fleet.dies_late, before = True, fleet.view
    fleet.end(fleet.ranks[0], -9)
    assert fleet.look() == [] and fleet.view == before and len(fleet.started) == 2, "rank 1 could still write"
    fleet.end(fleet.ranks[1], -9)
    assert fleet.look() == [] and dict(fleet.view.members) == {1: 0} and fleet.started[-1] == [0, 1]


def test_what_no_other_group_can_make_good_is_a_failure_of_all(tmp_path: Path) -> None:
    both = Fleet(tmp_path / "both", groups=2, each=1)
    both.end(both.ranks[0], -9)
    assert both.look() == []
    both.end(both.ranks[1], -9)
    assert both.look() == [1], "group 0 is away"
    full = Fleet(tmp_path / "full", groups=2, each=1)
    full.end(full.ranks[0], 1)
    assert full.look(reason=Reason.DISK_FULL) == [0], "a cause that does not pass"
    saved = Fleet(tmp_path / "saved", groups=2, each=1)
    saved.end(saved.ranks[0], RESUMABLE_EXIT)
    assert saved.look() == [0], "a stop is for all"


def test_a_stopped_or_silent_group_is_lost_and_a_group_that_ended_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmaster.agent.elastic._BROKEN_S", 0.0)
    fleet = Fleet(tmp_path, groups=3, each=1)
    assert fleet.look(stopped=[2]) == [] and fleet.started[-1] == [2]
    assert dict(fleet.view.members) == {0: 0, 1: 0}
    fleet.quorum.say_broken(fleet.view, 1)
    assert fleet.look() == [] and fleet.started[-1] == [0], "0 runs and has not said that it lost its peers"
    assert (dict(fleet.view.members), fleet.view.lead) == ({1: 0}, 1)
    before = fleet.view
    fleet.quorum.say_broken(before, 1)
    fleet.look()
    assert (fleet.view.epoch, fleet.view.members) == (before.epoch + 1, before.members), "none is silent: tried again"
    fleet.end(fleet.ranks[1], 0)
    assert fleet.look() == [] and fleet.view.finished, "the lead has made the last step"


def test_whatever_dies_when_members_are_groups_that_run_and_epochs_grow(tmp_path: Path) -> None:
    dice = random.Random(1)
    for case in range(10):
        fleet = Fleet(tmp_path / str(case), groups=dice.randint(2, 4), each=dice.randint(1, 2))
        epoch = fleet.view.epoch
        for _ in range(30):
            if dice.random() < 0.5:
                fleet.end(dice.choice(fleet.ranks), -9)
            else:
                for group, start in list(fleet.elastic._away.items()):
                    fleet.quorum.say_ready(group, start)
            if fleet.look():
                fleet.ranks = fleet.elastic.start(None, {})  # type: ignore[arg-type]
            view = fleet.view
            assert view.epoch >= epoch and view.members and view.lead in view.members
            epoch = view.epoch
            for group in view.members:
                codes = {rank.process.returncode for rank in fleet.ranks[group * fleet.each : (group + 1) * fleet.each]}
                assert codes == {None}, "a member has a rank that is dead"


def test_the_step_of_an_epoch_is_known_when_all_have_come(tmp_path: Path) -> None:
    quorum, view = Quorum(tmp_path), View(epoch=3, members={0: 0, 2: 1}, lead=0)
    quorum.publish(view)
    assert quorum.read() == view
    quorum.say_at(view, 0, 7)
    assert quorum.steps(view) is None
    quorum.say_at(view, 2, -1)
    assert quorum.steps(view) == {0: 7, 2: -1}


# What is refused.


@pytest.mark.parametrize(
    ("train", "resources", "says"),
    [
        ({}, {"processes_per_node": 3}, "2 does not divide 3 ranks; use 1"),
        ({}, {"nodes": 2, "processes_per_node": 1}, "groups are ranks of one node so far, and the job has 2"),
        ({"recovery": {"groups": 2, "in_place": False}}, {}, "come back in the same attempt"),
        ({"parallel": {"sharding": "hybrid"}}, {}, "a copy of its own already"),
        ({"checkpoint": {"memory": {"use": "on"}}}, {}, "groups save to disk and remote only"),
    ],
)
def test_what_groups_cannot_do_is_refused(train: dict[str, Any], resources: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        parse_spec({"name": "a", "train": {**TRAIN, **train}, "resources": {"processes_per_node": 4, **resources}})


def test_groups_need_our_agent_and_no_drill() -> None:
    info = RankInfo(rank=0, world_size=2, local_rank=0, local_world_size=2, node_rank=0, nodes=1, master=None)
    assert find_quorum(info, {}) is None
    with pytest.raises(UsageError, match="by our agent"):
        find_quorum(info.in_group(2), {})
    with pytest.raises(UsageError, match="a drill kills all ranks together"):
        drill_plan.make(build(TrainConfig, TRAIN), processes=2, other=0, kills=1, seed=0)


# A whole run.


@pytest.mark.matrix(one_in=10, of="acceptance, collectives and jobs of real ranks")
@pytest.mark.spawns
def test_a_run_goes_on_without_the_group_that_was_killed_and_takes_it_back(node: Any) -> None:
    """Rank 1 dies in a step of the group that leads: the other makes it alone, leads, and is joined again."""
    samples = node.folder / "samples"
    node.env |= {
        "TRAINMASTER_KILL_AT": "step:start @6;",
        "TRAINMASTER_KILL_RANK": "1;",
        "TRAINMASTER_WITNESS": str(samples),
        "TRAINMASTER_CHECK_EVENTS": "1",
    }
    path = node.plan(ranks=4, train=TRAIN)
    node.start(path)
    node.until((node.folder / EVENTS_FILE).exists, what="events", limit_s=120.0)
    node.until(lambda: "RECOVERY done" in node.names(), what="full strength", limit_s=120.0)
    (node.folder / "stop").write_text("user_cancelled: over\n")
    record = node.over(limit_s=120.0)
    log = "".join((node.folder / f"rank-{rank}.log").read_text()[-2000:] for rank in range(4))
    assert record.exit_codes == {str(rank): RESUMABLE_EXIT for rank in range(4)} and record.resumable, log

    def named(phase: str, event: str) -> list[dict[str, Any]]:
        return [item["data"] for item in node.events() if (item["phase"], item["event"]) == (phase, event)]

    (begun,), (survived,), (done,) = (named("RECOVERY", event) for event in ("start", "survived", "done"))
    back = f"2 of 2 groups train again, after step {done['step'] - 1}"
    assert any(back in (node.folder / f"rank-{rank}.log").read_text() for rank in (2, 3)), "said by the lead"
    assert (begun["how"], begun["rank"], begun["reason"]) == ("group", 1, "crashed")
    assert (survived["groups"], survived["of"], survived["step"]) == (1, 2, 7)
    assert set(survived["parts"]) == {"seen", "meet", "copy", "step"}
    assert (done["how"], done["tier"], done["resumed_from"]) == ("group", "peer", done["step"] - 1)
    assert len(named("START", "done")) == len(named("TRAINING", "start")) == 1, "the others did not start again"
    told = {data["step"]: data["loss"] for data in named("STEP", "metrics")}
    last = max(told)
    assert sorted(told) == list(range(1, last + 1)) and last >= done["step"]
    assert len(named("STEP", "metrics")) == len(told), "each step is told once"
    sums = sample_log.read_groups(samples)
    assert [step for step, _ in sums] == list(range(1, last + 1)), "each step once"
    for (step, _), rows in sums.items():
        assert sorted(rows) == list(range((step - 1) * 8, step * 8)) and not any("+" in row for row in rows.values())
    saved = max(data["step"] for data in named("CHECKPOINT", "saved"))
    assert saved == last and (node.checkpoints / f"step-{last:08d}").is_dir()
    mark = Plan.from_json((node.folder / PLAN_FILE).read_text()).mark
    node.until(lambda: not living(mark), what="the end of every process")
    assert_same_curve(node, told, sums, last)


@pytest.mark.spawns
@pytest.mark.matrix(one_in=24, of="runs of minutes on several machines")
def test_groups_roll_back_together(node: Any) -> None:
    """The lead loads the checkpoint and the other group copies it; both are in the same state after it."""
    watch = {"max_skipped": 1, "spike_history": 8, "loss_spike": 0.2, "grad_spike": 1.5, "max_rollbacks": 1000}
    train = {**TRAIN, "steps": 30, "epoch_steps": 30, "watch": watch}
    code, said = node.run(node.plan(ranks=2, train=train))
    assert code == 0, said + (node.folder / "rank-1.log").read_text()
    back = [item["data"] for item in node.events() if (item["phase"], item["event"]) == ("WATCH", "rollback")]
    assert back and all(data["to_step"] % 5 == 0 for data in back)
    first, second = (heartbeats(node.folder / f"rank-{rank}.log") for rank in range(2))
    assert first == second and first[-1][0] == 30


def heartbeats(log: Path) -> list[tuple[int, float, float]]:
    """Step, loss and norm of every heartbeat of a group's first rank."""
    beats = [beat for line in log.read_text().splitlines() if (beat := heartbeat.parse(line))]
    return [(beat.step, beat.loss, beat.grad_norm) for beat in beats if beat.at == "train"]


def assert_same_curve(
    node: Any, told: Mapping[int, float], sums: Mapping[tuple[int, int], Mapping[int, str]], last: int
) -> None:
    """Losses and samples are those of one rank alone, which nobody disturbed."""
    node.folder, node.checkpoints = node.folder.with_name("alone"), node.checkpoints.with_name("alone")
    for name in ("TRAINMASTER_KILL_AT", "TRAINMASTER_KILL_RANK"):
        del node.env[name]
    node.env["TRAINMASTER_WITNESS"] = str(node.folder / "samples")
    alone = {**TRAIN, "steps": last, "epoch_steps": last, "recovery": {}}
    # The schedule is that of the longer run.
    alone["optimizer"] = {"warmup_steps": 1, "decay_steps": TRAIN["steps"]}
    code, said = node.run(node.plan(attempt="job.2", train=alone))
    assert code == 0, said
    losses = {item["data"]["step"]: item["data"]["loss"] for item in node.events() if item["phase"] == "STEP"}
    assert told == pytest.approx(losses, rel=TOLERANCE)
    samples = sample_log.read(node.folder / "samples")
    assert {step: dict(rows) for (step, _), rows in sums.items()} == samples
