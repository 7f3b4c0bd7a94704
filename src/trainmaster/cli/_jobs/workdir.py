"""Working folder of a job at submit: which folder it is, and its upload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainmaster.cli import _console
from trainmaster.cli._server import find_token_file
from trainmaster.core.errors import UsageError
from trainmaster.core.workdir import find_digest

if TYPE_CHECKING:
    from trainmaster.cli._jobs import Jobs
    from trainmaster.client.workdir import Snapshot
    from trainmaster.core.spec import JobSpec

NONE = "none"
WorkdirOption = Annotated[
    str | None,
    typer.Option(
        "--workdir",
        help="Folder to upload as the job's working folder; `none`: an empty one. Not stated: the spec's `workdir`, "
        "else the folder of the spec file.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workdir:
    """A folder of this machine to upload; None where the spec names what the job needs, or nothing."""

    folder: Path | None
    stated: bool  # by the user; else it is the folder of the spec file


def choose(spec: Any, file: Path, option: str | None) -> tuple[Any, Workdir]:
    """The spec without a `workdir` that is to be uploaded, and the folder to upload.

    In a spec a relative path is a folder beside the spec file; an absolute one is a folder of the node.
    """
    if not isinstance(spec, Mapping):
        return spec, Workdir(folder=None, stated=True)
    workdir = spec.get("workdir")
    rest = {name: value for name, value in spec.items() if name != "workdir"}
    if option is not None:
        return rest, Workdir(folder=None if option == NONE else Path(option).expanduser(), stated=True)
    if workdir is None:
        return rest, Workdir(folder=file.absolute().parent, stated=False)
    if not isinstance(workdir, str) or workdir.startswith("/") or find_digest(workdir) is not None:
        return spec, Workdir(folder=None, stated=True)
    if workdir == NONE:
        return rest, Workdir(folder=None, stated=True)
    return rest, Workdir(folder=file.absolute().parent / workdir, stated=True)


def send_checked(jobs: Jobs, job: JobSpec, workdir: Workdir, *, key: str | None, home: Path, server: bool) -> JobSpec:
    """The same as `send`; what the server would refuse of the spec is refused before anything is uploaded."""
    if workdir.folder is not None:
        jobs.check(job, key=key)
    return send(jobs, job, workdir, home=home, server=server)


def send(jobs: Jobs, job: JobSpec, workdir: Workdir, *, home: Path, server: bool) -> JobSpec:
    """Upload the folder; the spec that names its snapshot.

    The folder of the spec file, where the user stated none, may be unfit (a home folder, gigabytes of data): a job on
    this machine then gets links to its entries instead.
    """
    from trainmaster import targets
    from trainmaster.client import workdir as snapshots

    if workdir.folder is None:
        if (digest := find_digest(job.workdir)) is not None:
            _console.note(f"workdir: the files that were sent as {digest[:12]}; none of this folder")
        return job
    try:
        if not workdir.stated and workdir.folder in (Path.home(), Path("/")):
            raise UsageError(f"workdir: {workdir.folder} is too general to be uploaded; state one: --workdir FOLDER")
        snapshot = snapshots.scan(workdir.folder, apart=[home, *find_token_file()])
    except UsageError as error:
        place = targets.find_traits(job.target)
        if workdir.stated or server or place is None or not place.here:
            raise UsageError(f"{error} (without a working folder: --workdir {NONE})") from error
        _console.note(f"{error}. Its entries are linked instead: the job sees later changes of them")
        return replace(job, workdir=str(workdir.folder))
    if text := snapshots.describe_left_out(snapshot):
        _console.note(text)
    return replace(job, workdir=_upload(jobs, job.project, snapshot))


def _upload(jobs: Jobs, project: str, snapshot: Snapshot) -> str:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from trainmaster.client.workdir import upload

    columns = (TextColumn("uploading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    sent_bytes = 0
    with Progress(*columns, console=_console.err, transient=True, disable=not _console.err.is_terminal) as bar:
        task = bar.add_task("uploading", total=None)

        def on_progress(sent: int, total: int) -> None:
            nonlocal sent_bytes
            sent_bytes = sent
            bar.update(task, completed=sent, total=total)

        name = upload(snapshot, jobs.receiver(project), on_progress=on_progress)
    manifest = snapshot.manifest
    count = len(manifest.files) + len(manifest.links)
    if sent_bytes:
        files = _console.count(count, "file")
        _console.note(f"workdir: {files}, {manifest.size_bytes:,} bytes; {sent_bytes:,} bytes sent")
    return name
