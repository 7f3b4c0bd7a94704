"""A simulated month of one job on many GPUs that fail: ETTR with and without each rung of recovery.

    PYTHONPATH=src python3 benchmarks/goodput_month.py
    PYTHONPATH=src python3 benchmarks/goodput_month.py --gpus 16384 --mttf 0.5 --months 20 --json

Failures come at random with the stated mean time between them. Each rung is added to the ones before it; then each is
taken away from all that are built. The history that would be recorded is booked by the goodput ledger itself, so that
the table shows its bins. Costs are options; the output says which of them are measured or limits of the agents, and
which are assumptions. Of elastic groups the time until a lost group is back is that of a restart.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from trainmaster.agent.leader import LOST_S
from trainmaster.agent.line import BEAT_S
from trainmaster.core.money.goodput.bins import Bin
from trainmaster.core.money.goodput.history import AttemptHistory, History, Mark, StageChange, to_us
from trainmaster.core.money.goodput.interval import MTTF_GPUS, MTTF_H, Costs, best_interval_s, expected_ettr
from trainmaster.core.money.goodput.ledger import book
from trainmaster.core.money.goodput.tally import Tally, fold
from trainmaster.core.states import Stage

START = datetime(2026, 6, 1, tzinfo=UTC)
MONTH_S = 30 * 86_400.0
RUNGS = ("none", "in place", "memory", "spares", "elastic")
# One H200, Llama 3.1 8B (docs/LOG.md, 2026-11-19, benchmarks/recovery.py; hold: estimate/data/estimate.toml).
MEASURED = ("restart", "load", "hold", "in_place")
LIMITS = ("spare_detect",)  # of our agents: what they wait at most


@dataclass
class Month:
    """One month as the records of its job: what happens is told as the trainer and the control plane would."""

    options: argparse.Namespace
    rungs: frozenset[str]
    dice: random.Random
    at: float = 0.0  # seconds since the start of the month
    step: int = 0
    stages: list[StageChange] = field(default_factory=list)
    attempts: list[AttemptHistory] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def run(self) -> Tally:
        self.begin_attempt(first=True)
        while self.at < MONTH_S:
            self.train(self.dice.expovariate(1 / (self.options.mttf * 3600)))
            if self.at < MONTH_S:
                self.fail()
        self.move(None)
        self.close_attempt()
        history = History(created=to_us(START), stages=self.stages, attempts=self.attempts, gpus=self.options.gpus,
                          trainer=True)  # fmt: skip
        ledger = book(history, now=to_us(START) + round(MONTH_S * 1e6))
        whole = Tally()
        for tally in fold(ledger, charges={}, priced=False, now=START).values():
            whole.add(tally)
        return whole

    def save_s(self) -> tuple[float, float]:
        """Time between two saves, and until one is complete: to memory with that rung, else to storage."""
        if "memory" in self.rungs:
            return self.options.memory_every, 0.0
        costs = Costs(hold_s=self.options.hold, write_s=self.options.write, restart_s=self.options.restart)
        every = self.options.every or best_interval_s(costs, mttf_s=self.options.mttf * 3600)
        return every, self.options.write

    def train(self, up_s: float) -> None:
        """Steps until the failure, with a save now and then; the step under way is lost."""
        end, (every, _) = min(self.at + up_s, MONTH_S), self.save_s()
        pace, saved_at = self.options.step, self.at
        while self.at + pace <= end:
            self.at, self.step = self.at + pace, self.step + 1
            self.tell("STEP", "metrics", step=self.step, step_s=pace, mfu=self.options.mfu)
            if self.at - saved_at >= every:
                hold = 0.0 if "memory" in self.rungs else self.options.hold
                saved_at, self.at = self.at, self.at + hold
                self.tell("CHECKPOINT", "saved", step=self.step, stall_s=hold)
        self.at = end

    def fail(self) -> None:
        """A process or a node is lost: the best rung there is brings the run back."""
        every, write = self.save_s()
        node = self.dice.random() < self.options.node_share
        lost_s = 0.0 if node and "elastic" in self.rungs else self.dice.uniform(0, every) + write
        self.step = max(0, self.step - round(lost_s / self.options.step))
        load = self.options.load if "memory" not in self.rungs else self.options.memory_load
        if node and "elastic" in self.rungs:
            # The others go on; the lost group's share of the GPUs is missing until it is back.
            self.at += self.options.pause + (self.options.restart - self.options.load + load) / self.options.groups
            self.resume(0.0)
        elif node and "spares" in self.rungs:
            # The ranks of all nodes are forked again, as in place; the spare's have imported already.
            self.at += self.options.spare_detect + self.options.in_place
            self.resume(load)
        elif not node and "in place" in self.rungs:
            self.at += self.options.in_place
            self.resume(load)
        else:
            self.at += self.options.detect
            self.move(Stage.RELEASING)
            self.close_attempt()
            self.move(Stage.QUEUED)
            self.at += self.options.queue if node else 0.0
            self.begin_attempt(first=False)

    def begin_attempt(self, *, first: bool) -> None:
        for stage in (Stage.PLACING, Stage.STAGING, Stage.RUNNING):
            self.move(stage)
        self.tell("PROJECT", "start")
        self.tell("PREFLIGHT", "start")
        self.at += self.options.check
        self.tell("PREFLIGHT", "end")
        self.at += self.options.restart - self.options.load
        self.resume(0.0 if first else self.options.load)

    def resume(self, load: float) -> None:
        self.at += load
        if load:
            self.tell("CHECKPOINT", "loaded", step=self.step, seconds=load)
        self.tell("TRAINING", "start", resumed_from=self.step)

    def close_attempt(self) -> None:
        started = self.marks[0].at if self.marks else None
        self.attempts.append(
            AttemptHistory(number=len(self.attempts) + 1, started=started, released=self.now(), marks=self.marks)
        )
        self.marks = []

    def move(self, stage: Stage | None) -> None:
        self.stages.append(StageChange(self.now(), stage))

    def tell(self, phase: str, event: str, **data: Any) -> None:
        self.marks.append(Mark(self.now(), phase, event, data))

    def now(self) -> int:
        return to_us(START) + round(min(self.at, MONTH_S) * 1e6)


def main() -> None:
    options = parse()
    rows = [simulate(options, _name(number), frozenset(RUNGS[1 : number + 1])) for number in range(len(RUNGS))]
    rows += [simulate(options, f"all but {rung}", frozenset(RUNGS[1:]) - {rung}) for rung in RUNGS[1:]]
    costs = Costs(hold_s=options.hold, write_s=options.write, restart_s=options.restart)
    every = options.every or best_interval_s(costs, mttf_s=options.mttf * 3600)
    planned = expected_ettr(costs, every_s=every, mttf_s=options.mttf * 3600)
    if options.json:
        print(json.dumps({"options": vars(options), "save_every_s": every, "formula_ettr": planned, "rungs": rows}))
        return
    print(f"{options.gpus:,} GPUs, a failure every {options.mttf:g} h, {options.months} simulated months of 30 days")
    print(f"saves to storage every {every:,.0f} s; by the formula of `plan`, which knows no queue: ETTR {planned:.2%}")
    for row in rows:
        worst = sorted(row["lost"].items(), key=lambda item: -item[1])[:4]
        parts = ", ".join(f"{name} {share:.2%}" for name, share in worst)
        print(f"{row['rung']:<22} ETTR {row['ettr']:.2%}   lost: {parts}")
    known = (*MEASURED, *LIMITS, "gpus", "mttf", "months", "json", "mfu")
    assumed = [name for name in vars(options) if name not in known]
    print(f"measured on one H200: {_list(options, MEASURED)}; limits of the agents: {_list(options, LIMITS)}")
    print(f"assumed: {_list(options, assumed)}")


def simulate(options: argparse.Namespace, name: str, rungs: frozenset[str]) -> dict[str, Any]:
    """The months with these rungs, summed."""
    whole = Tally()
    for seed in range(options.months):
        whole.add(Month(options=options, rungs=rungs, dice=random.Random(seed)).run())
    lost = {b.value: us / whole.total_us for b, us in whole.gpu_us.items() if us and b is not Bin.TRAINING}
    return {"rung": name, "ettr": whole.ettr, "runtime": whole.runtime, "lost": lost}


def _name(number: int) -> str:
    return f"{'+ ' if number else ''}{RUNGS[number]}"


def _list(options: argparse.Namespace, names: Any) -> str:
    return ", ".join(f"{name.replace('_', '-')} {getattr(options, name)}" for name in names)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpus", type=int, default=MTTF_GPUS)
    add("--mttf", type=float, default=MTTF_H, help="hours, of the whole job; 7.9 at 1,024 GPUs: arXiv 2410.21680")
    add("--months", type=int, default=1, help="months to simulate, each with a seed of its own")
    add("--step", type=float, default=20.0, help="seconds of a step")
    add("--mfu", type=float, default=0.4)
    add("--every", type=float, help="seconds between saves to storage; else Young/Daly")
    add("--hold", type=float, default=0.28, help="seconds that training loses to a save")
    add("--write", type=float, default=60.0, help="seconds until a save is complete in storage")
    add(
        "--restart",
        type=float,
        default=12.5,
        help="seconds from the kill of everything to the next step, load included",
    )
    add("--load", type=float, default=5.4, help="seconds of it for the checkpoint")
    add("--detect", type=float, default=120.0, help="seconds until a failure ends the attempt, where none recovers it")
    add("--spare-detect", type=float, default=LOST_S + BEAT_S, help="seconds until an agent that is silent is replaced")
    add("--queue", type=float, default=300.0, help="seconds until a replacement is there, without spares")
    add("--check", type=float, default=60.0, help="seconds of checks of a new attempt")
    add("--node-share", type=float, default=0.5, help="of the failures: a node is lost, not a process alone")
    add(
        "--in-place",
        type=float,
        default=2.8,
        help="seconds from the kill of a rank to its next step, without the load",
    )
    add("--memory-every", type=float, default=20.0, help="seconds between copies to a neighbour's memory")
    add("--memory-load", type=float, default=5.4, help="seconds to load from there: no faster than --load")
    add("--pause", type=float, default=5.0, help="seconds that the other groups stand still when one is lost")
    add("--groups", type=int, default=16, help="replica groups")
    add("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
