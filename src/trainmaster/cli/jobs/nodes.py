"""`trainmaster nodes`: machines of every target that was used, their GPUs, and who has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption
from trainmaster.cli._jobs import connect
from trainmaster.cli._server import ServerOption
from trainmaster.cli.jobs.jobs import age
from trainmaster.core.errors import UsageError
from trainmaster.core.money.cost import dollars, submitter
from trainmaster.core.results import Verdict

if TYPE_CHECKING:
    from trainmaster.api.queue import DeviceLine, MachineLine, MachinesPage, MachineUse


nodes = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode="rich",
    help="""List the machines of every target that was used: their GPUs, who has each, since when, their last verdict.

    GPUs and slots are those that our own queue gives out. Of a target that queues by itself the nodes are listed that
    its jobs have checked. A machine of our own queue is drained here; nodes of Slurm and Kubernetes by `remedy`.

    [bold]Examples[/]

      trainmaster nodes

      trainmaster nodes --server https://trainmaster.example.org --json

      trainmaster nodes drain gpu-03 --reason "fan is replaced on Friday"

      trainmaster nodes readmit gpu-03
    """,
)
Node = Annotated[str, typer.Argument(help="Machine, as `trainmaster nodes` lists it.")]
Through = Annotated[str | None, typer.Option("--on", help="Its target, where several have a machine of this name.")]


@nodes.callback()
def list_(
    context: typer.Context,
    project: Annotated[str | None, typer.Option(help="Name only jobs of this project.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    if (verb := context.invoked_subcommand) is not None:
        sources = {name: context.get_parameter_source(name) for name in context.params}
        stated = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
        if stated:  # else `nodes --server URL drain` would drain in the home folder of this machine
            raise UsageError(f"--{stated[0]} stands behind the verb: trainmaster nodes {verb} … --{stated[0]}")
        return
    with connect(home, server, reads=True) as source:
        page = source.machines(project=project)
    if json:
        _console.as_json(page)
    elif page.machines:
        _print(page)
    else:
        _console.note("no machine is known yet: a job that waits for a GPU or a check makes it known")


@nodes.command("drain")
def drain(
    node: Node,
    reason: Annotated[
        str, typer.Option(help="Why; for those who see every project. Others read that it is drained, and since when.")
    ],
    on: Through = None,
    home: HomeOption = None,
    server: ServerOption = None,
) -> None:
    """Start nothing new on a machine of `local` or `ssh`; jobs that run there go on. For admins of the server.

    [bold]Examples[/]

      trainmaster nodes drain gpu-03 --reason "fan is replaced on Friday"

      trainmaster nodes drain n1 --on ssh:hosts.yaml --reason "loose cable"
    """
    with connect(home, server) as source:
        source.drain_machine(node, reason=reason, target=on)
    _console.out.print(f"{_console.plain(node)}: drained; `trainmaster nodes readmit {_console.plain(node)}` ends it")


@nodes.command("readmit")
def readmit(node: Node, on: Through = None, home: HomeOption = None, server: ServerOption = None) -> None:
    """Let a drained machine take jobs again. Where its newest check failed, that is said, and done all the same.

    [bold]Examples[/]

      trainmaster nodes readmit gpu-03
    """
    with connect(home, server) as source:
        source.readmit_machine(node, target=on)
        found = [line for line in source.machines(project=None).machines if line.machine == node]
    _console.out.print(f"{_console.plain(node)}: takes jobs again")
    if any(line.verdict is Verdict.FAIL for line in found):
        _console.note("careful: its newest check failed, and a job there may end at once; check it again")


def _print(page: MachinesPage) -> None:
    columns = ("target", "machine", "verdict", "device", "model", "has it", "since", "by", "per hour")
    table = _console.table(*columns, right={"per hour"})
    for machine in page.machines:
        first = (escape(machine.target) or "[dim]not known[/]", escape(machine.machine), _state(machine))
        for device in machine.devices:
            since = age(device.since) if device.since is not None else ""
            money = _money(device) if device.job_id is not None else ()
            table.add_row(*first, escape(device.device), escape(device.model), _holder(device), since, *money)
            first = ("", "", "")
        for use in machine.used_by:
            table.add_row(*first, "", "", _name(use.job_id, use.job, use.project), age(use.since), *_money(use))
            first = ("", "", "")
        if not machine.devices and not machine.used_by:
            table.add_row(*first)
        if machine.closed is not None:
            _console.note(f"{machine.machine} takes no new jobs: {machine.closed}")
    _console.out.print(table)


def _state(machine: MachineLine) -> str:
    """The verdict; of a drained machine that first: what passes and takes no job is not ready."""
    if machine.drained_at is None:
        return machine.verdict.value if machine.verdict is not None else "not checked"
    bad = machine.verdict is not None and machine.verdict not in (Verdict.PASS, Verdict.SKIP)
    return f"drained, {machine.verdict.value}" if bad and machine.verdict is not None else "drained"


def _money(use: DeviceLine | MachineUse) -> tuple[str, str]:
    """Who submitted the job that has it, and the price of that job for all its machines."""
    return escape(submitter(use.submitted_by)), dollars(use.price_cents_per_hour)


def _name(job_id: str, job: str | None, project: str | None) -> str:
    return f"{job_id[:8]} {escape(job or '')} [dim]{escape(project or '')}[/]"


def _holder(device: DeviceLine) -> str:
    if device.job_id is not None:
        return _name(device.job_id, device.job, device.project)
    return escape(device.used or "") or "[dim]free[/]"
