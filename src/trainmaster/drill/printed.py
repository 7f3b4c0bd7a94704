"""Numbers that a program prints after a resume, beside those of the undisturbed run: they tell of state that nothing
else does, as a moving average that the script keeps by itself and no checkpoint holds.

Only what both undisturbed runs print alike can be asked: times, rates, paths and process ids differ between them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainmaster.core.results import Finding, error, ok, warn
from trainmaster.drill.ground import Ground
from trainmaster.drill.lives import Resume
from trainmaster.drill.losses import near
from trainmaster.drill.record import Attempt

NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?!0x)(?:nan\b|inf\b|\d+(?:[,_]\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?)", re.I
)
# Dates and times of day; and paths, which hold the folder of each run.
_MASKED = re.compile(r"(?<!\w)(?:/[\w.@%+-]+){2,}|\d{4}[-/]\d\d[-/]\d\d|\b\d{1,2}:\d\d(?::\d\d)?(?:[.,]\d+)?\b")
_BETWEEN = re.compile(r"[,;|(){}\[\]\t]")
# What the machine and the moment make, equal in two runs by chance; by the words before a number, or its unit after it.
_OF_MACHINE = re.compile(
    r"(?<![a-z])(?:time(?!step)|runtime|elapsed|took|duration|latency|wall|throughput|speed|memory|utili[sz]ation|"
    r"seconds|minutes|hours|(?:eta|dt|ms|secs?|mem|pid|port|mfu|tps|util|date|per[ _]s(?:ec(?:ond)?)?)(?![a-z]))|"
    r"/s(?:ec\w*)?\b",
    re.I,
)
_UNIT = re.compile(
    r"\s?(?:(?:[num]?s|secs?|seconds?|mins?|minutes?|h|hrs?|hours?|[kmgt]i?b|bytes)\b(?!\s*[:=]?\s*[-+.\d])|"
    r"\S*\s?(?:/|per )s(?:ec\w*)?\b)",
    re.I,
)
# What the words say to be of this process alone.
_OF_PROCESS = re.compile(
    r"(?:this|own|per|each|current) (?:process|session|attempt|start|launch)|restart|resum|attempt|"
    r"since (?:the )?(?:start|launch|load)|(?<![a-z])start(?:ed|ing)?(?![a-z])|from (?:step|epoch|iter)",
    re.I,
)
_COUNTED_HERE = re.compile(
    r"\s*[a-z]*\s*(?:(?:in|of|by|on|for|during)\s+this\s+(?:process|session|attempt|start|launch)|since\b)|"
    r"\s*(?:restart|resume|attempt)s?\b(?!\s*[:=]?\s*\d)",
    re.I,
)
_PROGRESS = re.compile(r"(?<![a-z])(?:step|iter|iteration|it|epoch|update|batch)(?:e?s)?(?![a-z])", re.I)
_AVERAGE = re.compile(r"(?<![a-z])(?:avg|averaged?|mean|running|smooth|smoothed)(?![a-z])", re.I)
_LOSS = re.compile(r"loss", re.I)
_TRAINER = "train_runtime"  # the last line of Hugging Face's Trainer: its train_loss is a mean of this process's steps
_NOISE = 3.0  # as of losses
_MANY = 4  # lines of which numbers that grow tell which line is which, where neither a word nor whole numbers do
_CHANCE = "it is not saved, or it is of one process alone; or chance, since two undisturbed runs differ elsewhere"
_SHOWN = 60  # characters of the words before a number


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One printed line: its words, with NUL for each number, and the numbers."""

    words: str
    numbers: tuple[float, ...]
    written: tuple[str, ...]
    before: tuple[str, ...]  # the words that belong to each number
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Lines of the same words, as both undisturbed runs print them."""

    lines: tuple[Said, ...]
    index: tuple[int, ...]  # places of the numbers that count the lines; empty: nothing does
    keys: Mapping[tuple[float, ...], Said]  # the lines by these numbers
    asked: Mapping[int, float]  # place of a number that can be compared → how far it may be off

    def key(self, line: Said) -> tuple[float, ...]:
        return _key(line, self.index)

    def goes_on(self, line: Said) -> bool:
        """Whether this line is counted on from the middle."""
        return self.key(line) in self.keys and self.key(line) != self.key(self.lines[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Other:
    """A number that is not the undisturbed run's."""

    got: Said
    wanted: Said
    place: int
    where: str
    last: bool  # in a line that is printed once, at the end
    why: str | None  # what explains it in a program that resumes right; None: nothing does


def judge(
    first: Attempt,
    second: Attempt,
    attempts: Sequence[Attempt],
    resumes: Sequence[Resume],
    *,
    ground: Ground,
    noise: float | None,
    steps: int,
    losses_differ: bool,
) -> Finding | None:
    """Numbers printed after a resume are those of the undisturbed run. None: there is nothing to compare.

    `losses_differ`: printed losses of steps do, and were told; other numbers of these lines are made of them.
    """
    if len(attempts) < 2:
        return None
    kinds, unlike = _learn(first, second, attempts[0], ground=ground, noise=noise)
    last_loss = first.clear_losses.get(max(first.clear_losses, default=0))
    compared, others = 0, list[_Other]()
    for attempt, got, wanted, kind in _pairs(kinds, attempts):
        if losses_differ and kind.index:
            continue
        for place, bound in kind.asked.items():
            one, other = got.numbers[place], wanted.numbers[place]
            if losses_differ and other == last_loss:
                continue
            starts = {resume.base for resume in resumes if resume.strike == attempt.before}
            if not kind.index and other == 0 and one in starts:
                continue  # the step that it went on from
            compared += 1
            if not near(one, other, bound):
                done = (*kind.key(wanted), steps)
                why = _explain(got, wanted, place, starts, done) or (None if ground.repeatable or bound else _CHANCE)
                where = f"after {attempt.before}" if kind.index else "at its end"
                if kind.index:
                    where += f", in the line of {_name(wanted, kind.index[-1])},"
                others.append(_Other(got=got, wanted=wanted, place=place, where=where, last=not kind.index, why=why))
    if others:
        return _tell(others, compared)
    if not compared:
        return None
    left = f"; {unlike} that differ between the two undisturbed runs, as times, were not compared" if unlike else ""
    within = "" if ground.repeatable or noise is None else f", losses within {_NOISE * noise:.3g}"
    return ok(f"{compared} numbers that it prints after a resume are those of the undisturbed run{within}{left}")


def _tell(others: Sequence[_Other], compared: int) -> Finding:
    one = min(others, key=lambda other: (other.why is not None, not other.last))
    more = f" ({len(others)} of {compared} numbers differ)" if len(others) > 1 else ""
    got, wanted = _name(one.got, one.place), _name(one.wanted, one.place)
    words = f"{one.where} it prints `{got}`, and the undisturbed run `{wanted}`{more}"
    to_do = (
        "save what this number is made of (an average, a best value or a count that the script keeps) in the "
        "checkpoint, and load it; if it is of one process alone, print it with the words `this process`, and it is not "
        "compared"
    )
    if one.why is not None:
        return warn(f"{words}: {one.why}", action=to_do)
    return error(f"{words}: something is not saved, or it is of one process alone", action=to_do)


def _name(line: Said, place: int) -> str:
    """A number with the words before it; a whole line could hold what is nobody's business."""
    words = line.before[place][-_SHOWN:] or line.words.partition("\0")[0][-_SHOWN:]
    return f"{words} {line.written[place]}".strip()


def _pairs(kinds: Mapping[str, _Kind], attempts: Sequence[Attempt]) -> Iterator[tuple[Attempt, Said, Said, _Kind]]:
    """Lines after a resume, each beside that of the undisturbed run.

    A line of a step that was printed before the strike is not: what begins anew there, as an epoch, may tell it anew.
    Of lines that nothing counts, only the last one at the end of the run is, and none that is printed at each start.
    """
    printed = set[tuple[str, tuple[float, ...]]]()
    early = set[str]()
    for attempt in attempts:
        lines = [line for line in parse(attempt.printed) if line.words in kinds]
        first = {line.words: at for at, line in reversed([*enumerate(lines)])}
        last = {line.words: at for at, line in enumerate(lines)}
        middle = {words for words, at in first.items() if kinds[words].goes_on(lines[at])}
        went_on = min((first[words] for words in middle), default=None)  # what stands before is said at each start
        # Lines whose count begins anew with each process are of other steps.
        anew = {words for words, at in first.items() if (words, kinds[words].key(lines[at])) in printed} - middle
        ended = attempt is attempts[-1] and set(attempt.codes) == {0}
        for at, line in enumerate(lines):
            kind, place = kinds[line.words], (line.words, kinds[line.words].key(line))
            if kind.index:
                known = place in printed or line.words in anew or attempt is attempts[0]
                if not known and (wanted := kind.keys.get(place[1])) is not None:
                    yield attempt, line, wanted, kind
                printed.add(place)
            elif ended and last[line.words] == at and (line.words not in early if went_on is None else at > went_on):
                alike = any(all(one.numbers[a] == line.numbers[a] for a in kind.asked) for one in kind.lines)
                yield attempt, line, line if alike else kind.lines[-1], kind
        early |= set(last)


def _learn(
    first: Attempt, second: Attempt, begun: Attempt, *, ground: Ground, noise: float | None
) -> tuple[dict[str, _Kind], int]:
    """What both runs print alike, by its words, and how many numbers they do not. `begun`: the struck run up to its
    first strike, which is a third."""
    some, others, third = (_by_words(attempt) for attempt in (first, second, begun))
    trainer = any(_TRAINER in words for words in some)
    kinds, unlike = dict[str, _Kind](), 0
    for words, lines in some.items():
        twins = others.get(words, [])
        if len(lines) != len(twins) or _TRAINER in words:
            continue
        columns = range(len(lines[0].numbers))
        equal = [at for at in columns if all(near(a.numbers[at], b.numbers[at], 0.0) for a, b in _zip(lines, twins))]
        index = _index(lines, equal)
        keys = {_key(line, index): line for line in lines} if index else {}
        asked = {}
        for at in columns:
            label, after = lines[0].before[at], lines[0].after[at]
            if at in index or is_of_its_own(label, after) or (trainer and label.endswith("train_loss")):
                continue
            off = max((abs(a.numbers[at] - b.numbers[at]) for a, b in _zip(lines, twins)), default=0.0)
            if not ground.repeatable:
                if noise is not None and off <= noise and _LOSS.search(label):
                    asked[at] = _NOISE * noise
                elif at in equal and all(_is_whole(line, at) for line in lines):
                    asked[at] = 0.0  # a count
            elif at not in equal:
                unlike += len(lines)
            elif all(
                near(line.numbers[at], keys[_key(line, index)].numbers[at], 0.0)
                for line in third.get(words, [])
                if _key(line, index) in keys
            ):
                asked[at] = 0.0
        kinds[words] = _Kind(lines=tuple(lines), index=index, keys=keys, asked=asked)
    return kinds, unlike


def is_of_its_own(label: str, after: str) -> bool:
    """Whether a number is, by the words around it, a time, a rate or the like, or of one process alone."""
    return bool(
        _OF_MACHINE.search(label) or _UNIT.match(after) or _OF_PROCESS.search(label) or _COUNTED_HERE.match(after)
    )


def _index(lines: Sequence[Said], equal: Collection[int]) -> tuple[int, ...]:
    """Places of the numbers that count these lines: of a step, of an epoch and a batch, or else one that grows."""
    if len(lines) < 2:
        return ()

    def grows(places: Sequence[int]) -> bool:
        keys = [[line.numbers[place] for place in places] for line in lines]
        return all(a < b for a, b in itertools.pairwise(keys))

    named = [place for place in equal if _PROGRESS.search(lines[0].before[place])]
    whole = [place for place in equal if all(_is_whole(line, place) for line in lines)]
    ways = [(place,) for place in named] + [tuple(whole[:many]) for many in range(1, len(whole) + 1)]
    if len(lines) >= _MANY and len(lines[0].numbers) > 1:
        ways += [(place,) for place in equal]
    return next((way for way in ways if grows(way)), ())


def _explain(got: Said, wanted: Said, place: int, starts: Collection[int], done: Collection[float]) -> str | None:
    """What makes this number another one where nothing is lost, in words; None: nothing that is seen.

    `done`: how many steps the run may have done by then.
    """
    one, other = got.numbers[place], wanted.numbers[place]
    shares = (other * (many - start) / many for start in starts for many in done if start <= many and many > 0)
    if _is_whole(got, place) and _is_whole(wanted, place) and any(abs(one - share) <= 1 for share in shares):
        return "as much as this process alone did; or it is a count that is not saved"
    if _AVERAGE.search(wanted.before[place]):
        return "an average that begins anew with each process"
    return None


def parse(lines: Sequence[str]) -> Iterator[Said]:
    for text in lines:
        plain = _MASKED.sub("~", text)
        found = list(NUMBER.finditer(plain))
        if not found:
            continue
        ends = [0, *(number.end() for number in found)]
        gaps = [plain[a : number.start()] for a, number in zip(ends, found, strict=False)] + [plain[ends[-1] :]]
        before: list[str] = []
        for gap in gaps[:-1]:
            mean = before and gap.strip() == "("  # `Loss 2.31 (2.40)`
            before.append(f"average {before[-1]}" if mean else _BETWEEN.split(gap)[-1].strip(" '\":="))
        yield Said(
            words="\0".join(" ".join(gap.split()) for gap in gaps),
            numbers=tuple(float(number[0].replace(",", "").replace("_", "")) for number in found),
            written=tuple(number[0] for number in found),
            before=tuple(before),
            after=tuple(_BETWEEN.split(gap)[0].lstrip("'\"") for gap in gaps[1:]),
        )


def _by_words(attempt: Attempt) -> dict[str, list[Said]]:
    found: dict[str, list[Said]] = {}
    for line in parse(attempt.printed):
        found.setdefault(line.words, []).append(line)
    return found


def _key(line: Said, index: Sequence[int]) -> tuple[float, ...]:
    return tuple(line.numbers[place] for place in index)


def _is_whole(line: Said, place: int) -> bool:
    return not set(line.written[place]) - set("+-0123456789,_")


def _zip(lines: Sequence[Said], twins: Sequence[Said]) -> Iterator[tuple[Said, Said]]:
    return zip(lines, twins, strict=True)
