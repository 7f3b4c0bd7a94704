"""`trainmaster cluster`: a Kubernetes or HyperPod cluster and the manifests for it."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated, Any

import typer

from trainmaster.cli import _console
from trainmaster.cli._documents.hosts_file import ask
from trainmaster.cli._documents.manifest_file import load
from trainmaster.cli._jobs import cluster_shell, cluster_test
from trainmaster.core.errors import Fault, SpecError

cluster = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Kubernetes and HyperPod: tests, shells in pods, log rules, manifests, access rights.

    [bold]Examples[/]

      trainmaster cluster hyperpod-rules --slow-tokens-per-s 50000

      trainmaster cluster lint fsdp-hpto.yaml

      trainmaster cluster rights kubernetes:cluster.yaml

      trainmaster cluster test --action quick-test

      trainmaster cluster shell --job my-run --rank 8
    """,
)
cluster.command("test")(cluster_test.test)
cluster.command("shell")(cluster_shell.shell)


@cluster.command("hyperpod-rules")
def hyperpod_rules(
    start_s: Annotated[int, typer.Option(min=1, help="Longest time from the start to the first heartbeat.")] = 1800,
    silent_s: Annotated[int, typer.Option(min=1, help="Longest time between two heartbeats.")] = 300,
    slow_tokens_per_s: Annotated[
        int | None, typer.Option(min=1, help="A node below this rate is slow.", show_default="no rule")
    ] = None,
    slow_points: Annotated[int, typer.Option(min=1, help="Heartbeats in a row below the rate.")] = 5,
    fault_not_finite: Annotated[
        bool, typer.Option("--fault-not-finite", help="Fault the job at a loss that is NaN or infinite.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print HyperPod's log monitoring rules for the trainer's heartbeat.

    They belong into `spec.runPolicy` of a HyperPodPyTorchJob. `trainmaster submit --on hyperpod` puts them there.

    The trainer prints a heartbeat on local rank 0 of every node, which is where HyperPod looks.

    [bold]Examples[/]

      trainmaster cluster hyperpod-rules

      trainmaster cluster hyperpod-rules --silent-s 600 --slow-tokens-per-s 50000 --fault-not-finite
    """
    from trainmaster.core import heartbeat

    rules = heartbeat.hyperpod_rules(
        start_s=start_s,
        silent_s=silent_s,
        slow_tokens_per_s=slow_tokens_per_s,
        slow_points=slow_points,
        fault_not_finite=fault_not_finite,
    )
    document = {"logMonitoringConfiguration": rules}
    _console.out.out(json_.dumps(document, indent=2) if json else _yaml(document), end="\n" if json else "")


@cluster.command("lint")
def lint(
    manifests: Annotated[list[Path], typer.Argument(help="Manifests as YAML or JSON, several objects in one or not.")],
) -> None:
    """Find traps in manifests of training jobs: accepted by the cluster, and wrong when they run.

    Exit code 2 with every trap, its path and the reason.

    [bold]Examples[/]

      trainmaster cluster lint fsdp-hpto.yaml

      trainmaster submit job.yaml --on hyperpod:cluster.yaml --dry-run > job-hpto.yaml
    """
    from trainmaster.targets.kubernetes.lint import find_traps

    faults, count = [], 0
    for path in manifests:
        for manifest in load(path):
            count += 1
            where = f"{path}: {manifest.get('kind', 'object')} "
            faults += [Fault(path=where + fault.path, message=fault.message) for fault in find_traps(manifest)]
    if faults:
        raise SpecError(faults)
    _console.out.print(f"no trap in {count} {'object' if count == 1 else 'objects'}")


@cluster.command("rights")
def rights(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="As in --on: kubernetes:cluster.yaml.")
    ] = "kubernetes",
    manifest: Annotated[
        bool, typer.Option("--manifest", help="Print a Role with these rights; ask no cluster.")
    ] = False,
    shell: Annotated[bool, typer.Option("--shell", help="With those of `trainmaster cluster shell`.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask the cluster which of the rights that trainmaster needs this account lacks.

    Exit code 1 where one is missing. Without an optional right jobs run, and less is explained.

    [bold]Examples[/]

      trainmaster cluster rights kubernetes:cluster.yaml

      trainmaster cluster rights kubernetes:cluster.yaml --manifest | kubectl apply -f -
    """
    from trainmaster.targets.kubernetes import read_settings
    from trainmaster.targets.kubernetes import rights as needed

    settings = read_settings(target)
    if manifest:
        _console.out.out(needed.render_role(settings, shell=shell), end="")
        return

    answers = ask(needed.check(settings, shell=shell))
    if json:
        _console.out.out(
            json_.dumps([{"right": str(answer.right), "allowed": answer.allowed} for answer in answers], indent=2)
        )
    else:
        for answer in answers:
            word = "yes" if answer.allowed else "missing, optional" if answer.right.optional else "MISSING"
            _console.out.print(f"{word:<18} {answer.right}  ({answer.right.use})")
    if not all(answer.allowed or answer.right.optional for answer in answers):
        raise typer.Exit(1)


def _yaml(document: dict[str, Any]) -> str:
    import yaml

    return str(yaml.safe_dump(document, sort_keys=False, width=200))
