"""Judgement of the place in the data after a resume: which batches were read, and of how many a step was made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from trainmaster.core.results import Finding, Verdict, error, fail, ok, skip
from trainmaster.drill.ground import Ground, enough, pairs_after, placed, same_after
from trainmaster.drill.lives import Resume
from trainmaster.drill.witness_log import Line

_NO_ORDER = "two undisturbed runs read the samples in another order"
_SEED = (
    "seed the shuffle, for the drill at least (torch.manual_seed, or the generator of the DataLoader or its sampler): "
    "then the place in the data can be judged. Or call trainmaster.drill.sample(ids) with the samples of each step: "
    "over whole passes through the data it shows whether each sample is read once"
)
# Of so many resumes that draw an order of their own, one may be failed: a drill has about ten.
_BY_CHANCE = 100_000


def data(resumes: Sequence[Resume], ground: Ground, *, failed: bool = False) -> Finding:
    """Every batch after a resume is the one that the run would have read.

    `failed`: something else of the state was not restored, which changes the weights too.
    """
    judged, batches = placed(resumes), 0
    if judged and ground.source is None and not ground.ids:
        return _data_by_weights(judged, ground, failed=failed)
    if judged and not ground.order:
        return _data_of_no_order(judged, ground)
    for resume in judged:
        if found := _first_wrong_batch(resume, ground):
            return found
        batches += sum(len(_read(resume, number, ground)) for number in range(1, len(resume.lines) + 1))
    return enough(judged, f"data goes on where it was, {batches} batches")


def accumulation(resumes: Sequence[Resume], ground: Ground) -> Finding:
    """The first step after a resume is made of as many micro-batches as it would have been."""
    judged = placed(resumes)
    if judged and ground.source is None:
        return skip("no DataLoader: micro-batches are not told apart", proof="no batch was seen in any run")
    most, compared, unused = 1, 0, 0
    unknown: Resume | None = None
    for resume in judged:
        wanted, got = _wanted(resume, 1, ground), _read(resume, 1, ground)
        planned = resume.planned(resume.base + 1)
        most = max(most, len(wanted), len(_of_source(planned, ground)))
        lost = lost_in_the_middle(resume, ground)
        if lost and same_after(resume):  # a pass may leave out its last ones: their gradients are of no use
            unused += 1
        elif lost:
            return fail(
                f"after {resume.strike} step {resume.base + 1} was made of {_made_of(got, wanted, lost)}: "
                f"{lost} had been added to its gradients before the save, and were lost",
                action="the checkpoint was taken in the middle of gradient accumulation: save only after "
                "optimizer.step(), or save the gradients and the place in the step too",
            )
        if lost or (wanted and (ground.data or _is_alike(resume, 1, ground) or _begins(resume, 1, ground))):
            compared += 1
        elif wanted:
            unknown = unknown or resume
    if judged and most == 1:
        return skip("one batch a step: nothing is accumulated", proof="no step of the undisturbed run read two")
    if unknown:
        return error(
            f"after {unknown.strike} step {unknown.base + 1} was made of {len(_read(unknown, 1, ground))} batches, and "
            f"of {len(_wanted(unknown, 1, ground))} before, others or at other places of a pass: whether gradients "
            f"were lost is not known, because {_NO_ORDER}",
            action=_SEED,
        )
    without = (
        f"; in {unused}, fewer were read again than before the strike, without effect on any weight" if unused else ""
    )
    return enough(judged, f"first steps made of all {most} micro-batches{without}", compared=compared)


def lost_in_the_middle(resume: Resume, ground: Ground) -> int:
    """Micro-batches of the first step that were read before the save and not again."""
    wanted, got = _wanted(resume, 1, ground), _read(resume, 1, ground)
    for lost in range(1, len(wanted)):
        left = wanted[lost:]
        # The step is short, or filled up with the next ones.
        if got[: len(left)] == left and got != wanted:
            return lost
        if got[-len(wanted) :][: len(left)] == left and got[-len(wanted) :] != wanted:
            return lost
        if got[-len(left) :] == left and len(got) > len(left) and got[-len(wanted) :] != wanted:
            return lost
    ahead = _read_ahead(resume, ground)
    if wanted and ahead and not same_after(resume):
        wanted = _wanted(resume, 0, ground)[-ahead:] + wanted
        return next((lost for lost in range(1, len(wanted)) if got == wanted[lost:]), 0)
    return 0 if ground.data or not ground.counts else _fewer(resume, ground)


def _fewer(resume: Resume, ground: Ground) -> int:
    """Micro-batches that the first step lacks, where their order does not tell which.

    A pass may leave out its last ones: then the first step of every start is made of fewer than those after it.
    """
    first = len(_of_source(resume.reference.get(1), ground))
    wanted, got = len(_wanted(resume, 1, ground)), len(_read(resume, 1, ground))
    return wanted - got if 0 < got < min(wanted, first or wanted) else 0


def _read_ahead(resume: Resume, ground: Ground) -> int:
    """Batches that are read before they are needed: so many more before the first step than before each later one."""
    first, second, third = (
        sum(source == ground.source for source, _ in line.batches) if (line := resume.reference.get(step)) else 0
        for step in (1, 2, 3)
    )
    return max(0, first - second) if second == third else 0


def _made_of(got: Sequence[str], wanted: Sequence[str], lost: int) -> str:
    short = len(got) < len(wanted) or list(got) == list(wanted)  # else it was filled up with the next ones
    return f"{len(wanted) - lost if short else len(wanted)} micro-batches of {len(wanted)}"


def _data_by_weights(judged: Sequence[Resume], ground: Ground, *, failed: bool) -> Finding:
    # One that was struck again in its first step shows nothing; with two optimizers, in its second step too.
    shown = [resume for resume in judged if pairs_after(resume)]
    if shown and all(same_after(resume) for resume in shown):
        return ok(
            f"{len(shown)} resume{'s' * (len(shown) > 1)}: no DataLoader was seen; the weights after the resumes are "
            "those of the undisturbed run, which other data would have changed"
        )
    if failed and ground.repeatable:
        return error(
            "not judged: no DataLoader was seen, and the weights that would tell follow from what failed",
            action="mend first what failed",
        )
    why = "the weights are not repeatable enough to tell"
    if ground.repeatable:
        moved = next((resume for resume in shown if not same_after(resume)), None)
        why = f"the weights after {moved.strike} are others" if moved else "too few steps after a resume were seen"
    return error(
        f"no DataLoader was seen, and {why}", action="call trainmaster.drill.sample(ids) with the samples of each step"
    )


def _data_of_no_order(judged: Sequence[Resume], ground: Ground) -> Finding:
    """Two undisturbed runs read in another order: only what the run itself had read tells of the place.

    A pass through the data that begins anew may be drawn anew. In the middle of one, another order is a lost place, or
    a right one: it cannot be told.
    """
    shown = [resume for resume in judged if ground.ids or not lost_in_the_middle(resume, ground)]
    if judged and not shown:
        return error("not judged: the first step after each resume lost micro-batches", action="mend first what failed")
    alike = drawn = compared = 0
    unknown: Finding | None = None
    for resume in shown:
        compared += resume.own.get(resume.base + 1) is not None
        for number in range(1, len(resume.lines) + 1):
            held = resume.own.get(resume.base + number)
            if held is None:
                break
            if _is_alike(resume, number, ground):
                alike += 1
                continue
            if place := _place_in_own(resume, number, ground):
                return _wrong_data(resume, number, place)
            pass_ = _judge_pass(resume)
            if pass_ is not None and pass_.verdict is Verdict.FAIL:
                return pass_
            if pass_ or _is_drawn(resume, number, ground):
                drawn += 1
            else:
                unknown = unknown or _no_order(resume, number)
            break
    if unknown:
        return unknown
    if not alike + drawn:
        return error(f"{_NO_ORDER}, and no step was seen before and after a strike", action=_SEED)
    words = f"{alike} steps read the batches that the run had read there before the strike"
    if drawn:
        words += (
            f"; {drawn} resume{'s' * (drawn > 1)} began a pass through the data where the run did, or read each sample "
            "once in it, in an order of their own"
        )
    return enough(judged, f"{words} ({_NO_ORDER})", compared=compared)


def _judge_pass(resume: Resume) -> Finding | None:
    """Whether each sample is read once in the pass that the resume went on in. None: that cannot be told."""
    length = _pass_length([resume.reference[step].samples for step in sorted(resume.reference)])
    before = [resume.own.get(step) for step in range(1, resume.base + 1)]
    if not length or None in before:
        return None
    read = [sample for line in before if line is not None for sample in line.samples]
    begin = len(read) // length * length
    read += [sample for line in resume.lines for sample in line.samples]
    this = read[begin : begin + length]
    if twice := len(this) - len(set(this)):
        return fail(
            f"after {resume.strike} rank {resume.rank} read {twice} samples a second time in one pass through the "
            f"data, which reads {length}",
            action="another order was drawn in the middle of a pass: save the order of the pass, or the state of the "
            "sampler's generator at its begin, and how many samples of it were read",
        )
    return ok("each sample once") if len(this) == length else None


def _pass_length(steps: Sequence[Sequence[str]]) -> int:
    """Samples of one pass through the data: so many, again and again, are all different. 0: not known."""
    read = [sample for step in steps for sample in step]
    if not all(steps) or not read:
        return 0
    for length in range(min(len(set(read)), len(read) // 2), 0, -1):
        passes = [read[at : at + length] for at in range(0, len(read), length)]
        if all(len(set(one)) == len(one) for one in passes):
            # Where samples are drawn with replacement, only a few of them are different by chance.
            return length if 2 * length > len(set(read)) else 0
    return 0


def _no_order(resume: Resume, number: int) -> Finding:
    return error(
        f"after {resume.strike} rank {resume.rank} read other data in step {resume.base + number} than the run had "
        f"read there before; that cannot be judged, because {_NO_ORDER}",
        action=_SEED,
    )


def _is_alike(resume: Resume, number: int, ground: Ground) -> bool:
    if ground.ids:
        held = resume.own.get(resume.base + number)
        return held is not None and held.ids == resume.lines[number - 1].ids
    wanted, got = _wanted(resume, number, ground), _read(resume, number, ground)
    if number > 1:
        return got == wanted
    # Before the first ones some are read over, to come to the place; in the run's own history too.
    both = min(len(wanted), len(got))
    return got[len(got) - both :] == wanted[len(wanted) - both :] and (both > 0 or not wanted)


def _place_in_own(resume: Resume, number: int, ground: Ground) -> str | None:
    """Where else the run had read these very batches, one after the other; None: nowhere, or it may be by chance.

    All batches to the end of the pass are compared, as far as the run had read.
    """
    read = [one for line in resume.lines[number - 1 :] for one in _of_source(line, ground)]
    end = next((at for at, (_, place) in enumerate(read) if at and place == 1), len(read))
    got = [digest for digest, _ in read[:end]]
    flat, begins = _flat(resume.own, ground)
    right = begins.get(resume.base + number)
    if right is None:
        return None
    for place in range(len(flat)):
        both = min(len(got), len(flat) - place)
        if place != right and flat[place : place + both] == got[:both] and not _by_chance(flat, both, tries=len(flat)):
            return f"{abs(place - right)} batches were {'skipped' if place > right else 'read a second time'}"
    return None


def _by_chance(flat: Sequence[str], alike: int, *, tries: int = 1) -> bool:
    """So few of so many different batches, in this order, are drawn anew by a right resume of small data too."""
    different = len(set(flat))
    return math.perm(different, min(alike, different)) < _BY_CHANCE * tries


def _is_drawn(resume: Resume, number: int, ground: Ground) -> bool:
    """Whether the pass of this step began after the resume, in an order of its own; its first batches may be alike."""
    begun = next((one for one in range(number, 0, -1) if _begins(resume, one, ground)), None)
    if begun is None:
        return False
    for later in range(begun + 1, number + 1):
        lines = resume.own.get(resume.base + later), resume.lines[later - 1]
        held, got = ([place for _, place in _of_source(line, ground)] for line in lines)
        if held != got:
            return False
    flat, begins = _flat(resume.own, ground)
    return begun == number or _by_chance(flat, begins[resume.base + number] - begins[resume.base + begun])


def _begins(resume: Resume, number: int, ground: Ground) -> bool:
    """Whether a pass through the data began in this step, where it did in the run: it may be drawn anew.

    What is left of the pass before it is the same, and of the new one it reads the same places.
    """
    held = _of_source(resume.own.get(resume.base + number), ground)
    got = _of_source(resume.lines[number - 1], ground)
    if number == 1:  # more before is read over, to come to the place
        got = got[-len(held) :]
    begin = next((at for at, (_, place) in enumerate(held) if place == 1), None)
    if begin is None or len(got) != len(held):
        return False
    # A sampler that leaves out what was read counts its places from 1.
    left = [(one[0], other[0]) for one, other in zip(held[:begin], got[:begin], strict=True)]
    drawn = [(one[1], other[1]) for one, other in zip(held[begin:], got[begin:], strict=True)]
    return all(one == other for one, other in left + drawn)


def _of_source(line: Line | None, ground: Ground) -> list[tuple[str, int]]:
    """Batches of the data set that is trained on, each with its place in its pass; 0: not seen."""
    if line is None:
        return []
    places = line.places or (0,) * len(line.batches)
    return [
        (digest, place) for (source, digest), place in zip(line.batches, places, strict=True) if source == ground.source
    ]


def _first_wrong_batch(resume: Resume, ground: Ground) -> Finding | None:
    if ground.ids:
        for number, line in enumerate(resume.lines, 1):
            wanted = resume.planned(resume.base + number)
            if wanted is not None and wanted.ids != line.ids:
                return _wrong_data(resume, number, "the samples are not those of the undisturbed run")
        return None
    if lost_in_the_middle(resume, ground):
        return None  # told by `accumulation`
    for number in range(1, len(resume.lines) + 1):
        batches, got = _wanted(resume, number, ground), _read(resume, number, ground)
        # More before the first ones are read over, to come to the place.
        if batches and (got[-len(batches) :] if number == 1 else got) != batches:
            return _wrong_data(resume, number, _where(resume, number, ground))
    return None


def _where(resume: Resume, number: int, ground: Ground) -> str:
    """Where in the undisturbed run the batches stand that were read instead."""
    got = [digest for after in range(number, len(resume.lines) + 1) for digest in _read(resume, after, ground)][:16]
    flat, begins = _flat(resume.reference, ground)
    place = next((at for at in range(len(flat)) if flat[at : at + len(got)] == got), None) if got else None
    right = begins.get(resume.base + number)
    if place == 0:
        return "data began anew: its first batches are the first ones of the whole run, read a second time"
    if place is None or right is None:
        return "they stand nowhere in the undisturbed run in this order: the shuffle is another one"
    return f"{abs(place - right)} batches were {'skipped' if place > right else 'read a second time'}"


def _flat(lines: Mapping[int, Line], ground: Ground) -> tuple[list[str], dict[int, int]]:
    """Batches one after the other, and where those of each step begin."""
    flat: list[str] = []
    begins: dict[int, int] = {}
    for step, line in sorted(lines.items()):
        begins[step] = len(flat)
        flat += [digest for source, digest in line.batches if source == ground.source]
    return flat, begins


def _wrong_data(resume: Resume, number: int, words: str) -> Finding:
    return fail(
        f"after {resume.strike} rank {resume.rank} read other data in step {resume.base + number}: {words}",
        action="the place in the data is not saved or not restored: save epoch, batches done and the state of the "
        "sampler's generator (or use a StatefulDataLoader), and skip what was read",
    )


def _read(resume: Resume, number: int, ground: Ground) -> list[str]:
    line = resume.lines[number - 1]
    return [digest for source, digest in line.batches if source == ground.source]


def _wanted(resume: Resume, number: int, ground: Ground) -> list[str]:
    step = resume.base + number
    # In the run's own history a step may hold batches that were only read over, after an earlier resume.
    line = resume.reference.get(step) if ground.data else resume.own.get(step)
    return [] if line is None else [digest for source, digest in line.batches if source == ground.source]
