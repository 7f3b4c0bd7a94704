"""What is common to the judgements of a drill: what the undisturbed runs share, and which resumes can be judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trainmaster.core.results import Finding, error, ok
from trainmaster.drill.lives import Resume
from trainmaster.drill.record import Attempt
from trainmaster.drill.witness_log import Life, Line

SEE_STRIKES = "see which strikes happened, and whether the program started again after them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What the two undisturbed runs have in common: only that can be asked of a resume."""

    repeatable: bool  # every weight of every step was bit-equal
    random: frozenset[str]  # generators whose state was the same
    data: bool  # every batch was the same
    source: str | None  # the data set that is trained on; None: no DataLoader was seen
    ids: bool  # the program tells its samples itself
    counts: bool = True  # every step was made of as many batches
    told: bool = True  # the samples that it told were the same
    buffers: bool = False  # those of every step were the same
    saved: frozenset[str] = frozenset()  # entries of checkpoints that were the same in every save

    @property
    def order(self) -> bool:
        """The order of the data was the same: samples that are told may be augmented to other batches."""
        return self.told if self.ids else self.data


def make_ground(first: Attempt, second: Attempt) -> Ground:
    """What two undisturbed runs have in common."""
    pairs = [
        (line, other)
        for one, two in zip(_by_rank(first), _by_rank(second), strict=False)
        for line, other in zip(one.lines, two.lines, strict=False)
    ]
    sources = Counter(source for line, _ in pairs for source, _ in dict.fromkeys(line.batches))
    return Ground(
        repeatable=all(line.weights == other.weights for line, other in pairs),
        random=frozenset(
            name
            for name in ("python", "torch", "numpy", "cuda")
            if pairs
            and name in pairs[0][0].random
            and all(line.random.get(name) == other.random.get(name) for line, other in pairs)
        ),
        data=all(line.batches == other.batches for line, other in pairs),
        counts=all(_count(line) == _count(other) for line, other in pairs),
        told=all(line.ids == other.ids for line, other in pairs),
        source=sources.most_common(1)[0][0] if sources else None,
        ids=any(line.ids for line, _ in pairs),
        buffers=all(line.buffers == other.buffers for line, other in pairs),
        saved=_alike(pairs),
    )


def _count(line: Line) -> Counter[str]:
    return Counter(source for source, _ in line.batches)


def _alike(pairs: Sequence[tuple[Line, Line]]) -> frozenset[str]:
    """Entries of checkpoints that both runs saved bit-equal after every step."""
    names = {name for line, _ in pairs for name, _ in line.saved}
    other = {name for line, twin in pairs for name, _ in line.saved ^ twin.saved}
    return frozenset(names - other)


def placed(resumes: Sequence[Resume]) -> list[Resume]:
    """Resumes that went on from a checkpoint; of one that began at step 0 there is nothing more to say."""
    return [resume for resume in resumes if not resume.restarted and (resume.newest is not None or resume.start)]


def enough(judged: Sequence[Resume], words: str, *, compared: int | None = None) -> Finding:
    """Passed, where something was seen. `compared`: of how many resumes it is known what they should have held."""
    if not judged:
        return error("no resume from a checkpoint was seen", action=SEE_STRIKES)
    if compared == 0:
        return error(
            f"not judged: what the run held there is not known for any of {len(judged)} resumes",
            action="run more steps, with at least two between saves, so that the run is struck a step after a save",
        )
    many = len(judged) if compared is None else compared
    return ok(f"{many} resume{'s' * (many > 1)}: {words}")


def count_known(judged: Sequence[Resume]) -> int:
    """Of how many resumes it is known what the run held before the first step."""
    return sum(resume.held(resume.base + 1) is not None for resume in judged)


def pairs_after(resume: Resume) -> list[tuple[Line, Line]]:
    """The steps after the first one, each with the same step of the run before or of the undisturbed run."""
    numbered = ((line, resume.held(resume.base + number)) for number, line in enumerate(resume.lines[1:], 2))
    return [(line, held) for line, held in numbered if held is not None]


def equal(pairs: Sequence[tuple[Line, Line]]) -> bool:
    return all(line.weights == held.weights for line, held in pairs)


def same_after(resume: Resume) -> bool:
    """Weights of the steps after the first one: some are known, and all are bit-equal."""
    pairs = pairs_after(resume)
    return len(pairs) > 0 and equal(pairs)


def _by_rank(attempt: Attempt) -> list[Life]:
    return sorted(attempt.lives, key=lambda life: life.rank)
