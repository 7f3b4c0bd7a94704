"""Which step each start of a run went on from, and what it should have held there.

A checkpoint is loaded bit for bit, even where training itself is not repeatable: the weights before the first step
after a resume are weights that the run had before. So a resumed process is placed by its weights in the run's own
history, and where the history does not reach, in the undisturbed run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainmaster.drill import cuts
from trainmaster.drill.witness_log import Life, Line

BY_FILES = -1  # in place of a rank: saves that only the times of their files tell
# A save in the background that ended so shortly before the kill need not have got its final name.
JUST_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """One process that should have gone on with the run, beside what it should have held."""

    strike: str  # what it was to recover from, in words
    rank: int
    done: int  # steps that the run had certainly done before
    newest: int | None  # step of the newest save that was whole by then; None: there was none
    start: int | None  # the step it went on from; None: its state is none that the run ever had
    lines: tuple[Line, ...]
    own: Mapping[int, Line]  # by step: what the run did before the kill
    reference: Mapping[int, Line]  # by step: what the undisturbed run did
    clean: bool  # up to here the run was the undisturbed run, bit for bit
    unsure: int | None = None  # step of a newer save that ended so shortly before that it may not have been whole
    before: int = 0  # steps of optimizers in its first step that the run had done before

    @property
    def base(self) -> int:
        """The step to count from."""
        return self.start if self.start is not None else (self.newest or 0)

    @property
    def lost(self) -> int:
        return max(0, self.done - self.base)

    @property
    def restarted(self) -> bool:
        """It began at step 0 although there was something to go on from."""
        return self.start == 0 and self.newest is not None and self.newest > 0

    def held(self, step: int) -> Line | None:
        """What the process held before this step, bit for bit; None: nobody has seen it."""
        return self.own.get(step) or (self.reference.get(step) if self.clean else None)

    def planned(self, step: int) -> Line | None:
        """What depends on the step alone, as data and learning rate."""
        return self.own.get(step) or self.reference.get(step)


@dataclass(slots=True)
class Timeline:
    """The struck run as it went, attempt after attempt. `reference`: by rank and step."""

    reference: Mapping[int, Mapping[int, Line]]
    savers: frozenset[int]  # ranks that save; a checkpoint is whole when all of them have
    history: dict[int, dict[int, Line]] = field(default_factory=dict)
    saves: dict[int, dict[int, float]] = field(default_factory=dict)  # step → rank → when it was certainly whole
    behind: set[int] = field(default_factory=set)  # of these, steps of saves in the background
    done: int = 0
    clean: bool = True
    taken: tuple[Life, ...] = ()  # those of the attempt that was taken in last, with the steps that they are of
    _seen: bool = False
    _last: float = 0.0  # when the run last did something

    def add(
        self,
        strike: str,
        lives: Sequence[Life],
        *,
        then: str = "",
        printed: int | None = None,
        files: Sequence[float] = (),
    ) -> list[Resume]:
        """Take in an attempt; returns its resumes.

        `strike` came before it and `then` within it, where a launcher started the ranks again; `printed`: the step that
        its log begins after; `files`: when checkpoints were written.
        """
        resumes: list[Resume] = []
        self.taken = ()
        for together in _generations(lives):
            pairs = [self._resume(strike, life, printed) for life in together]
            found = [_without_half(resume) for resume, _ in pairs]
            group = [life for _, life in pairs]
            self.taken += tuple(group)
            whole = [replace(life, lines=resume.lines) for life, resume in zip(group, found, strict=True)]
            if self._seen:
                resumes += found
            self._follow(whole, found, files)
            self._seen, strike, printed = True, then or strike, None
        return resumes

    def newest(self) -> int | None:
        """Step of the newest save that was certainly whole when the run last did something."""
        whole = (
            step
            for step, ranks in self.saves.items()
            if self.savers <= set(ranks) and max(ranks.values()) <= self._last
        )
        return max(whole, default=None)

    def unsure(self) -> int | None:
        """Step of the newest save that had ended by then, where it is not certain that it was whole."""
        ended = max((step for step, ranks in self.saves.items() if self.savers <= set(ranks)), default=None)
        return None if ended == self.newest() else ended

    def step_of(self, save: int | None, start: int | None) -> int | None:
        """The step of the state in a save, where a process went on from `start`.

        One in the background begins when its thread does: its state may be of a step before, and is of one after the
        save before it.
        """
        if save is None or not start or start > save or save not in self.behind:
            return save
        return save if any(start <= other < save for other in self.saves) else start

    def copy(self) -> Timeline:
        return Timeline(
            reference=self.reference,
            savers=self.savers,
            history={rank: dict(lines) for rank, lines in self.history.items()},
            saves={step: dict(ranks) for step, ranks in self.saves.items()},
            behind=set(self.behind),
            done=self.done,
            clean=self.clean,
            _seen=self._seen,
            _last=self._last,
        )

    def _resume(self, strike: str, life: Life, printed: int | None) -> tuple[Resume, Life]:
        own, reference = self.history.get(life.rank, {}), self.reference.get(life.rank, {})
        start: int | None = 0
        if cut := cuts.cut(life, own, reference, resumed=self._seen):
            life, start, own, reference = cut.life, cut.start, dict(cut.own), cut.reference
        elif self._seen:
            start = find_start(life.lines[0], own, reference)
            start = printed if start is None else start
        resume = Resume(
            strike=strike,
            rank=life.rank,
            done=self.done,
            newest=self.step_of(self.newest(), start),
            start=start,
            lines=life.lines,
            own=dict(own),
            reference=reference,
            clean=self.clean,
            unsure=self.step_of(self.unsure(), start),
            before=cut.before if cut else 0,
        )
        return resume, life

    def _follow(self, group: Sequence[Life], found: Sequence[Resume], files: Sequence[float]) -> None:
        # Where ranks do not agree, the step that the run counts from is that of the one that loaded something.
        base = max(resume.base for resume in found)
        self.saves = {step: ranks for step, ranks in self.saves.items() if step <= base}
        loaded = base in self.saves or base in (found[0].newest, found[0].unsure)
        if base and loaded and all(resume.start == base for resume in found):
            self.saves[base] = dict.fromkeys(self.savers, 0.0)  # it was whole
        self.behind &= set(self.saves)
        for life, resume in zip(group, found, strict=True):
            lines = {base + number: line for number, line in enumerate(life.lines, 1)}
            held = self.history.get(life.rank, {}).get(base + 1) or self.reference.get(life.rank, {}).get(base + 1)
            history = {base + 1: cuts.stitch(lines[base + 1], held, resume.before)}
            self.history[life.rank] = (
                {step: line for step, line in resume.own.items() if step <= base} | lines | history
            )
            wanted = {step: resume.reference[step] for step in lines if step in resume.reference}
            self.clean = self.clean and all(lines[step].weights == line.weights for step, line in wanted.items())
            for save in life.saves:
                whole = save.at + (JUST_S if save.behind else 0.0)
                self.saves.setdefault(base + save.after, {})[life.rank] = whole
                if save.behind:
                    self.behind.add(base + save.after)
        for at in files:
            if steps := sum(line.at <= at for line in group[0].lines):
                self.saves.setdefault(base + steps, {})[BY_FILES] = at + JUST_S
        self._last = max([life.lines[-1].at for life in group] + [save.at for life in group for save in life.saves])
        begun = base + min(len(life.lines) for life in group)
        # Whether the last step that was begun was also done, only a save after it can tell.
        self.done = max([begun - 1, *(step for step in self.saves if step <= begun)])


def _without_half(resume: Resume) -> Resume:
    """Without its last step where fewer optimizers had stepped in it than should: the process was killed in between.

    With a critic that steps several times for each step of the other, its own lines do not tell.
    """
    last = resume.base + len(resume.lines)
    wanted = resume.own.get(last) or resume.reference.get(last)
    half = wanted is not None and resume.lines[-1].weights.count("+") < wanted.weights.count("+")
    return replace(resume, lines=resume.lines[:-1]) if half and len(resume.lines) > 1 else resume


def find_start(first: Line, own: Mapping[int, Line], reference: Mapping[int, Line]) -> int | None:
    """The step that a process went on from: its weights, or else its optimizer's state, are those after that step."""
    for lines in (own, reference):
        if (step := _match(first, lines, "weights")) is not None and step > 1:
            return step - 1
    if first.state is not None:
        for lines in (own, reference):
            if (step := _match(first, lines, "state")) is not None:
                return step - 1
    return 0 if _match(first, reference, "weights") == 1 or _match(first, own, "weights") == 1 else None


def _match(first: Line, lines: Mapping[int, Line], field_: str) -> int | None:
    """The step whose line is most like this one; with a learning rate of 0 the weights of two steps are the same."""
    alike = [step for step, line in lines.items() if getattr(line, field_) == getattr(first, field_)]

    def score(step: int) -> tuple[int, int]:
        line = lines[step]
        same = (line.state == first.state, line.rates == first.rates, line.random == first.random)
        return sum(same) + (line.batches[-1:] == first.batches[-1:]), step

    return max(alike, key=score, default=None)


def _generations(lives: Sequence[Life]) -> list[list[Life]]:
    """Processes that trained together: a launcher may have started the ranks more than once in one attempt."""
    groups: list[list[Life]] = []
    for life in lives:
        for group in groups:
            if life.rank not in {other.rank for other in group}:
                group.append(life)
                break
        else:
            groups.append([life])
    return groups
