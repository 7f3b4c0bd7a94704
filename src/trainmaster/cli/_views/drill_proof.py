"""The report of a drill of our trainer, out of its proof."""

from __future__ import annotations

import contextlib
import platform
from importlib import metadata
from typing import TYPE_CHECKING, Any

from trainmaster import __version__
from trainmaster.cli._views import drill_report
from trainmaster.cli._views.drill_report import Report, points
from trainmaster.core.schema import to_plain

if TYPE_CHECKING:
    from trainmaster.train.drill.run import Proof, Row

_HEAD = ("kill", "who and where", "died at", "lost", "at most", "resumed from")
_DOES = {
    "strikes": "every kill happened",
    "start": "nothing began at step 0 silently",
    "acknowledged": "what was said to be saved was there",
    "bound": "never more lost than stated",
    "losses": "same ranks: losses bit-equal",
    "other ranks": "other ranks: losses close",
    "samples": "each sample once, in order",
    "damage": "the damaged checkpoint was refused",
    "end": "the run came to its end",
    "in place": "killed ranks went on in place",
    "processes": "no process is left",
}


def report(proof: Proof) -> Report:
    """Everything that was found, to be shown and saved."""
    return Report(
        overall=proof.overall,
        sentence=_sentence(proof),
        setting=_setting(proof),
        head=_HEAD,
        words=("who and where", "resumed from"),
        rows=_rows(proof),
        claims=[(_DOES[result.check], result.findings[0]) for result in proof.results],
        undisturbed=proof.reference.losses if proof.reference else {},
        struck=[attempt.losses for attempt in proof.attempts],
        marks=[row.died_at for row in proof.rows if row.died_at is not None],
        document=_document(proof),
        interrupted=proof.interrupted,
        made=drill_report.describe_making(proof.begun, _versions()),
    )


def _document(proof: Proof) -> dict[str, Any]:
    return {
        "overall": proof.overall,
        "interrupted": proof.interrupted,
        "at": drill_report.stamp(proof.begun),
        "versions": {"trainmaster": __version__, **_versions()},
        "took_s": round(proof.took_s, 1),
        "seed": proof.plan.seed,
        "steps": proof.plan.config.steps,
        "ranks": proof.plan.attempts[0].ranks,
        "other_ranks": proof.plan.other,
        "changes": list(proof.plan.changes),
        "kills": [
            {
                "place": row.planned.kill.place,
                "planned_step": row.planned.kill.step,
                "rank": row.planned.kill.rank,
                "reached": row.reached,
                "died_at": row.died_at,
                "lost_steps": row.resume.lost if row.resume and row.resume.began else None,
                "bound_steps": row.resume.bound if row.resume else None,
                "resumed_from": row.resume.resumed_from if row.resume else None,
                "tier": row.resume.tier if row.resume else None,
                "newest_damaged": row.resume.damaged if row.resume else None,
            }
            for row in proof.rows
            if row.planned.kill is not None
        ],
        "claims": [to_plain({"claim": result.check, **to_plain(result.findings[0])}) for result in proof.results],
        "losses": {
            "undisturbed": points(proof.reference.losses) if proof.reference else [],
            "struck": [
                {"ranks": attempt.ranks, "resumed_from": attempt.resumed_from, "losses": points(attempt.losses)}
                for attempt in proof.attempts
            ],
        },
    }


def _versions() -> dict[str, str]:
    """Of this Python, which is that of the ranks."""
    known = {"python": platform.python_version()}
    with contextlib.suppress(metadata.PackageNotFoundError):  # one that was not installed by a package
        known["torch"] = metadata.version("torch")
    return known


def _rows(proof: Proof) -> list[tuple[str, ...]]:
    from trainmaster.train.drill.judge import allowed_for_damage

    allowed = allowed_for_damage(proof.plan.config.checkpoint.every_steps)
    return [_cells(number, row, allowed) for number, row in enumerate(proof.rows, 1)]


def _cells(number: int, row: Row, allowed: int) -> tuple[str, ...]:
    if not row.reached:
        return (str(number), str(row.planned.kill), "not reached", "", "", "")
    resume = row.resume
    # One that died while it resumed has no step of its own: the frontier is that of the attempt before it.
    died = str(resume.died_at if resume else row.died_at)
    if resume is None:
        return (str(number), str(row.planned.kill), died, "", "", "not resumed")
    if not resume.began:
        return (str(number), str(row.planned.kill), died, "", "", "killed again while it resumed")
    bound = "not stated" if resume.bound is None else str(resume.bound)
    source = "step 0" if resume.resumed_from is None else f"step {resume.resumed_from}, {resume.tier}"
    hurt = ""
    if resume.damaged:
        hurt = "; the newest was damaged"
        bound += f" + {allowed}" if resume.bound is not None else ""
    return (str(number), str(row.planned.kill), died, str(resume.lost), bound, f"{source}{hurt}")


def _sentence(proof: Proof) -> str:
    reached = sum(row.reached for row in proof.rows)
    done = proof.attempts[-1].last_step if proof.attempts else 0
    cut = "interrupted: " if proof.interrupted else ""
    return (
        f"{cut}{reached} of {len(proof.rows)} kills, {len(proof.attempts)} attempts, step {done} of "
        f"{proof.plan.config.steps} reached, in {proof.took_s:.0f} s"
    )


def _setting(proof: Proof) -> str:
    plan = proof.plan
    changed, first = "; ".join(plan.changes) or "nothing", plan.attempts[0].ranks
    return (
        f"{plan.config.steps} steps on {first} {'rank' if first == 1 else 'ranks'}, "
        f"the last attempt on {plan.attempts[-1].ranks}; a save every {plan.config.checkpoint.every_steps} steps; "
        f"seed {plan.seed}. Changed for the drill: {changed}."
    )
