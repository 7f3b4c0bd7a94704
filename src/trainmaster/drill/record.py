"""Record of a drill of any program: what is drilled, what was seen of each start and strike, and the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainmaster.core.results import CheckResult, Overall, judge_overall
from trainmaster.core.spec import JobSpec
from trainmaster.drill import plan as plans
from trainmaster.drill.lives import Resume
from trainmaster.drill.plan import Shape, Strike
from trainmaster.drill.witness_log import Life


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the program, up to its end or its death."""

    label: str
    folder: str
    lives: tuple[Life, ...]
    losses: Mapping[int, float]  # by step, as the program prints them; of several the last
    codes: tuple[int, ...]  # of the processes that the agent started; negative is a signal
    message: str
    forced: bool  # it did not end in its grace and was killed
    begun: float
    ended: float
    grace_s: float
    stop_s: float | None  # seconds from the stop request to the end
    launcher: bool
    struck: bool
    loaded: frozenset[int] = frozenset()  # ranks that read a checkpoint before their first step
    hung: bool = False  # it did no step for so long that it was killed
    repeated: frozenset[int] = frozenset()  # steps that it printed with more than one loss
    printed: tuple[str, ...] = ()  # its lines that hold numbers, progress bars left out
    left: tuple[int, ...] = ()  # processes that would not die
    versions: Mapping[str, str] = field(default_factory=dict)  # of Python and packages in the program; empty: not seen
    reached: int = 0  # the last step of the run that it began; of an attempt in a copy of the run
    before: str = ""  # the strike that it was to recover from

    @property
    def clear_losses(self) -> dict[int, float]:
        """Losses that can be compared: where a counter restarts each epoch, a number names several steps."""
        return {step: loss for step, loss in self.losses.items() if step not in self.repeated}


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """What became of a save whose disk was struck."""

    way: str  # how it was struck, in words
    went_on: bool = False  # it trained on after the save that could not be written
    refused: str | None = None  # the error of torch.save or save_file; None: none was seen
    told: str | None = None  # a line of its log about it
    through: tuple[str, ...] = ()  # files that were written all the same
    lost: tuple[str, ...] = ()  # by a power cut, those of the newest checkpoint first
    unseen: tuple[str, ...] = ()  # of the newest checkpoint: whether they were fsynced was not seen
    of: int = 0  # files of the newest checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """One strike and what came of it."""

    strike: Strike
    reached: bool
    died_at: int | None  # steps that were certainly done; None: it went on
    resumes: tuple[Resume, ...] = ()
    hit: Attempt | None = None  # in a copy of the run: the attempt that was struck
    branch: Attempt | None = None  # and its resume
    skipped: str | None = None  # why there was nothing to strike here
    damaged: str | None = None  # file
    newest: int | None = None  # step of the newest checkpoint when it was damaged
    unsure: int | None = None  # step of a newer save in the background, which may have been the newest checkpoint
    older: int = 0  # checkpoints beside the damaged one
    older_step: int | None = None  # step of the newest save before the one that a power cut struck
    storage: Storage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is drilled, and how."""

    spec: JobSpec  # with a command, on one node
    again: tuple[str, ...] | None = None  # the command of every start but the first; None: the same
    work: Path | None = None  # its files; None: none
    links: tuple[str, ...] = ()
    strikes: tuple[str, ...] = tuple(plans.STRIKES)
    seed: int = 0
    # As root: a full and a read-only disk are mounts, which only what the drill itself starts can see.
    own_mounts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """Two undisturbed runs, and what they have shown of the program."""

    first: Attempt
    second: Attempt
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Result of a drill."""

    setup: Setup
    shape: Shape | None  # None: the undisturbed runs could not be compared
    planned: tuple[Strike, ...]
    struck: tuple[Struck, ...]
    left_out: Mapping[str, str]
    results: tuple[CheckResult, ...]
    reference: Attempt | None  # None: it was interrupted before its first run had ended
    attempts: tuple[Attempt, ...]
    begun: float  # seconds since 1970
    took_s: float
    references: References | None = None  # of a drill that came to its strikes
    interrupted: bool = False

    @property
    def overall(self) -> Overall:
        return judge_overall(self.results, planned=[result.check for result in self.results])

    @property
    def tally(self) -> Tally:
        return count(self.struck, self.planned)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Strikes of a drill by their names: one of two kills (`twice`) is one strike."""

    done: int
    skipped: int  # nothing was there to be struck
    missed: tuple[Strike, ...]

    @property
    def planned(self) -> int:
        return self.done + len(self.missed)


def count(struck: Sequence[Struck], planned: Sequence[Strike]) -> Tally:
    """How many of the planned strikes happened."""
    skipped = {one.strike.name for one in struck if one.skipped}
    reached = {one.strike.name for one in struck} - {one.strike.name for one in struck if not one.reached}
    missed = tuple(strike for strike in planned if strike.name not in reached | skipped)
    return Tally(done=len(planned) - len(missed) - len(skipped), skipped=len(skipped), missed=missed)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM in a drill, of which nothing runs on. `proof`: what was found until then."""

    def __init__(self, proof: Proof) -> None:
        super().__init__()
        self.proof = proof
