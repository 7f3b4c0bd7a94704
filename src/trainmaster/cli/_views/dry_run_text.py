"""The first lines of `submit --dry-run`: where a job would run, on how much, what, for how much, and how long."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainmaster.core.money.cost import dollars
from trainmaster.core.spec import JobSpec

_CHOICE = re.compile(r"^# choice: (.*)$", re.MULTILINE)  # of a target that rents machines

if TYPE_CHECKING:
    from trainmaster.targets import Submission


def summarize(job: JobSpec, plan: Submission, word: str, preview: str = "") -> dict[str, str]:
    """Six lines by their names, one for `queue:` where it is stated, and one for files that are not there.

    `word` is what the target stands for, `preview` what its provider offers now.
    """
    lines = {
        "where": job.target,
        "how many": _count(job),
        "what runs": _program(job),
        "price": _price(job, plan, word, preview),
        "limits": _limits(job),
        "checkpoints": _checkpoints(job),
    }
    if queue := _queue(job, word):
        lines["queue"] = queue
    if missing := _missing(job, word):
        lines["missing"] = f"{missing}: not on this machine"
    return lines


def render(job: JobSpec, plan: Submission, word: str, preview: str = "") -> str:
    return "".join(f"{name:<12} {text}\n" for name, text in summarize(job, plan, word, preview).items()) + "\n"


def as_plain(job: JobSpec, plan: Submission, preview: str, word: str) -> dict[str, Any]:
    """The same, with files and commands, for programs."""
    summary = {name.replace(" ", "_"): text for name, text in summarize(job, plan, word, preview).items()}
    return {
        "summary": summary,
        "files": dict(plan.files),
        "commands": [list(words) for words in plan.commands],
        "offer": preview.strip() or None,
    }


def _missing(job: JobSpec, word: str) -> str:
    """Absolute paths of a job on this machine that do not exist; patterns and what an image holds are left out."""
    from trainmaster import targets

    traits = targets.find_traits(word)
    if traits is None or not traits.here or job.container is not None:
        return ""
    inputs = job.inputs
    named = [*(job.command or ()), inputs.train, inputs.eval, inputs.config, inputs.script]
    if job.train is not None:
        data = job.train.data
        named += [data.tokenizer, *(path for part in (data, *data.parts) for path in (part.path, part.held_out_path))]
    paths = {path for path in named if path is not None and path.startswith("/") and not set(path) & set("*?[")}
    return ", ".join(sorted(path for path in paths if not Path(path).exists()))


def _count(job: JobSpec) -> str:
    nodes, each = job.resources.nodes, job.resources.processes_per_node
    return (
        f"{nodes} {'machine' if nodes == 1 else 'machines'}, {each} {'process' if each == 1 else 'processes'} on each"
    )


def _program(job: JobSpec) -> str:
    inside = f" in {job.container.image}" if job.container is not None else ""
    if job.train is not None:
        return f"our trainer, {job.train.steps:,} steps{inside}"
    return (shlex.join(job.command) if job.command else "the image's own command") + inside


def _price(job: JobSpec, plan: Submission, word: str, preview: str) -> str:
    from trainmaster import targets

    stated, cents = job.resources.price_per_hour, plan.handle.get("price_cents_per_hour")
    if stated is not None and (cents is None or 100 * stated >= cents):
        return f"{dollars(100 * stated)} an hour for the whole job (resources.price_per_hour)"
    if cents is not None:
        return f"{dollars(float(cents))} an hour for the whole job"
    if targets.is_free(word):
        return "none; resources.price_per_hour states one"
    if choice := _CHOICE.search(preview):
        return f"{choice[1]} by the offers of now; it is fixed when the job is placed"
    return "not known before it is placed; resources.price_per_hour states it"


def _limits(job: JobSpec) -> str:
    limits = job.limits
    parts = [f"{limits.timeout_s:,.0f} s an attempt" if limits.timeout_s is not None else "no time limit"]
    parts.append(f"{limits.attempts} {'attempt' if limits.attempts == 1 else 'attempts'}")
    if limits.max_cost is not None:
        parts.append(f"at most {dollars(100 * limits.max_cost)}")
    return ", ".join(parts)


def _queue(job: JobSpec, word: str) -> str:
    from trainmaster import targets

    stated = targets.find_traits(word)
    return "; ".join(targets.describe_queue(stated, job.queue)) if stated is not None else ""


def _checkpoints(job: JobSpec) -> str:
    if job.resume_from is not None:
        return f"goes on with those of {job.resume_from}"
    if job.train is None:
        return "what the program writes into TRAINMASTER_CHECKPOINTS"
    return f"every {job.train.checkpoint.every_steps:,} steps"
