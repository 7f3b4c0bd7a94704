"""The report of a drill of any program, out of its proof."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from trainmaster import __version__
from trainmaster.cli._views import drill_report
from trainmaster.cli._views.drill_report import Report, points
from trainmaster.core.results import Verdict
from trainmaster.core.schema import to_plain

if TYPE_CHECKING:
    from trainmaster.drill.record import Proof, Struck

_HEAD = ("strike", "what", "done", "saved", "resumed from", "lost")
DOES = {
    "reference": "undisturbed, twice",
    "witness": "every step was seen",
    "strikes": "every strike happened",
    "restart": "it starts again by itself",
    "start": "nothing began at step 0 silently",
    "lost": "it goes on from the newest save",
    "weights": "weights",
    "optimizer": "optimizer state",
    "hyperparameters": "weight decay and other hyperparameters",
    "schedule": "learning rate",
    "scaler": "loss scale (GradScaler)",
    "averages": "averaged weights (AveragedModel)",
    "random": "random numbers",
    "data": "place in the data",
    "accumulation": "gradient accumulation",
    "ranks": "all ranks alike",
    "buffers": "buffers (BatchNorm statistics)",
    "saved": "what it saves next",
    "losses": "the same run as undisturbed",
    "printed": "the numbers that it prints",
    "truncated": "a truncated checkpoint",
    "flipped": "a flipped bit",
    "missing": "a missing file",
    "unfinished": "`latest` naming an unfinished checkpoint",
    "other ranks": "another number of ranks",
    "power": "a power cut",
    "full": "a full disk",
    "readonly": "a read-only folder",
    "stop": "SIGTERM",
    "end": "the run came to its end",
    "processes": "no process is left",
}


def report(proof: Proof) -> Report:
    """Everything that was found, to be shown and saved."""
    return Report(
        overall=proof.overall,
        sentence=_sentence(proof),
        setting=_setting(proof),
        head=_HEAD,
        words=("what",),
        rows=_rows(proof),
        made=drill_report.describe_making(proof.begun, _versions(proof)),
        claims=[(DOES[result.check], result.findings[0]) for result in proof.results],
        undisturbed=proof.reference.losses if proof.reference else {},
        struck=[attempt.losses for attempt in proof.attempts],
        marks=[one.died_at for one in proof.struck if one.died_at is not None and not (one.branch or one.hit)],
        document=_document(proof),
        repeat=_repeat(proof),
        interrupted=proof.interrupted,
        left_out=[f"{name} ({why})" for name, why in _left_out(proof).items()],
    )


def _document(proof: Proof) -> dict[str, Any]:
    from trainmaster.drill.plan import NOT_SEEN, NOT_TRIED

    return {
        "overall": proof.overall,
        "interrupted": proof.interrupted,
        "at": drill_report.stamp(proof.begun),
        "took_s": round(proof.took_s, 1),
        "versions": {"trainmaster": __version__, **_versions(proof)},
        "seed": proof.setup.seed,
        "command": list(proof.setup.spec.command or ()),
        "resume_command": None if proof.setup.again is None else list(proof.setup.again),
        "steps": proof.shape.steps if proof.shape else None,
        "saves": list(proof.shape.saves) if proof.shape else [],
        "ranks": proof.shape.world if proof.shape else None,
        "strikes": [
            {
                "name": one.strike.name,
                "what": str(one.strike),
                "rank": one.strike.rank,
                "reached": one.reached,
                "done_steps": one.died_at,
                "damaged": one.damaged,
                "skipped": one.skipped,
                "resumes": [
                    {
                        "rank": resume.rank,
                        "newest_save": resume.newest,
                        "resumed_from": resume.start,
                        "lost_steps": resume.lost,
                    }
                    for resume in one.resumes
                ],
            }
            for one in proof.struck
        ],
        "counts": {"planned": proof.tally.planned, "done": proof.tally.done, "left_out": len(_left_out(proof))},
        "left_out": _left_out(proof),
        "not_tried": NOT_TRIED,
        "not_seen": NOT_SEEN,
        "claims": [to_plain({"claim": result.check, **to_plain(result.findings[0])}) for result in proof.results],
        "losses": {
            "undisturbed": points(proof.reference.losses) if proof.reference else [],
            "struck": [{"after": attempt.before, "losses": points(attempt.losses)} for attempt in proof.attempts],
        },
    }


def _repeat(proof: Proof) -> list[str]:
    """This drill once more, and the strikes alone whose claims failed or could not be judged."""
    setup = proof.setup
    words = ["trainmaster", "drill", "--seed", str(setup.seed)]
    if setup.spec.resources.processes_per_node > 1:
        words += ["--processes", str(setup.spec.resources.processes_per_node)]
    if setup.again is not None:
        words += ["--resume-command", shlex.join(setup.again)]
    for name in setup.links:
        words += ["--link", name]
    env = [f"{name}={value}" for name, value in setup.spec.env.items()]
    command = ["--", *(["env", *env] if env else []), *(setup.spec.command or ())]
    alone = [name for name in setup.strikes if _is_bad(proof, name)]
    return [shlex.join([*words, *strikes, *command]) for strikes in ([], *(["--strike", name] for name in alone))]


def _is_bad(proof: Proof, name: str) -> bool:
    claims = {"term": "stop", "saving": "restart", "ranks": "other ranks"}
    bad = (Verdict.FAIL,) if proof.interrupted else (Verdict.FAIL, Verdict.ERROR)
    return any(result.check == claims.get(name, name) and result.findings[0].verdict in bad for result in proof.results)


def _versions(proof: Proof) -> dict[str, str]:
    return dict(proof.reference.versions) if proof.reference else {}


def _left_out(proof: Proof) -> dict[str, str]:
    """Strikes that were not done, each with why: the program has no place for them, or there was nothing to strike."""
    return {**proof.left_out, **{one.strike.name: one.skipped for one in proof.struck if one.skipped}}


def _rows(proof: Proof) -> list[tuple[str, ...]]:
    """A row for each kill; two of one strike have its number, and one that was left out has none."""
    names = list(dict.fromkeys(one.strike.name for one in proof.struck if not one.skipped))
    rows = []
    for place, one in enumerate(proof.struck):
        number = "" if one.skipped else str(names.index(one.strike.name) + 1)
        again = any(other.strike.name == one.strike.name for other in proof.struck[:place])
        rows.append(_cells(number, f"the second SIGKILL of strike {number}" if again else str(one.strike), one))
    return rows


def _cells(number: str, what: str, one: Struck) -> tuple[str, ...]:
    if not one.reached:
        return (number, what, "left out" if one.skipped else "not reached", "", "", "")
    if one.died_at is None:
        return (number, what, "", "", "went on", "")
    done = str(one.died_at)
    if not one.resumes:
        ended = "did not start again"
        if one.branch is None:
            ended = "ran to its end" if one.hit is not None else ended
        elif set(one.branch.codes) == {0}:
            ended = "ended with 0, without a step"
        return (number, what, done, "", ended, "")
    resume = one.resumes[0]
    starts = sorted({"no step of the run" if r.start is None else str(r.start) for r in one.resumes})
    saved = "nothing" if resume.newest is None else str(resume.newest)
    return (number, what, done, saved, " and ".join(starts), str(resume.lost))


def _sentence(proof: Proof) -> str:
    cut = "interrupted: " if proof.interrupted else ""
    if not proof.struck:
        none = "no strike was run to its end" if cut else "nothing was struck"
        return f"{cut}{none}, in {proof.took_s:.0f} s"
    tally = proof.tally
    apart = f", {many} left out" if (many := len(_left_out(proof))) else ""
    done = f"{tally.done} of {tally.planned} strikes run{apart}"
    return f"{cut}{_failed(proof)}{done}, {_attempts(proof)}, in {proof.took_s:.0f} s"


def _attempts(proof: Proof) -> str:
    many = len(proof.attempts)  # folders are numbered with those of the undisturbed runs and of copies
    return f"{many} attempt{'s' * (many != 1)} of the struck run"


def _failed(proof: Proof) -> str:
    """What fails, and whether that is the resume itself or only what a bad disk does to its checkpoints."""
    from trainmaster.drill.plan import DAMAGE, STORAGE

    bad = [result.check for result in proof.results if result.verdict is Verdict.FAIL]
    if not bad:
        return ""
    words = f"{len(bad)} claim{'s fail' if len(bad) > 1 else ' fails'} ({'; '.join(DOES[name] for name in bad)})"
    of_disk = (*DAMAGE, *STORAGE)
    resume = [result.verdict for result in proof.results if result.check not in of_disk]
    doubt = any(result.check == "printed" and result.verdict is Verdict.WARN for result in proof.results)
    if proof.interrupted or doubt or any(verdict in (Verdict.FAIL, Verdict.ERROR) for verdict in resume):
        return f"{words}. "
    return f"it resumes right, but is not safe against a damaged or failing disk: {words}. "


def _setting(proof: Proof) -> str:
    from trainmaster.drill.plan import NOT_SEEN, NOT_TRIED

    words = shlex.join(proof.setup.spec.command or ())
    shape = ""
    if proof.shape is not None:
        ranks = "1 rank" if proof.shape.world == 1 else f"{proof.shape.world} ranks"
        shape = f"; {proof.shape.steps} steps on {ranks}, saves after {_few(proof.shape.saves)}"
    left = "".join(f" Left out: {name} ({why})." for name, why in _left_out(proof).items())
    return f"{words}{shape}; seed {proof.setup.seed}.{left} Not tried: {NOT_TRIED}. Not seen: {NOT_SEEN}."


def _few(steps: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, steps[:6]))
    return f"{shown}, …, {steps[-1]}" if len(steps) > 6 else shown or "none"
