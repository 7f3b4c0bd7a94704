"""Run a drill of any program: two undisturbed runs, the struck run attempt by attempt, and the judgement."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainmaster.core.results import CheckResult, Finding
from trainmaster.drill import attempt as engine
from trainmaster.drill import folders, judge_end, ranks, readings, verdict
from trainmaster.drill import plan as plans
from trainmaster.drill.attempt import DrillFailed
from trainmaster.drill.copies import Copies
from trainmaster.drill.lives import BY_FILES, Resume, Timeline
from trainmaster.drill.plan import Shape, Strike
from trainmaster.drill.record import Attempt, Interrupted, Proof, References, Setup, Struck
from trainmaster.drill.starts import Starts

# An attempt that does nothing for so much longer than the undisturbed run ever did hangs. A busy machine is slower.
_QUIET_S, _QUIET_TIMES = 60.0, 10.0


@dataclass(slots=True)
class CommandDrill:
    """One drill in a folder. `say` is called with the current activity, its steps done and its steps in all."""

    setup: Setup
    folder: Path
    say: Callable[[str, int, int], None] = lambda *_: None
    _starts: Starts = field(init=False)
    _attempts: list[Attempt] = field(default_factory=list)  # of the struck run, in order
    _struck: list[Struck] = field(default_factory=list)
    _resumes: list[Resume] = field(default_factory=list)
    _seen: References | Attempt | None = None  # of the undisturbed runs
    _planned: Sequence[Strike] = ()
    _reference_losses: Mapping[int, float] = field(default_factory=dict)
    _unanswered: int | None = None  # the strike that the next attempt of the run has to recover from
    _steps: int = 0

    def __post_init__(self) -> None:
        self._starts = Starts(self.setup, self.folder, self.say)

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
            saves=readings.save_steps(first, self._starts.roots("reference")),
            world=max((life.world for life in first.lives), default=self.setup.spec.resources.ranks),
            launcher=first.launcher,
            fewer=fewer[1] if (fewer := ranks.halve(self.setup.spec)) else None,
            keeps_one=len(self._starts.checkpoints("reference", since=first.begun)) == 1,
        )
        if refusal := verdict.too_few_saves(shape):
            return self._proof(shape, {}, [("reference", refusal)], first, started)
        strikes = plans.make(shape, wanted=self.setup.strikes, seed=self.setup.seed)
        self._starts.estimate.plan(strikes, shape, undisturbed=1)
        second = self._undisturbed("reference-2")
        if refusal := verdict.unlike(first, second):
            return self._proof(None, {}, [("reference", refusal)], first, started)
        return References(first=first, second=second, shape=shape)

    def _know(self, first: Attempt) -> None:
        self._steps = len(readings.lines_by_rank(first).get(0, {}))
        self._reference_losses = first.clear_losses
        self._starts.quiet_s = max(_QUIET_S, _QUIET_TIMES * readings.longest_pause(first))

    def _strike_all(self, first: Attempt, strikes: Sequence[Strike], shape: Shape) -> int | None:
        """Every strike in its turn; returns the last step of the last attempt, None where that was not reached."""
        savers = frozenset(life.rank for life in first.lives if life.saves) or frozenset({BY_FILES})
        self._starts.unheard = savers == {BY_FILES}
        timeline = Timeline(reference=readings.lines_by_rank(first), savers=savers)
        folders.copy_work(self.setup.work, self.folder / "struck" / "work", links=self.setup.links)
        in_turn = [strike for strike in strikes if strike.name not in (*plans.BRANCHES, "stop")]
        branches = [strike for strike in strikes if strike.name in plans.BRANCHES]
        self._starts.estimate.plan(strikes, shape)
        before = "the start"
        for strike in in_turn:
            again = [strike, replace(strike, after=0)] if strike.name == "twice" else [strike]  # soon after the start
            for one in again:
                if not self._in_turn(one, before, timeline):
                    return None
                before = str(strike)
        copies = Copies(self._starts, shape, Path(first.folder))
        for strike in branches:
            struck = copies.strike(strike, timeline.copy())
            self._struck.append(struck)
            if strike.name not in plans.APART:
                self._resumes += struck.resumes
        stop = next((strike for strike in strikes if strike.name == "stop"), None)
        base = timeline.newest() or 0
        last = self._starts.start("struck", "to the end", strike=stop, steps=2, total=shape.steps, since=base)
        self._take(before, last, timeline)
        if stop is not None:
            self._struck.append(Struck(strike=stop, reached=last.struck, died_at=None, resumes=()))
        return max((step for lines in timeline.history.values() for step in lines), default=0)

    def _in_turn(self, strike: Strike, before: str, timeline: Timeline) -> bool:
        """One strike of the run itself; False where there is nothing left to strike."""
        base = timeline.newest() or 0
        steps = max(2, strike.after - base)
        done = self._starts.start("struck", str(strike), strike=strike, steps=steps, total=base + steps, since=base)
        within = tuple(r for r in self._take(before, done, timeline, then=str(strike)) if r.strike == str(strike))
        died_at = within[0].done if within else timeline.done if done.lives else None
        self._struck.append(Struck(strike=strike, reached=done.struck, died_at=died_at, resumes=within))
        self._unanswered = None if within else len(self._struck) - 1  # a launcher may have started it again itself
        return done.struck

    def _take(self, before: str, done: Attempt, timeline: Timeline, then: str = "") -> list[Resume]:
        printed = judge_end.printed_start(done.losses, self._reference_losses)
        resumes = timeline.add(
            before, done.lives, then=then, printed=printed, files=self._starts.written(done, "struck")
        )
        self._attempts.append(replace(done, before=before, lives=timeline.taken))
        self._starts.struck_since = self._attempts[0].begun
        self._resumes += resumes
        if self._unanswered is not None:
            answered = tuple(resume for resume in resumes if resume.strike == before)
            self._struck[self._unanswered] = replace(self._struck[self._unanswered], resumes=answered)
            self._unanswered = None
        return resumes

    def _undisturbed(self, name: str) -> Attempt:
        folders.copy_work(self.setup.work, self.folder / name / "work", links=self.setup.links)
        done = self._starts.start(name, "undisturbed run", strike=None, steps=0, total=self._steps)
        if set(done.codes) != {0}:
            raise DrillFailed(
                "the undisturbed run failed, so there is nothing to compare with: "
                f"{engine.last_words(Path(done.folder))}"
            )
        return done

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
            results=tuple(CheckResult.of(name, [finding]) for name, finding in findings),
            reference=seen.first if isinstance(seen, References) else seen,
            references=seen if isinstance(seen, References) else None,
            attempts=tuple(self._attempts),
            begun=time.time() - (took_s := time.monotonic() - started),
            took_s=took_s,
        )
