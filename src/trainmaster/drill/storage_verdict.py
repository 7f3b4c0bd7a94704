"""Judgement of the strikes at the disk: a save that could not be written, and a power cut."""

from __future__ import annotations

from collections.abc import Sequence

from trainmaster.core.results import Finding, error, fail, ok
from trainmaster.drill.record import Storage, Struck

_DURABLE = (
    "a checkpoint had its final name, or `latest` named it, before its data was on the disk: fsync every file, then "
    "rename it, fsync its folder, and only then write `latest` and delete older ones (trainmaster examples "
    "drill-torchrun)"
)
_KEEP = (
    "write a new checkpoint beside the last good one, under another name; rename it and delete the older one only when "
    "it is whole"
)
_SAY = "let the error of a save end the program with an exit code other than 0, or print it at every failed save"


def judge(one: Struck, wrong: Sequence[str]) -> Finding:
    """`wrong`: what of the state that was loaded is not what the run had."""
    if not one.reached or one.storage is None or one.hit is None:
        return error("not reached", action="run more steps, with at least two saves after the last kill")
    if one.strike.name == "power":
        return power_cut(one, one.storage, wrong)
    return cannot_save(one, one.storage, wrong)


def cannot_save(one: Struck, storage: Storage, wrong: Sequence[str]) -> Finding:
    """The program ends with an error or tells of it, and the last good checkpoint is still there."""
    words, hit = storage.way, one.hit
    assert hit is not None
    if hit.hung:
        return fail(f"{words}: the program hung and was killed", action=_SAY)
    if storage.through:
        return error(
            f"{words}: {storage.through[0]} was written all the same, so no save failed",
            action="drill as a user that is not root, with saves by the training processes themselves",
        )
    if fault := _resume(one, wrong):
        return fail(f"{words}: {fault}", action=_KEEP)
    if one.branch is None:
        return error(f"{words}: its resume was not seen", action="drill again")
    went_on_from = f"then went on from step {min(resume.base for resume in one.resumes)}"
    if not storage.went_on:
        code = next((code for code in hit.codes if code), 0)
        return ok(f"{words}: the program ended with {code}, {went_on_from}")
    if storage.told is not None:
        return ok(f"{words}: the program trained on and said so ({storage.told!r}), {went_on_from}")
    if storage.refused is None:
        return error(
            f"{words}: the program trained on, and no save was seen to fail",
            action="save by torch.save or safetensors for the drill, so that their errors are seen",
        )
    return fail(
        f"{words}: the save failed ({storage.refused}), and the program trained on without a word: nothing is saved "
        "any more, and nobody knows",
        action=_SAY,
    )


def power_cut(one: Struck, storage: Storage, wrong: Sequence[str]) -> Finding:
    """What was said to be saved is there, or is passed over for the checkpoint before it."""
    words, many = storage.way, len(storage.lost)
    files = "1 file was" if many == 1 else f"{many} files were"
    lost = f"{files} not fsynced{', as' if many > 1 else ':'} {storage.lost[0]}" if storage.lost else "all was fsynced"
    if fault := _resume(one, wrong, older=one.older_step):
        return fail(f"{words}: {lost}; {fault}", action=_DURABLE if storage.lost else _KEEP)
    if one.branch is None:
        return error(f"{words}: its resume was not seen", action="drill again")
    start = min(resume.base for resume in one.resumes)
    if storage.unseen:
        return error(
            f"{words}: whether {len(storage.unseen)} of {storage.of} files of the newest checkpoint were fsynced was "
            f"not seen, as {storage.unseen[0]}: written by code that is not Python, or through mmap",
            action="ask that library for durable writes; nothing is known here of what a power cut leaves",
        )
    if start < (one.newest or 0):
        return ok(f"{words}: {lost}; the newest checkpoint was passed over, went on from step {start}")
    return ok(f"{words}: {lost}; went on from step {start}, the newest save")


def _resume(one: Struck, wrong: Sequence[str], older: int | None = None) -> str | None:
    """What is wrong with the start after it, when the disk is as it was. `older`: the step it may fall back to."""
    if one.branch is None:
        return None
    if one.branch.hung:
        return "at its next start the program hung and was killed"
    if not one.resumes:
        code = next((code for code in one.branch.codes if code), 0)
        return (
            f"the program did not start again: exit code {code}, {one.branch.message}"
            if code
            else "at its next start the program ended with 0 and trained nothing"
        )
    least = one.newest if older is None else older
    starts = [resume.start for resume in one.resumes]
    if 0 in starts and least:
        return f"the run began at step 0, although step {least} was saved before"
    if late := [start for start in starts if start is not None and start < (least or 0)]:
        return f"the run went on from step {late[0]}, although step {least} was saved before"
    return wrong[0] if wrong else None
