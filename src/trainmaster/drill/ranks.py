"""Another number of ranks: the same job on half as many, where its command tells how many there are."""

from __future__ import annotations

import re
from dataclasses import replace

from trainmaster.core.results import Finding, error, fail, ok, warn
from trainmaster.core.spec import JobSpec
from trainmaster.drill.lives import Resume
from trainmaster.drill.record import Struck

# torchrun's (both spellings), and that of `accelerate launch`.
_OPTION = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes)(?:=(\d+))?")


def halve(spec: JobSpec) -> tuple[JobSpec, int] | None:
    """The job on half as many ranks, and their number; None where it has one rank, or does not tell."""
    own = spec.resources.processes_per_node
    if own > 1:
        return replace(spec, resources=replace(spec.resources, processes_per_node=own // 2)), own // 2
    words = list(spec.command or ())
    for place, word in enumerate(words):
        found = _OPTION.fullmatch(word)
        if found is None:
            continue
        apart = found[1] is None
        many = words[place + 1] if apart and place + 1 < len(words) else found[1]
        if many is None or not many.isdecimal() or int(many) < 2:
            return None
        fewer = str(int(many) // 2)
        words[place + apart] = fewer if apart else word.replace(f"={many}", f"={fewer}")
        return replace(spec, command=tuple(words)), int(fewer)
    return None


def judge(one: Struck, printed: int | None) -> Finding:
    """It goes on from the newest step, or says that it cannot. `printed`: the step that its log begins after.

    Losses and data are not compared: with the same batch for each rank, a step is made of fewer samples. Nor is the
    optimizer's state, of which each rank may keep a part; that it is empty is seen.
    """
    if not one.reached or one.branch is None:
        return error("not reached", action="run more steps")
    if one.branch.hung:
        return fail("the program hung and was killed", action=_SHARDS)
    if not one.resumes:
        code = next((code for code in one.branch.codes if code), 0)
        if code == 0:
            return fail("the program ended with 0 and trained nothing", action=_SHARDS)
        return warn(f"the program ended with {code}: the run needs as many ranks as before", action=_SHARDS)
    starts = {printed if resume.start is None else resume.start for resume in one.resumes}
    if 0 in starts and one.newest:
        return fail(f"the run began at step 0, although step {one.newest} was saved", action=_SHARDS)
    if None in starts:
        return error(
            "which step it went on from was not seen: its weights are those of no rank of the run",
            action="print the step with its loss, once a step; the weights of shards cannot be compared",
        )
    if len(starts) > 1:
        told = " and ".join(str(start) for start in sorted(start or 0 for start in starts))
        return fail(f"ranks went on from steps {told}", action=_SHARDS)
    start = starts.pop()
    if (start or 0) < (one.newest or 0):
        return fail(f"it went on from step {start}, although step {one.newest} was saved", action=_SHARDS)
    if any(_is_empty(resume) for resume in one.resumes):
        return fail("the state of the optimizer is empty: momentum begins anew", action=_SHARDS)
    many = len(one.resumes)
    return ok(f"went on from step {start}, on {many} rank{'s' * (many > 1)}")


def _is_empty(resume: Resume) -> bool:
    held = resume.planned(resume.base + 1)
    return held is not None and held.state is not None and resume.lines[0].state is None


_SHARDS = (
    "save what every rank needs in a form that any number of ranks can load (torch.distributed.checkpoint, or one file "
    "of the whole model and optimizer), and stop with an error where the number does not fit"
)
