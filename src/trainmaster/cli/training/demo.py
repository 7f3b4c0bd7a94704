"""`trainmaster demo`: everything at once on this machine, through the real control plane. A CPU is enough."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import SERVER_FILE, HomeOption, open_home
from trainmaster.cli._views import plot
from trainmaster.core.errors import MissingExtra, TrainmasterError
from trainmaster.core.plan import OWNER_VARIABLE
from trainmaster.core.spec import JobSpec, parse_spec

if TYPE_CHECKING:
    from trainmaster.api.jobs import JobPage
    from trainmaster.cli._jobs import Jobs
    from trainmaster.cli._views.follow import View

_MUST_FALL_TO = 0.8  # the demo proves learning: the last loss is at most this share of the first


def demo(
    steps: Annotated[int, typer.Option(min=20, help="Optimizer steps.")] = 150,
    processes: Annotated[int, typer.Option(min=1, max=8, help="Ranks on this machine.")] = 2,
    home: HomeOption = None,
) -> None:
    """Check this machine, train a small model on it with FSDP, and write the report.

    The job goes the whole way: spec, control plane, agent, pre-flight, training, events, report. Ctrl-C cleans up.

    [bold]Examples[/]

      trainmaster demo

      trainmaster demo --steps 60 --home /tmp/demo
    """
    _require_torch()
    spec = _spec(steps, processes)
    folder, db = open_home(home)
    from trainmaster.cli._jobs.home import HomeJobs
    from trainmaster.cli._views.follow import View, follow
    from trainmaster.cluster.termination import until_terminated

    jobs = HomeJobs(folder, db)
    with until_terminated(), _Server(folder) as server:  # SIGTERM ends it as Ctrl-C does, with nothing left running
        job = jobs.submit(spec, key=None)
        _console.out.print(
            f"job [bold]{job.name}[/] {job.id}\nlive at {server.link}?next=/jobs/{job.id}\n", soft_wrap=True
        )
        view = View()
        try:
            follow(jobs, job.id, tick=server.keep_alive, view=view)
        except KeyboardInterrupt:
            _clean_up(jobs, job.id, server, view)
            raise typer.Exit(130) from None
    from trainmaster import report

    page = jobs.show(job.id)
    path = report.write(page, folder / "jobs" / job.id / "report.html")
    raise typer.Exit(0 if _sum_up(page, path, folder) else 1)


def _spec(steps: int, processes: int) -> JobSpec:
    return parse_spec(
        {
            "name": "demo",
            "project": "demo",
            "target": "local",
            "resources": {"processes_per_node": processes},
            # Shown, not enforced: the demo should run on any laptop, whatever cannot be measured there.
            "preflight": {"allow_incomplete": True},
            "limits": {"grace_s": 15, "timeout_s": 1800},
            "train": {
                "steps": steps,
                "batch_sequences": 8 * processes,
                "eval_sequences": 16 * processes,
                "epoch_steps": max(steps // 3, 1),
                "checkpoint": {"every_steps": max(steps // 3, 1)},
            },
        }
    )


def _require_torch() -> None:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise MissingExtra("training", "train,server")


class _Server:
    """`trainmaster serve` as a child, started again if it dies: the job does not notice."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._child: subprocess.Popen[bytes] | None = None
        self.url = self.link = ""

    def __enter__(self) -> _Server:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child is not None
        self._child.terminate()
        try:
            self._child.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def keep_alive(self) -> None:
        assert self._child is not None
        if self._child.poll() is not None:
            _console.out.print(f"[yellow]the control plane died (exit {self._child.returncode}); starting it again[/]")
            self._start()

    def _start(self) -> None:
        from trainmaster.node.owner import die_with, name_process

        note, log = self._home / SERVER_FILE, self._home / "server.log"
        note.unlink(missing_ok=True)
        command = [sys.executable, "-m", "trainmaster", "serve", "--home", str(self._home), "--port", "0"]
        with log.open("ab") as out:
            # Its own session: Ctrl-C reaches us alone, and we end it after the job was cleaned up.
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, OWNER_VARIABLE: name_process()},  # for the agent: it ends with the demo
                start_new_session=True,
                preexec_fn=die_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509 (this process has one thread)
            )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._child.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                details = json.loads(note.read_text())
                self.url, self.link = details["url"], details["link"]
                return
            time.sleep(0.05)
        self._child.kill()
        raise TrainmasterError(f"the server did not start; see {log}")


def _clean_up(jobs: Jobs, job_id: str, server: _Server, view: View) -> None:
    from trainmaster.cli._views.follow import follow

    # From here on a second Ctrl-C must not leave processes behind; the agent's grace bounds the wait.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _console.err.print("[yellow]cancelling the job and cleaning up …[/]")
    with contextlib.suppress(TrainmasterError):  # it ended by itself meanwhile
        jobs.cancel(job_id)
    ended = follow(jobs, job_id, tick=server.keep_alive, view=view)
    _console.err.print(f"job {ended.id}: {_console.paint(ended.status)}; nothing is left running")


def _sum_up(page: JobPage, report: Path, home: Path) -> bool:
    """Print the verdict, the curve and where to look; True if the demo showed what it should."""
    run, say = page.run, functools.partial(_console.out.print, soft_wrap=True)
    say()
    if run.curves.loss:
        for line in plot.curve(run.curves.loss, width=max(20, min(_console.out.width - 10, 72))):
            _console.out.out(line)
        say(f"{'':9}[dim]training loss over {run.step} steps[/]\n")
    good = page.status == "completed" and run.loss_ratio is not None and run.loss_ratio <= _MUST_FALL_TO
    say(f"{_console.paint('PASS' if good else 'FAIL')} job {page.status} {_console.plain(page.message)}".rstrip())
    if run.loss_ratio is not None:
        fell = f"{run.loss_first:.3f} → {run.loss_last:.3f}"
        say(f"loss        {fell}, {run.loss_ratio:.0%} of the start (the demo asks for at most {_MUST_FALL_TO:.0%})")
    if run.tokens_per_s is not None:
        say(f"throughput  {run.tokens_per_s:,.0f} tokens/s on {run.ranks} ranks")
    overall = run.preflight.overall if run.preflight else None
    say(f"pre-flight  {_console.paint(overall) if overall else 'not done'}")
    say(f"report      {shlex.quote(str(report))}")
    here, program = shlex.quote(str(home)), _console.program()
    say(f"browser     {program} serve --home {here}")
    say(f"more        {program} show demo --home {here} (also jobs, logs, events, cost)")
    return good
