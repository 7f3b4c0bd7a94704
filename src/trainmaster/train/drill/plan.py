"""Plan of a drill: the run derived from the user's config, and its kills. Pure and printable."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import UsageError
from trainmaster.node import torch_install
from trainmaster.train.drill import failpoints

STEPS = 40  # enough for eight saves, and minutes at most
_SAVES = 8
_EPOCHS = 4
_TRACKERS = ("tensorboard", "wandb_project", "mlflow_uri")  # where people look at runs, not at drills


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL to one rank, or to all, when it first reaches the failpoint after `step` steps."""

    place: str
    step: int
    rank: int | None  # None: all of them at once, as when a node or its power goes
    agent: bool = False  # the agent is killed instead, when this rank is there

    @property
    def environment(self) -> dict[str, str]:
        only = {} if self.rank is None else {failpoints.KILL_RANK_VARIABLE: str(self.rank)}
        return {failpoints.KILL_AT_VARIABLE: self.moment, **only}

    @property
    def moment(self) -> str:
        when = "1" if self.place.startswith("load:") else f"@{self.step}"
        return f"{failpoints.AGENT if self.agent else ''}{self.place} {when}"

    def __str__(self) -> str:
        who = "the agent" if self.agent else "every rank" if self.rank is None else f"rank {self.rank}"
        when = "resuming" if self.place.startswith("load:") else f"after step {self.step}"
        return f"{who} at {self.place}, {when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillAttempt:
    """One attempt of the run: on how many ranks, how it is to die, and what is done to the checkpoints before it."""

    ranks: int
    kill: Kill | None
    damage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPlan:
    """The run and its attempts; `changes` says in words what is not as in the user's config."""

    config: TrainConfig
    changes: tuple[str, ...]
    attempts: tuple[DrillAttempt, ...]
    other: int | None  # the other number of ranks; None: none was wanted or possible
    other_wanted: bool
    limit: int | None  # ranks this machine takes, one per GPU; None: CPUs, any number
    seed: int
    in_place: tuple[Kill, ...] = ()  # of one attempt that goes on after each of them but the last, which is its agent's


def make(
    config: TrainConfig,
    *,
    processes: int,
    other: int | None,
    kills: int,
    seed: int,
    limit: int | None = None,
    given: Collection[str] = (),
) -> DrillPlan:
    """Plan a drill.

    `other` is the other number of ranks, 0 for none; `limit` the most this machine takes; `given` names what the user
    stated, which stays as it is.
    """
    if config.recovery.groups > 1:
        raise UsageError("train.recovery.groups: a drill kills all ranks together; leave it out for the drill")
    short, changes = shorten(config, given)
    size = pick_other(short, processes, limit=limit or 2 * processes) if other is None else (other or None)
    least = 4 * short.checkpoint.every_steps
    if short.steps < least:
        raise UsageError(
            f"steps: {short.steps} are too few to be killed in with a save every {short.checkpoint.every_steps}; "
            f"use {least}"
        )
    dice = random.Random(seed)  # noqa: S311 (a drill, not a key)
    return DrillPlan(
        config=short,
        changes=changes,
        attempts=tuple(_plan_attempts(short, processes=processes, other=size, kills=kills, dice=dice)),
        other=size,
        other_wanted=other != 0,
        limit=limit,
        seed=seed,
        in_place=_plan_in_place(short, processes=processes, dice=random.Random(seed)),  # noqa: S311 (likewise)
    )


def shorten(config: TrainConfig, given: Collection[str]) -> tuple[TrainConfig, tuple[str, ...]]:
    """The same run, short, saved often and told in full; and each change in words. What was `given` stays."""
    changes: list[str] = []

    def cut(path: str, now: int, to: int) -> int:
        if path in given or now == to:
            return now
        changes.append(f"{path} {to} (the config has {now})")
        return to

    steps = cut("steps", config.steps, min(config.steps, STEPS))
    every = cut(
        "checkpoint.every_steps",
        config.checkpoint.every_steps,
        min(config.checkpoint.every_steps, max(1, steps // _SAVES)),
    )
    keep = cut("checkpoint.keep", config.checkpoint.keep, max(config.checkpoint.keep, 3))
    epoch = cut("epoch_steps", config.epoch_steps, min(config.epoch_steps, max(1, steps // _EPOCHS)))
    warm = cut("optimizer.warmup_steps", config.optimizer.warmup_steps, min(config.optimizer.warmup_steps, steps // 10))
    log = cut("log_every_steps", config.log_every_steps, 1)
    memory = replace(
        config.checkpoint.memory,
        every_steps=cut(
            "checkpoint.memory.every_steps",
            config.checkpoint.memory.every_steps,
            min(config.checkpoint.memory.every_steps, every),
        ),
    )
    if config.checkpoint.managed is not None:
        changes.append("checkpoint.managed left out: a drill keeps to places of its own")
    trackers = [name for name in _TRACKERS if getattr(config.watch, name) is not None]
    changes += [f"watch.{name} left out" for name in trackers]
    checkpoint = replace(config.checkpoint, every_steps=every, keep=keep, memory=memory, managed=None)
    short = replace(
        config,
        steps=steps,
        epoch_steps=epoch,
        log_every_steps=log,
        optimizer=replace(config.optimizer, warmup_steps=warm),
        checkpoint=checkpoint,
        watch=replace(config.watch, tensorboard=None, wandb_project=None, mlflow_uri=None),
    )
    return short, tuple(changes)


def count_gpus() -> int:
    """As many ranks as this node's GPUs take."""
    count = torch_install.count_gpus()
    if count is None:
        import torch.cuda  # takes seconds

        count = torch.cuda.device_count()
    return count


def pick_other(config: TrainConfig, processes: int, *, limit: int) -> int | None:
    """Another number of ranks that can share this batch: half of them, else the nearest; None where there is none."""
    wanted = [processes // 2, *range(processes - 1, 0, -1), *range(processes + 1, limit + 1)]
    fits = (count for count in wanted if 0 < count <= limit and not list(config.faults_on(count)))
    return next((count for count in fits if count != processes), None)


def _plan_attempts(
    config: TrainConfig, *, processes: int, other: int | None, kills: int, dice: random.Random
) -> Sequence[DrillAttempt]:
    """Kills on as many ranks as at the start, then one more start on another number, which runs to the end.

    In this order, because from the first step on another number of ranks losses are close and no longer bit-equal.
    """
    every, attempts = config.checkpoint.every_steps, []
    first, last = 2 * every + 1, config.steps - every  # two checkpoints to fall back on; room for what follows
    for number, place in enumerate(_places(config, kills, dice)):
        step = first + int((last - first) * (number + dice.uniform(0.1, 0.9)) / kills)
        rank = dice.choice([None, 0] if place in failpoints.FIRST_RANK else [None, *range(processes)])
        # Before the last resume on as many ranks; with one kill, before the only one.
        damage = number == max(1, kills - 1)
        attempts.append(DrillAttempt(ranks=processes, kill=Kill(place=place, step=step, rank=rank), damage=damage))
    attempts.append(DrillAttempt(ranks=other or processes, kill=None, damage=kills == 1))
    return attempts


def _plan_in_place(config: TrainConfig, *, processes: int, dice: random.Random) -> tuple[Kill, ...]:
    """Kills of one attempt: inside a save, again in the first step after it, in a later step, and the agent."""
    if not config.recovery.in_place:
        return ()
    every, steps = config.checkpoint.every_steps, config.steps
    moments = (("save:shards", 2 * every), ("step:backward", 0), ("step:updated", steps * 6 // 10))
    kills = [Kill(place=place, step=step, rank=dice.choice([None, *range(processes)])) for place, step in moments]
    return (*kills, Kill(place="step:start", step=steps * 8 // 10, rank=0, agent=True))


def join_kills(kills: Sequence[Kill]) -> dict[str, str]:
    """Variables of an attempt whose starts end with these kills, one each."""
    return {
        failpoints.KILL_AT_VARIABLE: ";".join(kill.moment for kill in kills) + ";",
        failpoints.KILL_RANK_VARIABLE: ";".join("" if kill.rank is None else str(kill.rank) for kill in kills) + ";",
    }


def _places(config: TrainConfig, kills: int, dice: random.Random) -> list[str]:
    """A place for each kill: inside a save first, inside a step next, then the other kinds in turn."""
    kinds = ["save", "step", "load"]
    if config.eval_sequences:
        kinds.append("eval")
    if config.checkpoint.memory.use == "on":
        kinds.append("memory")
    if config.checkpoint.remote is not None:
        kinds.append("remote")
    return [
        dice.choice([place for place in failpoints.FAILPOINTS if place.startswith(f"{kinds[number % len(kinds)]}:")])
        for number in range(kills)
    ]
