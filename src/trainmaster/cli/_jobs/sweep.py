"""`trainmaster submit` of a set of runs; `show`, `cancel`, `pause` and `resume` of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.cli import _console
from trainmaster.cli._jobs import wait as wait_for
from trainmaster.cli._jobs.workdir import Workdir, send_checked
from trainmaster.cli._views.sets import count_text, next_text, print_set
from trainmaster.core.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from trainmaster.api.sets import SetLine, SetPage
    from trainmaster.cli._jobs import Jobs
    from trainmaster.core.config.cron import Schedule
    from trainmaster.core.config.search import Search
    from trainmaster.core.config.sweep import Sweep
    from trainmaster.core.spec import JobSpec

_SHOWN = 5  # trials of a search, and times of a schedule, in a dry run


def change(sweep: Sweep, edit: Callable[[JobSpec], JobSpec]) -> Sweep:
    """The sweep with each trial's spec changed."""
    return replace(sweep, trials=tuple(replace(trial, spec=edit(trial.spec)) for trial in sweep.trials))


def require_sampler(sweep: Sweep) -> None:
    """MissingExtra where a search could not be advanced here; before anything is uploaded."""
    if sweep.search is not None:
        from trainmaster.control.queueing import study

        study.require()


def describe(sweep: Sweep) -> str:
    """The trials, a line each, for `--dry-run`."""
    if sweep.search is not None:
        return _describe_search(sweep, sweep.search)
    lines: list[str] = []
    if sweep.schedule is not None:
        lines = _describe_schedule(sweep.schedule)
    if sweep.schedule is None or sweep.trials[0].values:
        lines.append(f"{len(sweep.trials)} trials, {sweep.parallel} at once; the plan of the first is below")
    for trial in sweep.trials:
        values = ", ".join(f"{name}={value}" for name, value in trial.values.items())
        lines.append(f"{trial.spec.name:<24} {values}")
    return "\n".join(lines) + "\n\n"


def _describe_schedule(schedule: Schedule) -> list[str]:
    """Its next times."""
    lines, time = [f"{schedule.text}; missed: {schedule.missed}, overlap: {schedule.overlap}"], datetime.now(UTC)
    for _ in range(_SHOWN):
        if (following := schedule.find_next(time)) is None:
            break
        time = following
        lines.append(f"next {time.astimezone(schedule.zone):%a %Y-%m-%d %H:%M %Z}")
    return lines


def _describe_search(sweep: Sweep, search: Search) -> str:
    """Its first trials, which depend on no result."""
    from trainmaster.control.queueing import study

    pruned = "" if search.pruner == "none" else f", pruned by {search.pruner}"
    lines = [
        f"{sweep.total} trials, {sweep.parallel} at once: {search.goal} {search.metric}, proposed by {search.sampler} "
        f"with seed {search.seed}{pruned}; the plan of the first is below"
    ]
    known = sweep.total if search.sampler != "tpe" else min(sweep.total, search.startup_trials)
    seen: list[study.Seen] = []
    try:
        for number in range(1, min(known, _SHOWN) + 1):
            values = study.propose(search, seen)
            seen.append(study.Seen(values=values))
            text = ", ".join(f"{name}={value}" for name, value in values.items())
            lines.append(f"{sweep.name + '-' + str(number):<24} {text}")
        if search.sampler == "tpe" and sweep.total > known:
            lines.append(f"trials after the first {known} are proposed from results")
    except MissingExtra as missing:  # with --server, only the server needs it
        lines.append(f"its first trials are not shown: {missing}")
    return "\n".join(lines) + "\n\n"


def submit(
    jobs: Jobs, sweep: Sweep, workdir: Workdir, *, key: str | None, home: Path, server: bool, json: bool
) -> None:
    """Upload the working folder once, and submit the set. UsageError for a schedule that nobody would follow."""
    if sweep.schedule is not None and not jobs.is_driven():
        raise UsageError(
            "schedule: no server works on this home folder, and nobody else begins a run at its time; "
            "start one (trainmaster serve) and submit again, or name one: --server URL"
        )
    # What is refused of the first run is refused of the set.
    first = send_checked(jobs, sweep.trials[0].spec, workdir, key=key, home=home, server=server)
    page = jobs.submit_set(change(sweep, lambda spec: replace(spec, workdir=first.workdir)), key=key)
    if json:
        _console.as_json(page)
        return
    what = f"next run {next_text(page.set)}" if page.set.schedule else f"{page.set.trials} trials"
    _console.out.print(
        f"{'submitted' if page.new or key is None else 'found'} [bold]{page.set.name}[/] as {page.set.id}: {what}"
    )
    _console.note(f"see it with: trainmaster show {page.set.name}")
    if not jobs.is_driven():
        _console.note("no server works on this home folder yet; start one with: trainmaster serve")


def cancel(jobs: Jobs, page: SetPage, word: str, *, wait: bool, json: bool) -> None:
    """Cancel a set; where nothing drives its jobs, drive each to its end. UsageError for a name of several sets."""
    _refuse_namesakes(jobs, page, word)
    page = jobs.cancel_set(page.set.id)
    if not wait and not jobs.is_driven() and any(trial.status and not trial.status.final for trial in page.trials):
        _console.note("no server or worker runs on this home folder: this command stops the jobs itself")
        wait = True
    for trial in page.trials if wait else ():
        if trial.job is not None:
            with jobs.drive(trial.job):
                wait_for(jobs, trial.job)
    page = jobs.find_set(page.set.id) or page
    if json:
        _console.as_json(page)
    else:
        _console.out.print(f"{page.set.name} {page.set.id}: {_console.paint(page.set.status)} · {count_text(page.set)}")


def change_schedule(jobs: Jobs, page: SetPage, word: str, *, paused: bool, json: bool) -> None:
    """Pause the schedule of a set, or let it go on."""
    _refuse_namesakes(jobs, page, word)
    if page.set.schedule is None:
        raise UsageError(f"{word!r} is a set without a schedule: its runs begin once; `trainmaster cancel` stops it")
    page = jobs.pause_set(page.set.id) if paused else jobs.resume_set(page.set.id)
    if json:
        _console.as_json(page)
    else:
        _console.out.print(f"{page.set.name} {page.set.id}: next run {next_text(page.set)}")


def show(jobs: Jobs, page: SetPage, word: str, *, json: bool) -> None:
    """Print a set, and note that others have its name."""
    if len(same := _namesakes(jobs, page, word)) > 1:
        _console.note_newest(word, page.set.id, len(same), what="sets")
    if json:
        _console.as_json(page)
    else:
        print_set(page)


def _refuse_namesakes(jobs: Jobs, page: SetPage, word: str) -> None:
    if len(same := _namesakes(jobs, page, word)) > 1:
        listed = ", ".join(f"{line.id} {line.status}" for line in same[:5]) + (" …" if len(same) > 5 else "")
        raise UsageError(f"{len(same)} sets have the name {word!r} ({listed}); write the id")


def _namesakes(jobs: Jobs, page: SetPage, word: str) -> list[SetLine]:
    """The sets that a word names, newest first; none where it is an id."""
    if word != page.set.name or word == page.set.id:
        return []
    return [line for line in jobs.sets(project=None, find=word) if line.name == word]
