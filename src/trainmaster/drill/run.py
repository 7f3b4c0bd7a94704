"""Run a drill of any program: two undisturbed runs, the struck run attempt by attempt, and the judgement."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainmaster.core.plan import EVENTS_FILE, Plan
from trainmaster.core.results import CheckResult, Finding
from trainmaster.core.spec import Preflight
from trainmaster.drill import attempt as engine
from trainmaster.drill import folders, mounts, ranks, readings, storage, verdict, witness_log
from trainmaster.drill import plan as plans
from trainmaster.drill.attempt import DrillFailed
from trainmaster.drill.estimate import Estimate
from trainmaster.drill.lives import BY_FILES, Resume, Timeline
from trainmaster.drill.outside import Outside
from trainmaster.drill.plan import LOOK_STEPS, Shape, Strike
from trainmaster.drill.record import Attempt, Interrupted, Proof, References, Setup, Struck
from trainmaster.drill.witness_log import FOLDER_VARIABLE, STRIKE_VARIABLE

_LOOK_S = 0.05
# An attempt that does nothing for so much longer than the undisturbed run ever did hangs. A busy machine is slower.
_QUIET_S, _QUIET_TIMES = 60.0, 10.0
# Strikes from outside: the witness holds the program for them.
_DO = dict.fromkeys(("term", "launcher", "stop"), "hold") | {name: name for name in plans.STORAGE}


@dataclass(slots=True)
class CommandDrill:
    """One drill in a folder. `say` is called with the current activity, its steps done and its steps in all."""

    setup: Setup
    folder: Path
    say: Callable[[str, int, int], None] = lambda *_: None
    _attempts: list[Attempt] = field(default_factory=list)  # of the struck run, in order
    _struck: list[Struck] = field(default_factory=list)
    _resumes: list[Resume] = field(default_factory=list)
    _seen: References | Attempt | None = None  # of the undisturbed runs
    _planned: Sequence[Strike] = ()
    _reference_losses: Mapping[int, float] = field(default_factory=dict)
    _reference_folder: Path = Path()
    _unheard: bool = False  # its saves are known by its files alone
    _unanswered: int | None = None  # the strike that the next attempt of the run has to recover from
    _number: int = 0
    _steps: int = 0
    _estimate: Estimate = field(default_factory=Estimate)
    _quiet_s: float | None = None  # how long an attempt may do nothing
    _mounts: bool | None = None  # whether it has mounts of its own; None: not asked for yet

    def run(self, references: References | None = None) -> Proof:
        """`references`: those of an earlier drill of the same program with the same values; without, they are run.

        Interrupted with what was found, where Ctrl-C ends it.
        """
        started = time.monotonic()
        try:
            return self._run(references, started)
        except KeyboardInterrupt:
            raise Interrupted(self._so_far(started)) from None

    def _run(self, references: References | None, started: float) -> Proof:
        folders.check_work(self.setup.work, self.folder / "reference", links=self.setup.links)
        inject = Path(__file__).with_name("inject")
        shutil.copytree(inject, self.folder / "witness", ignore=shutil.ignore_patterns("__pycache__"))
        seen = references or self._look_at_it(started)
        if isinstance(seen, Proof):
            return seen
        self._know(seen.first)
        self._seen = seen
        self._planned = plans.make(seen.shape, wanted=self.setup.strikes, seed=self.setup.seed)
        reached = self._strike_all(seen.first, self._planned, seen.shape)
        return self._proof(seen.shape, self._left_out(seen.shape), self._judge(seen, reached), seen, started)

    def _judge(self, seen: References, reached: int | None) -> list[tuple[str, Finding]]:
        return verdict.judge_all(
            seen.first,
            seen.second,
            seen.shape,
            struck=self._struck,
            attempts=self._attempts,
            resumes=self._resumes,
            planned=self._planned,
            reached=reached,
        )

    def _left_out(self, shape: Shape) -> dict[str, str]:
        return {name: why for name, why in plans.left_out(shape).items() if name in self.setup.strikes}

    def _so_far(self, started: float) -> Proof:
        """What was found before an interrupt. A strike whose resume was not seen counts as not run."""
        seen = self._seen
        if not isinstance(seen, References):
            return replace(self._proof(None, {}, [("reference", engine.NOT_RUN)], seen, started), interrupted=True)
        if self._unanswered is not None:
            name = self._struck[self._unanswered].strike.name
            self._struck = [one for one in self._struck if one.strike.name != name]
        found = verdict.interrupted(self._judge(seen, None), self._struck, self._planned)
        return replace(self._proof(seen.shape, self._left_out(seen.shape), found, seen, started), interrupted=True)

    def _look_at_it(self, started: float) -> References | Proof:
        """Run it twice undisturbed; a proof of one finding where it cannot be drilled."""
        first = self._seen = self._undisturbed("reference")
        self._know(first)
        if refusal := verdict.unfit(first, self.folder):
            return self._proof(None, {}, [("reference", refusal)], first, started)
        shape = Shape(
            steps=self._steps,
            saves=readings.save_steps(first, self._roots("reference")),
            world=max((life.world for life in first.lives), default=self.setup.spec.resources.ranks),
            launcher=first.launcher,
            fewer=fewer[1] if (fewer := ranks.halve(self.setup.spec)) else None,
        )
        if refusal := verdict.too_few_saves(shape):
            return self._proof(shape, {}, [("reference", refusal)], first, started)
        self._estimate.plan(plans.make(shape, wanted=self.setup.strikes, seed=self.setup.seed), 2 * shape.steps)
        self._estimate.starts += 1
        second = self._undisturbed("reference-2")
        if refusal := verdict.unlike(first, second):
            return self._proof(None, {}, [("reference", refusal)], first, started)
        return References(first=first, second=second, shape=shape)

    def _know(self, first: Attempt) -> None:
        self._steps = len(readings.lines_by_rank(first).get(0, {}))
        self._reference_losses, self._reference_folder = first.clear_losses, Path(first.folder)
        self._quiet_s = max(_QUIET_S, _QUIET_TIMES * readings.longest_pause(first))

    def _strike_all(self, first: Attempt, strikes: Sequence[Strike], shape: Shape) -> int | None:
        """Every strike in its turn; returns the last step of the last attempt, None where that was not reached."""
        savers = frozenset(life.rank for life in first.lives if life.saves) or frozenset({BY_FILES})
        self._unheard = savers == {BY_FILES}
        timeline = Timeline(reference=readings.lines_by_rank(first), savers=savers)
        folders.copy_work(self.setup.work, self.folder / "struck" / "work", links=self.setup.links)
        in_turn = [strike for strike in strikes if strike.name not in (*plans.BRANCHES, "stop")]
        branches = [strike for strike in strikes if strike.name in plans.BRANCHES]
        self._estimate.plan(strikes, shape.steps)
        before = "the start"
        for strike in in_turn:
            again = [strike, replace(strike, after=0)] if strike.name == "twice" else [strike]  # soon after the start
            for one in again:
                if not self._in_turn(one, before, timeline):
                    return None
                before = str(strike)
        for strike in branches:
            self._branch(strike, timeline.copy(), shape)
        stop = next((strike for strike in strikes if strike.name == "stop"), None)
        last = self._attempt("struck", "to the end", strike=stop, steps=2, total=shape.steps)
        self._take(before, last, timeline)
        if stop is not None:
            self._struck.append(Struck(strike=stop, reached=last.struck, died_at=None, resumes=()))
        return max((step for lines in timeline.history.values() for step in lines), default=0)

    def _in_turn(self, strike: Strike, before: str, timeline: Timeline) -> bool:
        """One strike of the run itself; False where there is nothing left to strike."""
        base = timeline.newest() or 0
        steps = max(2, strike.after - base)
        done = self._attempt("struck", str(strike), strike=strike, steps=steps, total=base + steps)
        within = tuple(r for r in self._take(before, done, timeline, then=str(strike)) if r.strike == str(strike))
        died_at = within[0].done if within else timeline.done if done.lives else None
        self._struck.append(Struck(strike=strike, reached=done.struck, died_at=died_at, resumes=within))
        self._unanswered = None if within else len(self._struck) - 1  # a launcher may have started it again itself
        return done.struck

    def _branch(self, strike: Strike, timeline: Timeline, shape: Shape, *, own_mounts: bool = True) -> None:
        """A strike in a copy of the run, and some steps of its resume; then the copy is thrown away."""
        name, before = f"struck-{strike.name}", timeline.copy()
        own_mounts = own_mounts and strike.name in plans.STORAGE and self._has_mounts()
        shutil.copytree(
            self.folder / "struck",
            self.folder / name,
            symlinks=True,
            ignore=_attempts_of(self.folder),
            dirs_exist_ok=True,  # the logs of a first try
        )
        one = Struck(strike=strike, reached=True, died_at=timeline.done, newest=timeline.newest())
        if strike.name in plans.DAMAGE:
            one = self._damage(one, name, timeline, shape)
        elif strike.name in plans.STORAGE:
            one = self._strike_disk(one, name, timeline, shape, own_mounts=own_mounts)
            if strike.name == "full" and own_mounts and one.storage is not None and one.storage.through:
                # What is written over the old file, or after the old one was deleted, has the room of that one.
                self._throw_away(name)
                return self._branch(strike, before, shape, own_mounts=False)
        elif strike.name != "ranks":
            hit = self._attempt(name, str(strike), strike=strike, steps=2, total=shape.steps)
            one = _hit(one, hit, timeline)
        # Killed in its last save it has done every step, and is not over.
        is_over = (
            one.storage is None and one.hit is not None and one.hit.reached >= shape.steps and set(one.hit.codes) == {0}
        )
        if one.reached and not is_over:
            look = Strike(name="all", after=0)
            done = self._attempt(
                name,
                f"resume after: {strike}",
                strike=look,
                steps=LOOK_STEPS,
                total=shape.steps,
                fewer=strike.name == "ranks",
            )
            one = replace(one, resumes=tuple(timeline.add(str(strike), done.lives)), branch=done)
        self._struck.append(one)
        if strike.name not in plans.APART:
            self._resumes += one.resumes
        self._throw_away(name)

    def _throw_away(self, name: str) -> None:
        for folder in self._roots(name):
            shutil.rmtree(folder, ignore_errors=True)

    def _damage(self, one: Struck, name: str, timeline: Timeline, shape: Shape) -> Struck:
        """Damage the newest checkpoint of a copy of the run."""
        found = self._checkpoints(name)
        if len(found) == 1:  # with none to go back to, no program can do better than to stop
            one = self._save_once_more(one, name, timeline, shape)
            found = self._checkpoints(name)
        if not found or not one.reached:
            return replace(one, reached=False)
        if one.strike.name == "missing" and len(found) == 1 and len(found[0].files) == 1:
            return replace(one, reached=False, skipped="one checkpoint of one file: without it nothing was saved")
        dice = random.Random(f"{self.setup.seed} {one.strike.name}")  # noqa: S311 (a drill, not a key)
        pointer = folders.find_pointer(found[0], self._roots(name))
        if one.strike.name == "unfinished" and pointer is None:
            return replace(one, reached=False, skipped="no file such as `latest` names the newest checkpoint")
        path = folders.damage(found[0], one.strike.name, dice)
        if one.strike.name == "unfinished" and pointer is not None:
            path = pointer
        return replace(one, damaged=str(path.relative_to(self.folder / name)), older=len(found) - 1)

    def _save_once_more(self, one: Struck, name: str, timeline: Timeline, shape: Shape) -> Struck:
        """Go on past the next save, and kill every rank."""
        newest = one.newest or 0
        after = plans.past_next_save(shape, newest)
        if after is None:
            return replace(one, reached=False)
        label, kill = f"one more save, for: {one.strike}", Strike(name="all", after=0)
        done = self._attempt(name, label, strike=kill, steps=after, total=newest + after)
        timeline.add("the strike before", done.lives, files=self._written(done, name))
        return replace(one, reached=done.struck, died_at=timeline.done, newest=timeline.newest())

    def _checkpoints(self, name: str) -> list[folders.Checkpoint]:
        return folders.list_alike(folders.find_checkpoints(self._roots(name), since=self._attempts[0].begun))

    def _strike_disk(self, one: Struck, name: str, timeline: Timeline, shape: Shape, *, own_mounts: bool) -> Struck:
        """A save of a copy of the run that cannot be written, or that a power cut follows."""
        strike, run, newest = one.strike, self.folder / name, one.newest or 0
        found = self._checkpoints(name)
        order = storage.place(strike.name, shape, newest)
        if not found or not order:
            return replace(one, reached=False)
        more = {"until": order.get("until", 0)}
        with storage.prepared(strike.name, found[0], run, own_mounts=own_mounts) as disk:
            hit = self._attempt(
                name,
                str(strike),
                strike=strike,
                steps=order["after"],
                total=newest + order["after"],
                order={**more, "room": disk.limit},
                disk=disk,
            )
        one = _hit(one, hit, timeline)
        if strike.name == "power":
            files = folders.find_checkpoints(self._roots(name), since=hit.begun)
            left = storage.cut(hit, files[0].files if files else (), run)
            return replace(one, newest=timeline.newest(), older_step=newest, storage=left)
        timeline.saves = {step: ranks for step, ranks in timeline.saves.items() if step <= newest}  # none was whole
        seen = storage.look(
            hit, self._reference_folder, until=more["until"], disk=disk, run=run, before=self.folder / "struck"
        )
        return replace(one, storage=seen)

    def _has_mounts(self) -> bool:
        if self.setup.own_mounts and self._mounts is None:
            self._mounts = mounts.enter()
        return bool(self._mounts)

    def _take(self, before: str, done: Attempt, timeline: Timeline, then: str = "") -> list[Resume]:
        printed = verdict.printed_start(done.losses, self._reference_losses)
        resumes = timeline.add(before, done.lives, then=then, printed=printed, files=self._written(done))
        self._attempts.append(replace(done, before=before))
        self._resumes += resumes
        if self._unanswered is not None:
            answered = tuple(resume for resume in resumes if resume.strike == before)
            self._struck[self._unanswered] = replace(self._struck[self._unanswered], resumes=answered)
            self._unanswered = None
        return resumes

    def _written(self, done: Attempt, name: str = "struck") -> list[float]:
        """When an attempt wrote its checkpoints, where only their files tell."""
        if not self._unheard:
            return []
        return [checkpoint.at for checkpoint in folders.find_checkpoints(self._roots(name), since=done.begun)]

    def _undisturbed(self, name: str) -> Attempt:
        folders.copy_work(self.setup.work, self.folder / name / "work", links=self.setup.links)
        done = self._attempt(name, "undisturbed run", strike=None, steps=0, total=self._steps)
        if set(done.codes) != {0}:
            raise DrillFailed(
                "the undisturbed run failed, so there is nothing to compare with: "
                f"{engine.last_words(Path(done.folder))}"
            )
        return done

    def _attempt(
        self,
        run: str,
        label: str,
        *,
        strike: Strike | None,
        steps: int,
        total: int,
        order: Mapping[str, int] | None = None,
        disk: storage.Disk | None = None,
        fewer: bool = False,
    ) -> Attempt:
        """One start in the folders of a run."""
        self._number += 1
        base = self.folder / run
        folder = base / f"attempt-{self._number}"
        witness = folder.with_name(f"{folder.name}-witness")
        witness.mkdir(parents=True)
        again = self.setup.again if self._attempts else None  # the first start of the struck run has nothing to resume
        spec = replace(
            self.setup.spec,
            command=again or self.setup.spec.command,
            preflight=Preflight(level=0),
            workdir=None,
            env=self._environment(witness, strike, steps, order or {}),
        )
        halved = ranks.halve(spec) if fewer else None
        spec = halved[0] if halved is not None else spec
        plan = Plan(
            attempt=f"{uuid.uuid4()}.1",
            spec=spec,
            folder=str(folder),
            checkpoints=str(base / "checkpoints"),
            work=str(base / "work"),
        )
        grow = self._roots(run) if self._unheard and strike is not None and strike.name == "saving" else ()
        outside = Outside(strike=strike, folder=folder, witness=witness, grow=grow, disk=disk, quiet_s=self._quiet_s)
        label, begun = f"{label}{self._estimate}", time.time()

        def look(agent: int) -> None:
            outside.look(agent)
            self.say(label, readings.count_steps(witness), max(total, 1))

        record = engine.run(plan, variables={}, look=look, look_s=_LOOK_S)
        ended = time.monotonic()
        if place := witness_log.read_outside(witness):
            raise DrillFailed(
                f"it saves to {place}, which is outside its working folder, and was ended before it wrote there: "
                "save below TRAINMASTER_CHECKPOINTS, or to a path relative to the working folder"
            )
        message = str(record.get("message", ""))
        losses, repeated = readings.read_losses(folder / EVENTS_FILE)
        done = Attempt(
            label=label,
            folder=str(folder),
            lives=witness_log.read(witness),
            losses=losses,
            repeated=repeated,
            codes=engine.exit_codes(record),
            message=message,
            forced="did not end in" in message,
            begun=begun,
            ended=time.time(),
            grace_s=spec.limits.grace_s,
            stop_s=None if outside.stopped_at is None else ended - outside.stopped_at,
            launcher=outside.launcher,
            hung=outside.hung,
            versions=witness_log.read_versions(witness),
            loaded=witness_log.read_loads(witness, base),
            struck=outside.struck or any(witness.glob("struck-*")),
            left=tuple(record.get("evidence", {}).get("would_not_die", [])),
        )
        self._estimate.take(done)
        return done

    def _environment(self, witness: Path, strike: Strike | None, steps: int, more: Mapping[str, int]) -> dict[str, str]:
        own = self.setup.spec.env
        path = [str(self.folder / "witness"), own.get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")]
        ours = {"PYTHONPATH": os.pathsep.join(filter(None, path)), FOLDER_VARIABLE: str(witness)}
        if strike is not None:
            when = "save" if strike.name == "saving" else "step"
            order = {
                "when": when,
                "after": steps,
                "rank": strike.rank,
                "do": _DO.get(strike.name, "kill"),
                "look": LOOK_STEPS,
                **more,
            }
            ours[STRIKE_VARIABLE] = json.dumps(order)
        # Where people look at runs, not at drills.
        return {"WANDB_MODE": "offline", **own, **ours}

    def _roots(self, name: str) -> tuple[Path, Path]:
        return self.folder / name / "checkpoints", self.folder / name / "work"

    def _proof(
        self,
        shape: Shape | None,
        left_out: Mapping[str, str],
        findings: Sequence[tuple[str, Finding]],
        seen: References | Attempt | None,
        started: float,
    ) -> Proof:
        return Proof(
            setup=self.setup,
            shape=shape,
            planned=tuple(self._planned),
            struck=tuple(self._struck),
            left_out=left_out,
            results=tuple(CheckResult(check=name, findings=(finding,), took_s=0.0) for name, finding in findings),
            reference=seen.first if isinstance(seen, References) else seen,
            references=seen if isinstance(seen, References) else None,
            attempts=tuple(self._attempts),
            begun=time.time() - (took_s := time.monotonic() - started),
            took_s=took_s,
        )


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
