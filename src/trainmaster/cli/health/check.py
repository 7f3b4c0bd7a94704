"""`trainmaster check`: is this machine, or every node of a cluster, fit to train on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli._documents.hosts_file import elsewhere, runs_as_job
from trainmaster.cli._home import HomeOption, locate
from trainmaster.cli.health import _evidence
from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    from trainmaster.checks.profiles import Resolved
    from trainmaster.cluster.health.check import ClusterPlan
    from trainmaster.cluster.health.diff import Change
    from trainmaster.cluster.sagemaker.check import SageMakerNodes
    from trainmaster.core.health import ClusterHealth, NodeHealth

_COLLECTIVES = "collectives"
_On = Annotated[str | None, typer.Option("--on", metavar="TARGET", help="Nodes: {targets:check}.")]
_Expect = Annotated[
    list[str] | None,
    typer.Option(metavar="WORD", help="What it should have: gpus=8, ml.p5.48xlarge, H200 or a YAML file; later wins."),
]
_Timeout = Annotated[
    float | None, typer.Option(min=1.0, metavar="S", help="Of one node, with --on; else as its level needs.")
]
_Upload = Annotated[
    str | None, typer.Option(metavar="URL", help="With --out: send the bundle there, as s3://bucket/prefix.")
]
_Nodes = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Instances of the training job, with --on sagemaker; else 1.")
]
_Notes = Annotated[
    list[str] | None,
    typer.Option("--note", metavar="TEXT", help="For the report: site, operator, ticket; may be repeated."),
]
_Price = Annotated[
    float | None,
    typer.Option(
        "--node-price", "--price", min=0.0, metavar="USD", help="Per hour of one node; else its instance's list price."
    ),
]
_DryRun = Annotated[
    bool, typer.Option("--dry-run", help="With --on sagemaker: print the request of the training job; touch nothing.")
]


def _print_list(wanted: bool) -> None:
    """Every check with its level, and what holds when it passes."""
    if not wanted:
        return
    from rich.table import Table

    from trainmaster import checks
    from trainmaster.cli import _console

    table = Table("check", "level", "holds when it passes", box=None, pad_edge=False, header_style="dim")
    for name in checks.names():
        loaded = checks.load(name)
        table.add_row(name, str(loaded.LEVEL), _console.plain((loaded.__doc__ or "").splitlines()[0]))
    _console.out.print(table)
    raise typer.Exit


_List = Annotated[
    bool, typer.Option("--list", callback=_print_list, is_eager=True, help="Print every check and what it holds.")
]


def check(
    level: Annotated[int, typer.Option(min=1, max=3, help="1 passive (seconds), 2 uses the GPU, 3 stress.")] = 1,
    expect: _Expect = None,
    only: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Run only these; may be repeated.")] = None,
    skip: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Leave these out; may be repeated.")] = None,
    listed: _List = False,  # noqa: ARG001 (its callback prints)
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    on: _On = None,
    nodes: _Nodes = None,
    dry_run: _DryRun = False,
    timeout: _Timeout = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the evidence bundle there.")] = None,
    diff: Annotated[Path | None, typer.Option(metavar="DIR", help="Show what changed since that bundle.")] = None,
    upload: _Upload = None,
    price: _Price = None,
    note: _Notes = None,
    home: HomeOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="End with 1 on WARN, with 3 on unseen faults.")] = False,
    nagios: Annotated[bool, typer.Option("--nagios", help="End with 0, 1, 2 or 3 as Nagios reads them.")] = False,
    capture: Annotated[Path | None, typer.Option(metavar="DIR", help="Write down everything that was read.")] = None,
    replay: Annotated[Path | None, typer.Option(metavar="DIR", help="Judge a captured machine, not this one.")] = None,
) -> None:
    """Check this machine and give one verdict: PASS, WARN, FAIL or INCOMPLETE.

    What could not be measured is never a pass. Ends with 0 (PASS, WARN), 1 (FAIL), 2 (wrong usage), 3 (INCOMPLETE).

    [bold]Examples[/]

      trainmaster check

      trainmaster check --expect ml.p5.48xlarge --expect driver=580

      trainmaster check --expect gpus=8 --expect gpu_model=H200 --expect site.yaml

      trainmaster check --only disk_space --only shm --json

      trainmaster check --out evidence/     then, anywhere: trainmaster rejudge evidence/

      trainmaster check --on ssh:hosts.yaml --out today/ --diff yesterday/ --note "rack 7, ticket 4711"

      trainmaster check --on ssh:hosts.yaml --level 2     each node alone, then collectives; or --on slurm

      trainmaster check --on sagemaker:account.yaml --nodes 2 --level 2 --dry-run     then without --dry-run

      trainmaster check --level 2 --out evidence/ --upload s3://bucket/acceptance/node-7
    """
    from trainmaster.cluster.health import diff as between
    from trainmaster.cluster.health import evidence
    from trainmaster.cluster.health.check import plan
    from trainmaster.core.results import exit_code

    on = elsewhere(on)
    _refuse_contradictions(out=out, capture=capture, on=on, replay=replay, upload=upload, job=dry_run or nodes)
    wanted = read_words(expect or [])
    # Before anything is written: a wrong name makes no folder.
    here = _plan_here(level, read_names(only), read_names(skip)) if on is None else []
    cluster = plan(level, read_names(only), read_names(skip)) if on is not None else None
    if dry_run and on is not None and cluster is not None:
        return _print_request(on, wanted, cluster, nodes=nodes, timeout_s=timeout, as_json=as_json)
    if out is not None:
        evidence.refuse_used(out)
    before = evidence.load(diff) if diff is not None else None
    node: NodeHealth | None = None
    if on is not None and cluster is not None:
        health = _cluster(on, wanted, cluster, home=locate(home), nodes=nodes, timeout_s=timeout, out=out)
    else:
        node = _node(wanted, level=level, planned=here, alone=not only, replay=replay, capture=capture, out=out)
        health = _cluster_of_one(node)
    health = replace(health, notes=tuple(word[:500] for word in note or ()))
    digest = _evidence.keep(out, health, price=price, upload=upload) if out is not None else ""
    if replay is None:
        _evidence.remember(home, health, digest, on=on)
    changes = between.compare(before, health) if before is not None else None
    # Only now: the bundle and the history keep what was measured.
    health, node = (health.demanding(), node and node.demanding()) if strict else (health, node)
    if as_json:
        _print_json(node, health, changes, strict=strict, nagios=nagios)
    else:
        _print_text(node, health, changes, since=str(diff))
    raise typer.Exit(exit_code(health.overall, strict=strict, nagios=nagios))


def _cluster_of_one(node: NodeHealth) -> ClusterHealth:
    """One node as a cluster, so that bundle, rejudge and diff are the same for both."""
    from trainmaster.core.health import ClusterHealth

    return ClusterHealth(asked=(node.node,), nodes=(node,), started_at=node.started_at, took_s=node.took_s)


def _print_json(
    node: NodeHealth | None, health: ClusterHealth, changes: list[Change] | None, *, strict: bool, nagios: bool
) -> None:
    from trainmaster.checks import document
    from trainmaster.cli import _console

    plain = document.document(node, strict=strict, nagios=nagios) if node is not None else health.to_plain()
    _console.as_json(plain if changes is None else {**plain, "diff": changes})


def _print_text(node: NodeHealth | None, health: ClusterHealth, changes: list[Change] | None, *, since: str) -> None:
    from trainmaster.cli._views import check_table, cluster_table
    from trainmaster.cli._views import diff as _diff

    if node is not None:
        check_table.show(node)
    else:
        cluster_table.show(health)
    _note_unchecked_gpus(health)
    if changes is not None:
        _diff.show(changes, since=since)


def _refuse_contradictions(
    *, out: Path | None, capture: Path | None, on: str | None, replay: Path | None, upload: str | None, job: object
) -> None:
    if job and not runs_as_job(on, "check"):
        raise UsageError("--nodes and --dry-run are about a training job: add --on sagemaker:account.yaml")
    if out is not None and capture is not None:
        raise UsageError("--out captures into its folder already; leave --capture out")
    if on is not None and (capture is not None or replay is not None):
        raise UsageError("--on asks other machines: --out keeps their captures, and `trainmaster rejudge` replays them")
    if upload is not None and out is None:
        raise UsageError("--upload sends what --out wrote; give --out DIR too")


def _plan_here(level: int, only: list[str], skip: list[str]) -> list[str]:
    """The checks of this machine. Collectives run between nodes, so only with --on."""
    from trainmaster import checks

    if _COLLECTIVES in only:
        raise UsageError(
            f"{_COLLECTIVES} run between nodes: add --on ssh:hosts.yaml. On this machine use --only nccl, or "
            "`trainmaster bandwidth`"
        )
    return checks.plan(level, only, [name for name in skip if name != _COLLECTIVES])


def read_words(words: list[str]) -> list[str | Mapping[str, object]]:
    """The words of `--expect`, with each YAML file read; every fault now, before a machine is asked."""
    from trainmaster.checks import profiles
    from trainmaster.documents import yaml_file

    selected: list[str | Mapping[str, object]] = [
        yaml_file.load(Path(word)).read(profiles.parse_document) if word.endswith((".yaml", ".yml")) else word
        for word in words
    ]
    profiles.resolve(selected)
    return selected


def _node(
    wanted: list[str | Mapping[str, object]],
    *,
    level: int,
    planned: list[str],
    alone: bool,
    replay: Path | None,
    capture: Path | None,
    out: Path | None,
) -> NodeHealth:
    """This machine, or a captured one."""
    from trainmaster.checks import document, profiles
    from trainmaster.cli import _console
    from trainmaster.cluster.health import evidence
    from trainmaster.core.results import CheckResult
    from trainmaster.node.recorded import open_host

    host = open_host(replay=replay)
    name = document.name_of(host)
    if out is not None:
        capture = evidence.capture_folder(out, name or "")
    host = open_host(replay=replay, capture=capture)
    # Nobody sees a progress line in a file or a pipe.
    with _console.err.status("", spinner="dots") if sys.stdout.isatty() else _Quiet() as progress:

        def on_result(result: CheckResult) -> None:
            done = planned.index(result.check) + 1
            now = planned[done] if done < len(planned) else "verdict"
            progress.update(f"[dim]{done}/{len(planned)}[/] {now}")

        progress.update(f"[dim]0/{len(planned)}[/] {planned[0]}")
        known = profiles.resolve(wanted, host)
        return document.measure(
            host,
            known.expect,
            level=level,
            only=planned,
            node=name,
            profile=known.profile,
            alone=alone,
            on_result=on_result,
        )


def _find_job(on: str, wanted: list[str | Mapping[str, object]], count: int | None) -> tuple[SageMakerNodes, Resolved]:
    """The hosts of a training job, and what they should have: first of all what its instance type has."""
    from trainmaster.checks import profiles
    from trainmaster.cli._documents.hosts_file import load_training_job

    job = load_training_job(on, count or 1)
    kind = job.settings.instance_type
    return job, profiles.resolve([kind, *wanted] if profiles.find_instance(kind) is not None else wanted)


def _print_request(
    on: str, wanted: list[str | Mapping[str, object]], planned: ClusterPlan, *, nodes: int | None,
    timeout_s: float | None, as_json: bool,
) -> None:  # fmt: skip
    from trainmaster.cli import _console
    from trainmaster.cluster.health.check import plan_job

    job, known = _find_job(on, wanted, nodes)
    made = plan_job(job, planned, known, timeout_s=timeout_s)
    if as_json:
        _console.as_json({"files": dict(made.files), "commands": [list(command) for command in made.commands]})
    else:
        _console.out.out(made.render(), end="")


def _cluster(
    on: str, wanted: list[str | Mapping[str, object]], planned: ClusterPlan, *, home: Path, nodes: int | None,
    timeout_s: float | None, out: Path | None,
) -> ClusterHealth:  # fmt: skip
    """Check every node of a target, with a progress line."""
    from trainmaster.checks import profiles
    from trainmaster.cli import _console
    from trainmaster.cli._documents.hosts_file import load_nodes
    from trainmaster.cluster.collectives import run as collectives
    from trainmaster.cluster.health.check import check as check_nodes
    from trainmaster.cluster.health.check import check_job
    from trainmaster.cluster.health.gather import Watch

    with _console.err.status("", spinner="dots") if sys.stderr.isatty() else _Quiet() as progress:
        answers = _Answers(progress.update)
        watch = Watch(on_nodes=answers.begin, on_answer=answers.add)
        if runs_as_job(on, "check"):
            job, known = _find_job(on, wanted, nodes)
            health = check_job(
                job, planned, known, timeout_s=timeout_s, bundle=out, watch=watch,
                on_state=lambda text: progress.update(f"[dim]{_console.plain(text)}[/]"),
                on_note=lambda text: _console.note(_console.plain(text)),
            )  # fmt: skip
        else:
            health = check_nodes(
                load_nodes(on, verb="check"), planned, profiles.resolve(wanted), home=home, timeout_s=timeout_s,
                bundle=out, watch=watch,
                on_collectives=lambda: progress.update("[dim]collectives[/] between the healthy nodes"),
            )  # fmt: skip
    sent, back = watch.transfer.sent_bytes / 1024, watch.transfer.received_bytes / 1024
    _console.note(f"{len(health.asked)} hosts in {health.took_s:.1f} s; sent {sent:.0f} KiB, received {back:.0f} KiB")
    for result in health.cluster:
        if result.check == collectives.NAME:
            _console.note(_console.plain(collectives.summary(result)))
    return health


class _Answers:
    """Which nodes have answered, as a line of progress."""

    def __init__(self, update: Callable[[str], None]) -> None:
        self._update = update
        self._total, self._waiting, self._silent = 0, list[str](), list[str]()

    def begin(self, names: Sequence[str]) -> None:
        self._total, self._waiting = len(names), list(names)
        self._update(f"[dim]0/{self._total} answered[/]")

    def add(self, name: str, overall: str) -> None:
        from trainmaster.cli import _console
        from trainmaster.cli._views.cluster_table import fold

        self._waiting.remove(name)
        if overall == "silent":
            self._silent.append(name)
        lost = f"; silent: {fold(self._silent)}" if self._silent else ""
        waiting = f"; waiting for {fold(self._waiting)}" if self._waiting else ""
        done = self._total - len(self._waiting)
        self._update(f"[dim]{done}/{self._total} answered[/]{_console.plain(lost + waiting)}")


class _Quiet:
    """A progress line that nobody reads."""

    def __enter__(self) -> _Quiet:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, status: str) -> None:
        pass


def read_names(words: list[str] | None) -> list[str]:
    """`--only a --only b` and `--only a,b` are the same."""
    return [name.strip() for word in words or [] for name in word.split(",") if name.strip()]


def _note_unchecked_gpus(health: ClusterHealth) -> None:
    """Say it where a verdict is about machines without GPUs."""
    from trainmaster.cli import _console
    from trainmaster.core.results import Verdict

    results = [result for node in health.nodes for result in node.results if result.check == "gpu_count"]
    if results and all(finding.verdict is Verdict.SKIP for result in results for finding in result.findings):
        _console.out.print("no GPU was checked: none found and none expected (--expect gpus=8)", soft_wrap=True)
