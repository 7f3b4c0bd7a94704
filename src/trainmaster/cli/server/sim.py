"""`trainmaster sim`: simulators to try things without hardware and without a bill."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from trainmaster.cli import _console
from trainmaster.cli._home import HomeOption, locate
from trainmaster.core.errors import UsageError

sim = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Simulators: try a cloud without an account and without a bill.

    [bold]Examples[/]

      trainmaster sim lambda

      trainmaster sim lambda --time-factor 60 --faults all --seed 7
    """,
)

DEFAULT_PORT = 8480


@sim.command("lambda")
def lambda_(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API; 0 takes a free one.")] = DEFAULT_PORT,
    ssh_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of every instance's SSH server; 0 takes a free one.")
    ] = 0,
    home: HomeOption = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the instances and the API key.", show_default="HOME/sim/lambda")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the faults.")] = 0,
    faults: Annotated[
        str, typer.Option(help="all, or NAME=RATE,… with rates from 0 to 1; see --list-faults.")
    ] = "none",
    boot_s: Annotated[float, typer.Option(min=0, help="Simulated seconds from launch to active.")] = 60.0,
    terminate_s: Annotated[float, typer.Option(min=0, help="Simulated seconds from request to terminated.")] = 10.0,
    time_factor: Annotated[
        float, typer.Option(min=0.01, max=10_000, help="Simulated seconds per real second: 60 makes a minute a second.")
    ] = 1.0,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key; created if missing.", show_default="FOLDER/api-key")
    ] = None,
    capacity: Annotated[int, typer.Option(min=1, help="Instances of one type in one region.")] = 64,
    quota: Annotated[int | None, typer.Option(min=1, help="Instances of the account.")] = None,
    list_faults: Annotated[bool, typer.Option("--list-faults", help="Print the faults and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the addresses and the summary as JSON.")] = False,
) -> None:
    """Simulate Lambda Cloud on this machine: its API, and instances that are real SSH servers on 127.77.0.0/16.

    Prices are counted, so a leaked instance is a number in the summary at the end. Ctrl-C ends the simulator, every
    instance and every process in them. No account is needed, and nothing leaves this machine.

    [bold]Examples[/]

      trainmaster sim lambda

      trainmaster sim lambda --time-factor 60 --boot-s 230             a minute passes in a second

      trainmaster sim lambda --faults all --seed 7

      trainmaster sim lambda --faults launch-500=0.2,cuda-broken=0.1,link-cut=1

      trainmaster sim lambda --json | jq .environment
    """
    from trainmaster.sim.lambda_cloud.faults import FAULTS, parse_rates
    from trainmaster.sim.lambda_cloud.settings import Settings
    from trainmaster.sim.lambda_cloud.simulator import Simulator

    if list_faults:
        rows = [[name, fault.kind, f"{fault.rate:g}", fault.effect] for name, fault in FAULTS.items()]
        _print_faults(rows, as_json=as_json)
        return
    if not sys.platform.startswith("linux"):
        raise UsageError("the simulator needs Linux: its instances use 127.77.0.0/16 and /proc")
    settings = Settings(
        folder=folder or locate(home) / "sim" / "lambda", port=port, ssh_port=ssh_port, seed=seed,
        faults=parse_rates(faults), boot_s=boot_s, terminate_s=terminate_s, time_factor=time_factor,
        api_key_file=api_key_file, capacity=capacity, quota=quota,
    )  # fmt: skip
    asked: list[int] = []  # no Event: a handler that sets it can come while `wait` holds its lock, and wait for ever
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _frame: asked.append(received))
    simulator = Simulator(settings).start()
    try:
        _announce(simulator, as_json=as_json)
        while not asked:
            time.sleep(0.1)
        summary = simulator.summary()
    finally:
        simulator.close()
    _print_summary(summary, as_json=as_json)


def _announce(simulator: Any, *, as_json: bool) -> None:
    environment = simulator.environment()
    if as_json:
        details = {"url": simulator.url, "ssh_port": simulator.ssh_port, "environment": environment, "pid": os.getpid()}
        typer.echo(json.dumps(details))
    else:
        if simulator.leftovers:
            _console.note(f"{simulator.leftovers} instances of an earlier simulator were removed")
        _console.err.print(f"Lambda Cloud simulated at [bold]{simulator.url}[/]  (Ctrl-C ends it and every instance)")
        _console.note("set these for the target `lambda`, here or where `trainmaster serve` starts:")
        for name, value in environment.items():
            typer.echo(f"export {name}={shlex.quote(value)}")
        _console.note(f"faults and costs: {simulator.url}/sim/faults and {simulator.url}/sim/summary, with the API key")
    sys.stdout.flush()


def _print_summary(summary: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(summary))
        return
    limits = summary["rate_limit_violations"]
    statuses = ", ".join(f"{count} × {status}" for status, count in summary["requests_by_status"].items())
    lines = [
        f"{summary['launches']} launches, {summary['instance_minutes']:.1f} instance-minutes, "
        f"{summary['billed_minutes']} billed: ${summary['cost_usd']:.2f}",
        f"not terminated: {len(summary['not_terminated'])} instances, ${summary['cost_usd_not_terminated']:.2f}",
        f"{summary['requests']} requests{f': {statuses}' if statuses else ''}",
        f"over the rate limit: {limits['requests']} requests, {limits['launches']} launches",
    ]
    if injected := summary["faults_injected"]:
        lines.append("faults: " + ", ".join(f"{count} × {name}" for name, count in injected.items()))
    if touched := summary["foreign_touched"]:
        lines.append(f"instances of somebody else touched: {', '.join(touched)}")
    for line in lines:
        typer.echo(line)


def _print_faults(rows: list[list[str]], *, as_json: bool) -> None:
    names = ("fault", "drawn_per", "rate_with_all", "effect")
    if as_json:
        typer.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows]))
        return
    for name, kind, rate, effect in rows:
        typer.echo(f"{name:18} {rate:>5} per {kind:9} {effect}")
