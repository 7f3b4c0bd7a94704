"""`trainmaster submit`: a spec goes in."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli import _console
from trainmaster.cli._documents import kind
from trainmaster.cli._documents.hosts_file import ask
from trainmaster.cli._home import DATABASE_FILE, HomeOption, locate, open_home
from trainmaster.cli._jobs import connect
from trainmaster.cli._jobs import sweep as sweeps
from trainmaster.cli._jobs import workdir as uploads
from trainmaster.cli._jobs.place import find_place
from trainmaster.cli._server import ServerOption
from trainmaster.cli._views import dry_run_text, target_option
from trainmaster.core.config.sweep import Sweep, is_sweep, parse_sweep
from trainmaster.core.errors import SpecError, TargetError, TrainmasterError, UsageError
from trainmaster.core.ids import is_uuid
from trainmaster.core.secret.in_spec import find_in_spec
from trainmaster.core.secret.shapes import recognise
from trainmaster.core.spec import JobSpec, parse_spec
from trainmaster.documents import yaml_file

if TYPE_CHECKING:
    from trainmaster.api.jobs import Submitted
    from trainmaster.cli._jobs import Jobs
    from trainmaster.targets import Submission


_On = Annotated[
    str | None,
    typer.Option("--on", help="Target, over the one in the file: {targets}.", autocompletion=target_option.complete),
]


def submit(
    spec: Annotated[Path, typer.Argument(help="The job as YAML.")],
    values: Annotated[list[str] | None, typer.Argument(help="Values to put over the file's: key.path=value.")] = None,
    on: _On = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done; touch nothing.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Drive and watch the job to its end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the job as JSON; with --dry-run, the plan.")] = False,
    key: Annotated[
        str | None,
        typer.Option("--key", help="Idempotency key: a repeated submit with it returns the same job or set."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", help="PLACE=REASON: what looks like a secret there is none. May be repeated."),
    ] = None,
    workdir: uploads.WorkdirOption = None,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Submit a job, or a set of runs: a spec with `matrix:`, `search:` or `schedule:`.

    A spec with faults is refused with all of them (exit code 2), and nothing is created.

    Write results into the folder named by TRAINMASTER_OUTPUTS: only those are kept and fetched.

    The working folder of the job is uploaded by content: what the server has already is not sent again. Files named in
    .trainmasterignore (else .gitignore) stay here.

    [bold]Examples[/]

      trainmaster submit job.yaml --dry-run

      trainmaster submit job.yaml train.steps=500 --follow

      trainmaster submit job.yaml resume_from=3f2a   (with the files as they are now, from the checkpoints of that job)

      trainmaster submit job.yaml --on ssh:hosts.yaml

      trainmaster submit job.yaml --on gpus   (a target that `trainmaster target add` made known)

      trainmaster submit job.yaml --on kubernetes:cluster.yaml --dry-run

      trainmaster submit job.yaml --on lambda rent.gpu=H100 rent.gpus=8 --dry-run

      trainmaster submit sweep.yaml   (with `matrix: {train.optimizer.lr: [0.0001, 0.0003]}` and `parallel: 2`)

      trainmaster submit job.yaml --server https://trainmaster.example.org --key nightly-2026-03-01
    """
    kind.refuse_program(spec)
    document = yaml_file.load(spec)
    kind.require_spec(document, spec)
    words = [*(values or []), *([f"target={on}"] if on else [])]
    chosen, folder = uploads.choose(yaml_file.override(document.value, words), spec, workdir)
    chosen = _find_earlier(chosen, home, server)
    if is_sweep(chosen):
        if follow:
            raise UsageError("--follow watches one job; a set has `trainmaster show NAME`")
        sweep = document.read(lambda _: _read_sweep(chosen, allow or []), words)
        beside = Path.cwd() if on else spec.absolute().parent
        _submit_set(sweep, folder, beside=beside, dry_run=dry_run, json=json, key=key, home=home, server=server)
        return
    job = document.read(lambda _: _allow(parse_spec(chosen), allow or []), words)
    if server is None:
        job = replace(job, target=_absolute(job.target, Path.cwd() if on else spec.absolute().parent))
    if dry_run:
        _print_plan(job, home, json=json)
        return
    if server is None:
        _plan(job, home)  # what the target refuses is refused before anything is uploaded
    with connect(home, server) as jobs:
        job = uploads.send_checked(jobs, job, folder, key=key, home=locate(home), server=server is not None)
        made = jobs.submit(job, key=key)
        if json:
            _console.as_json(made)
        else:
            _print_made(made, follow=follow)
        if follow:
            raise typer.Exit(follow_to_end(jobs, made.id))
        if not json:
            _print_place(jobs, made.id, job.project)


def _find_earlier(chosen: Any, home: Path | None, server: str | None) -> Any:
    """The document with the whole id of the job that it goes on from; it may state a name or the beginning of an id."""
    word = chosen.get("resume_from") if isinstance(chosen, dict) else None
    if not isinstance(word, str) or is_uuid(word):
        return chosen
    if server is None and not (locate(home) / DATABASE_FILE).exists():
        raise UsageError(f"resume_from: no job {word!r}; this home folder has none")
    with connect(home, server) as jobs:
        return {**chosen, "resume_from": jobs.find(word)}


def _print_made(made: Submitted, *, follow: bool) -> None:
    _console.out.print(f"{'submitted' if made.new else 'found'} [bold]{made.name}[/] as {made.id}")
    if not follow:
        _console.note(f"see it with: trainmaster show {made.name}")
    if made.note:
        _console.note(_console.plain(made.note))


def _print_place(jobs: Jobs, job_id: str, project: str) -> None:
    """Where the job waits, or that nobody will start it."""
    if not jobs.is_driven():
        _console.note("no server works on this home folder yet; start one with: trainmaster serve")
        return
    with contextlib.suppress(TrainmasterError):  # the job is in, whatever an answer about the queue says
        if place := find_place(jobs, job_id, project):
            _console.note(f"it waits: place {place['place']}; {place['waits for']}")


def _print_plan(job: JobSpec, home: Path | None, *, json: bool) -> None:
    plan, preview, word = _plan(job, home), _preview(job, home), _find_word(job, home)
    if json:
        _console.as_json(dry_run_text.as_plain(job, plan, preview, word))
    else:
        _console.out.out(dry_run_text.render(job, plan, word, preview) + plan.render() + preview, end="")


def _submit_set(
    sweep: Sweep,
    folder: uploads.Workdir,
    *,
    beside: Path,
    dry_run: bool,
    json: bool,
    key: str | None,
    home: Path | None,
    server: str | None,
) -> None:
    if server is None:
        sweep = sweeps.change(sweep, lambda job: replace(job, target=_absolute(job.target, beside)))
    if dry_run or server is None:
        plan = _plan(sweep.trials[0].spec, home)  # what the target refuses is refused before anything is uploaded
        if dry_run:
            _console.out.out(sweeps.describe(sweep) + plan.render(), end="")
            return
        sweeps.require_sampler(sweep)
    with connect(home, server) as jobs:
        sweeps.submit(jobs, sweep, folder, key=key, home=locate(home), server=server is not None, json=json)


def _read_sweep(chosen: Any, allow: list[str]) -> Sweep:
    """The trials of a document, with what `--allow` adds to each, and to the document: a server gets that."""
    seen = functools.cache(recognise)  # most texts are the same in all trials, and a look at each is slow
    sweep = sweeps.change(parse_sweep(chosen), lambda job: _allow(job, allow, recognise=seen))
    if allow:
        sweep = replace(sweep, document={**sweep.document, "allow": dict(sweep.trials[0].spec.allow)})
    return sweep


def _allow(spec: JobSpec, allow: list[str], *, recognise: Callable[[str], str | None] = recognise) -> JobSpec:
    """The spec, with what `--allow` adds; SpecError for a secret, so that a dry run tells it."""
    more = [word.partition("=") for word in allow]
    if any(not (place and reason.strip()) for place, _, reason in more):
        raise UsageError("--allow takes a place and why it is no secret: --allow 'command[3]=id of the data set'")
    spec = replace(spec, allow={**spec.allow, **{place: reason for place, _, reason in more}})
    if secrets := list(find_in_spec(spec, recognise=recognise)):
        raise SpecError(secrets)
    return spec


def _plan(job: JobSpec, home: Path | None) -> Submission:
    """The submission as its target plans it; a refusal is a fault of the spec."""
    from trainmaster import targets
    from trainmaster.control import inputs

    word = _find_word(job, home)
    placement = targets.Placement(
        attempt="00000000-0000-4000-8000-000000000000.1", spec=job, job_folder=locate(home) / "jobs" / "JOB"
    )
    try:
        target = targets.load(word)
        targets.refuse_queue(word, job)
        inputs.refuse_unserved(job, target)
        return target.plan(placement)
    except TargetError as refused:
        raise UsageError(str(refused)) from None
    except UsageError:
        if (stated := targets.find_traits(word)) is not None:
            stated.require_file(word)
        raise


def _find_word(job: JobSpec, home: Path | None) -> str:
    """What the target stands for: a name that is no target may be one that this home folder knows."""
    from trainmaster import targets

    if targets.find_traits(job.target) is not None or not (locate(home) / DATABASE_FILE).exists():
        return job.target
    from trainmaster.control.known_targets import find_word

    _, db = open_home(home)
    try:
        with db.read() as conn:
            return find_word(conn, job)
    finally:
        db.close()


def _preview(job: JobSpec, home: Path | None) -> str:
    """Offer and launch request, where the target rents machines; asks the provider, rents nothing."""
    from trainmaster import targets

    target = targets.load(_find_word(job, home))
    if not isinstance(target, targets.Rents):
        return ""

    _console.note("asking the provider for its offers; an API that does not answer is tried for a minute")
    try:
        return "\n" + ask(target.preview(job))
    except TargetError as refused:
        raise UsageError(str(refused)) from None


def _absolute(target: str, folder: Path) -> str:
    """A target whose file is found from anywhere: the job outlives this command and its working folder."""
    from trainmaster import targets

    stated = targets.find_traits(target)
    return target if stated is None else stated.make_absolute(target, folder)


def follow_to_end(jobs: Jobs, job_id: str) -> int:
    """Show the job to its end; the exit code."""
    from trainmaster.cli._views import summary
    from trainmaster.cli._views.follow import follow

    _console.note("Ctrl-C stops watching, not the job")
    try:
        with jobs.drive(job_id):
            ended = follow(jobs, job_id)
    except KeyboardInterrupt:
        if not jobs.is_driven():
            _console.note(
                f"job {job_id} goes on, and nothing drives it until a server runs (trainmaster serve); "
                f"to stop it: trainmaster cancel {job_id}"
            )
        raise
    summary.show(jobs, ended)
    return 0 if ended.status == "completed" else 1
