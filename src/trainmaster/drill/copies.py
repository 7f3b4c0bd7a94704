"""Strikes in a copy of the struck run: damage, strikes at the disk, SIGTERM, a kill during a save, fewer ranks.

What they spoil, or a program that runs to its end in its grace, does not reach the other strikes.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainmaster.drill import folders, mounts, plan, storage
from trainmaster.drill.lives import Timeline
from trainmaster.drill.plan import LOOK_STEPS, Shape, Strike
from trainmaster.drill.record import Attempt, Struck
from trainmaster.drill.starts import Starts


@dataclass(slots=True)
class Copies:
    """Of one drill, whose struck run was started."""

    starts: Starts
    shape: Shape
    reference: Path  # the attempt of the first undisturbed run
    _mounts: bool | None = None  # whether it has mounts of its own; None: not asked for yet

    def strike(self, strike: Strike, timeline: Timeline, *, own_mounts: bool = True) -> Struck:
        """A strike in a copy of the run, and some steps of its resume; then the copy is thrown away."""
        folder, shape = self.starts.folder, self.shape
        name, before = f"struck-{strike.name}", timeline.copy()
        own_mounts = own_mounts and strike.name in plan.STORAGE and self._has_mounts()
        shutil.copytree(
            folder / "struck",
            folder / name,
            symlinks=True,
            ignore=_attempts_of(folder),
            dirs_exist_ok=True,  # the logs of a first try
        )
        one = Struck(strike=strike, reached=True, died_at=timeline.done, newest=timeline.newest())
        if strike.name in plan.DAMAGE:
            one = self._damage(one, name, timeline)
        elif strike.name in plan.STORAGE:
            one = self._strike_disk(one, name, timeline, own_mounts=own_mounts)
            if strike.name == "full" and own_mounts and one.storage is not None and one.storage.through:
                # What is written over the old file, or after the old one was deleted, has the room of that one.
                self._throw_away(name)
                return self.strike(strike, before, own_mounts=False)
        elif strike.name != "ranks":
            hit = self.starts.start(
                name, str(strike), strike=strike, steps=2, total=shape.steps, since=timeline.newest() or 0
            )
            one = _hit(one, hit, timeline)
        # Killed in its last save it has done every step, and is not over.
        is_over = (
            one.storage is None and one.hit is not None and one.hit.reached >= shape.steps and set(one.hit.codes) == {0}
        )
        if one.reached and not is_over:
            look = Strike(name="all", after=0)
            done = self.starts.start(
                name,
                f"resume after: {strike}",
                strike=look,
                steps=LOOK_STEPS,
                total=min(shape.steps, (one.newest or 0) + LOOK_STEPS),
                since=one.newest or 0,
                fewer=strike.name == "ranks",
            )
            saved = timeline.copy()
            one = replace(one, resumes=tuple(timeline.add(str(strike), done.lives)), branch=done)
            start = one.resumes[0].start if one.resumes else None
            one = replace(
                one,
                newest=saved.step_of(one.newest, start),
                unsure=saved.step_of(one.unsure, start),
                older_step=saved.step_of(one.older_step, start),
            )
        self._throw_away(name)
        return one

    def _throw_away(self, name: str) -> None:
        for folder in self.starts.roots(name):
            shutil.rmtree(folder, ignore_errors=True)

    def _damage(self, one: Struck, name: str, timeline: Timeline) -> Struck:
        """Damage the newest checkpoint of a copy of the run."""
        found = self._checkpoints(name)
        starts = 2 if len(found) == 1 else 1
        if why := self._nothing_to_damage(one, found, name, alone=self.shape.keeps_one):
            self.starts.estimate.leave_out(starts)
            return replace(one, reached=False, skipped=why)
        if len(found) == 1:  # with none to go back to, no program can do better than to stop
            one = self._save_once_more(one, name, timeline)
            found = self._checkpoints(name)
        if not found or not one.reached:
            return replace(one, reached=False)
        one = replace(one, unsure=timeline.unsure())
        if why := self._nothing_to_damage(one, found[:1], name, alone=len(found) == 1):
            self.starts.estimate.leave_out(1)
            return replace(one, reached=False, skipped=why)
        dice = random.Random(f"{self.starts.setup.seed} {one.strike.name}")  # noqa: S311 (a drill, not a key)
        pointer = folders.find_pointer(found[0], self.starts.roots(name))
        path = folders.damage(found[0], one.strike.name, dice)
        if one.strike.name == "unfinished" and pointer is not None:
            path = pointer
        return replace(one, damaged=str(path.relative_to(self.starts.folder / name)), older=len(found) - 1)

    def _nothing_to_damage(
        self, one: Struck, found: Sequence[folders.Checkpoint], name: str, *, alone: bool
    ) -> str | None:
        """Why there is nothing to be struck, asked before a start is spent. `alone`: it keeps one checkpoint."""
        if one.strike.name == "missing" and alone and len(found) == 1 and len(found[0].files) == 1:
            return "one checkpoint of one file: without it nothing was saved"
        roots = self.starts.roots(name)
        if one.strike.name == "unfinished" and found and not any(folders.find_pointer(each, roots) for each in found):
            return "no file such as `latest` names the newest checkpoint"
        return None

    def _save_once_more(self, one: Struck, name: str, timeline: Timeline) -> Struck:
        """Go on past the next save, and kill every rank."""
        newest = one.newest or 0
        after = plan.past_next_save(self.shape, newest)
        if after is None:
            return replace(one, reached=False)
        label, kill = f"one more save, for: {one.strike}", Strike(name="all", after=0)
        done = self.starts.start(name, label, strike=kill, steps=after, total=newest + after, since=newest)
        timeline.add("the strike before", done.lives, files=self.starts.written(done, name))
        return replace(one, reached=done.struck, died_at=timeline.done, newest=timeline.newest())

    def _checkpoints(self, name: str) -> list[folders.Checkpoint]:
        since = self.starts.struck_since
        assert since is not None, "a copy is one of a run that was started"
        return self.starts.checkpoints(name, since=since)

    def _strike_disk(self, one: Struck, name: str, timeline: Timeline, *, own_mounts: bool) -> Struck:
        """A save of a copy of the run that cannot be written, or that a power cut follows."""
        strike, run, newest = one.strike, self.starts.folder / name, one.newest or 0
        found = self._checkpoints(name)
        order = storage.place(strike.name, self.shape, newest)
        if not found or not order:
            return replace(one, reached=False)
        more = {"until": order.get("until", 0)}
        with storage.prepared(strike.name, found[0], run, own_mounts=own_mounts) as disk:
            hit = self.starts.start(
                name,
                str(strike),
                strike=strike,
                steps=order["after"],
                total=newest + order["after"],
                since=newest,
                order={**more, "room": disk.limit},
                disk=disk,
            )
        one = _hit(one, hit, timeline)
        if strike.name == "power":
            files = folders.find_checkpoints(self.starts.roots(name), since=hit.begun)
            left = storage.cut(hit, files[0].files if files else (), run)
            return replace(one, newest=timeline.newest(), older_step=newest, storage=left)
        timeline.saves = {step: ranks for step, ranks in timeline.saves.items() if step <= newest}  # none was whole
        before = self.starts.folder / "struck"
        seen = storage.look(hit, self.reference, until=more["until"], disk=disk, run=run, before=before)
        return replace(one, storage=seen)

    def _has_mounts(self) -> bool:
        if self.starts.setup.own_mounts and self._mounts is None:
            self._mounts = mounts.enter()
        return bool(self._mounts)


def _hit(one: Struck, hit: Attempt, timeline: Timeline) -> Struck:
    """The strike with the attempt of the copy in which it happened."""
    timeline.add("the strike before", hit.lives)
    hit = replace(hit, reached=max(timeline.history.get(0, {}), default=0))
    return replace(one, reached=hit.struck, died_at=timeline.done, hit=hit)


def _attempts_of(folder: Path) -> Callable[[str, list[str]], list[str]]:
    """Names that a copy of the struck run leaves out: logs and lines of its attempts."""

    def ignore(above: str, names: list[str]) -> list[str]:
        return [name for name in names if name.startswith("attempt-")] if Path(above).parent == folder else []

    return ignore
