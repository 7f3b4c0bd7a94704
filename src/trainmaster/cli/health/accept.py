"""`trainmaster accept`: train a known model on every GPU and judge speed, losses and bits."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from trainmaster.cli import _console
from trainmaster.cli._documents.hosts_file import elsewhere, load_cluster, runs_as_job
from trainmaster.cli._home import HomeOption, locate
from trainmaster.cli._views import accept_options as _options
from trainmaster.core.errors import UsageError
from trainmaster.core.results import Overall, exit_code

if TYPE_CHECKING:
    from trainmaster.bench.accept.options import Options
    from trainmaster.cluster.acceptance.suite_plan import Machine

_NODES_START = "the ranks start on every node; the result follows when all have ended"
_MARKS = {"pass": "green", "warn": "yellow", "fail": "red", "error": "red", "skip": "dim"}


@_options.with_table
def accept(
    *,
    out: _options.Out = Path("results.json"),
    suite: _options.Suite = None,
    on: _options.On = None,
    nodes: _options.Nodes = None,
    expect: _options.Expect = None,
    only: _options.Only = None,
    min_busbw: _options.MinBusbw = None,
    dry_run: _options.DryRun = None,
    image: _options.Image = "gpu_cluster_testing:latest",
    as_json: _options.AsJson = False,
    home: HomeOption = None,
    strict: _options.Strict = False,
    **given: Any,
) -> None:
    """Accept a machine or a cluster by training: throughput, step times, stragglers, losses and equal bits.

    Starts one rank per GPU; under torchrun, srun or mpirun it takes part as one of them; in a pod of Kubeflow or on a
    host of SageMaker it starts the ranks of that node. Every rank must end with the same parameters, and compute the
    same gradients of one batch twice. Ends with 0 (PASS, WARN), 1 (FAIL), 2 (wrong usage), 3 (INCOMPLETE: also where no
    baseline is known; --min-throughput states your own).

    Environment: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT of plain ranks; BACKEND; NCCL_TIMEOUT_MS;
    NCCL_DEBUG (INFO unless set), NCCL_SOCKET_IFNAME, NCCL_IB_HCA, NCCL_IB_DISABLE as NCCL reads them.

    [bold]Examples[/]

      trainmaster accept

      trainmaster accept --model resnet18 --batch-size 128 --data-mode fashion_mnist --num-classes 10

      trainmaster accept --suite full --out acceptance/ --expect gpus=8

      trainmaster accept --on ssh:hosts.yaml --batch-size 64          or: --on slurm, --on kubernetes:cluster.yaml

      trainmaster accept --on sagemaker:account.yaml --nodes 2 --dry-run plan         then without --dry-run

      srun -N4 --ntasks-per-node=8 trainmaster accept --batch-size 64

      trainmaster accept --processes 4 --image-size 64 --batch-size 8 --min-throughput 5 --inject slow:2:0.3
    """
    own = {name: value for name, value in locals().items() if name != "given"}
    _accept({**own, **given})


def _accept(given: dict[str, Any]) -> None:
    from trainmaster.bench.accept.results import refuse_folder, save

    options, out, is_suite = _read(given), given["out"], given["suite"] is not None
    given["on"] = elsewhere(given["on"])
    if given["nodes"] is not None and not runs_as_job(given["on"], "accept"):
        raise UsageError("--nodes is about a training job: add --on sagemaker:account.yaml; other targets have theirs")
    if given["dry_run"] == "plan":
        _console.out.out(_plan(given, options), end="")
        return
    if given["dry_run"] is not None:
        _console.out.out(render_file(given["dry_run"], options, image=given["image"]), end="")
        return
    if not is_suite:
        refuse_folder(out)
    document = _run_suite(given, options) if is_suite else _run(given, options)
    if document is None:
        return
    if not is_suite:
        save(document, out)
    if given["as_json"]:
        _console.as_json(document)
    elif is_suite:
        _show_suite(document, _folder(out))
    else:
        _show(document, out)
    raise typer.Exit(exit_code(Overall(document["overall"]), strict=given["strict"]))


def render_file(name: str, options: Options, *, image: str) -> str:
    """A file of examples/, as text."""
    import yaml

    from trainmaster.cluster.acceptance import files

    manifest = files.manifest(name, options, image=image)
    if manifest is None:
        return files.script(name, options, image=image)
    about, job = manifest
    # Every part is written out where it is used: people edit these files by hand.
    dumper = type("Plain", (yaml.SafeDumper,), {"ignore_aliases": lambda *_: True})
    head = f"# {about.replace(chr(10), chr(10) + '# ')}\n# Made by: trainmaster accept --dry-run {name}\n"
    return head + yaml.dump(job, Dumper=dumper, sort_keys=False, width=120)


def _plan(given: Mapping[str, Any], options: Options) -> str:
    """The objects of a run as one job of a target, as text."""
    from trainmaster import targets
    from trainmaster.cluster.acceptance import run as acceptance

    target = load_cluster(given["on"], verb="accept") if given["on"] is not None else None
    if not isinstance(target, targets.RunsClusterJobs):
        raise UsageError("--dry-run plan: with --on kubernetes, sagemaker or slurm; without --on write a file's name")
    return acceptance.dry_run(target, options, home=locate(given["home"]), nodes=given["nodes"])


def _run(given: Mapping[str, Any], options: Options) -> dict[str, Any] | None:
    """The run on this machine, in this rank, or on the nodes of a target."""
    if given["on"] is not None:
        from trainmaster.cluster.acceptance import run as acceptance

        target = load_cluster(given["on"], verb="accept")
        if not runs_as_job(given["on"], "accept"):
            _say(_NODES_START)
        return acceptance.accept(target, options, home=locate(given["home"]), nodes=given["nodes"], on_note=_say)
    from trainmaster.bench.accept import run
    from trainmaster.node.ranks import detect

    if detect(os.environ).launcher == "single":  # of the ranks of another launcher, each would print it
        _say("starting the ranks; torch is loaded first")
    return run(options, env=os.environ, show=_say)


def _say(text: str) -> None:
    _console.err.print(f"[dim]{escape(text)}[/]", soft_wrap=True)


def _folder(out: Path) -> Path:
    """The folder of a suite: --out, or `acceptance` where that is the default file."""
    return Path("acceptance") if out == Path("results.json") else out


def _run_suite(given: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """All parts of a suite, and its reports beside them."""
    from trainmaster.bench.accept import count_gpus
    from trainmaster.cluster.acceptance import suite as suites
    from trainmaster.cluster.acceptance.suite_plan import Machine, plan
    from trainmaster.node.ranks import detect
    from trainmaster.report.acceptance import write_bundle

    if given["suite"] not in ("quick", "full"):
        raise UsageError(f"--suite {given['suite']}: quick or full")
    if runs_as_job(given["on"], "accept"):
        raise UsageError("--suite: each training job has other machines; run `check` and then `accept` --on sagemaker")
    if detect(os.environ).launcher != "single":
        raise UsageError("--suite starts its own ranks: start it once, without a launcher, or with --on TARGET")
    _refuse_words(given)
    folder = _folder(given["out"]).resolve()
    _say(f"suite {given['suite']} in {folder}: parts that have ended there are not repeated")
    if given["on"] is None:
        machine = Machine(on=None, gpus=count_gpus())
    else:
        machine, options = _ask_nodes(given, options)
    parts = plan(
        given["suite"], options, machine, folder, expect=given["expect"] or (), only=given["only"] or (),
        min_busbw=given["min_busbw"],
    )  # fmt: skip
    for part in parts:
        if part.skip is not None:
            _say(f"{part.name}: left out: {part.skip}")
    document = suites.run(
        given["suite"], parts, folder, on=given["on"], show=_say, machine=machine.name(socket.gethostname())
    )
    write_bundle(document, folder)
    return document


def _ask_nodes(given: Mapping[str, Any], options: Options) -> tuple[Machine, Options]:
    """The nodes of the suite, and the options with the backend that fits them."""
    from trainmaster.checks.profiles import resolve
    from trainmaster.cli._documents.hosts_file import load_nodes
    from trainmaster.cli.health.check import read_words
    from trainmaster.cluster.acceptance.suite_plan import ask_nodes

    expect = resolve(read_words(given["expect"] or [])).expect
    target = load_nodes(given["on"], verb="accept")
    _say("asking the nodes for torch and GPUs")
    wants = bool(expect.gpus or expect.gpu_model)
    machine = ask_nodes(target, given["on"], home=locate(given["home"]), expects_gpus=wants)
    if wants and machine.gpus is None and options.backend is None:
        options = replace(options, backend="nccl")  # without it a node whose torch sees no GPU would train on its CPU
    return machine, options


def _refuse_words(given: Mapping[str, Any]) -> None:
    """UsageError for names of the checks that do not exist, before minutes are spent on the other parts."""
    from trainmaster import checks
    from trainmaster.cli.health.check import read_names, read_words
    from trainmaster.cluster.acceptance.suite_plan import LEVEL

    read_words(given["expect"] or [])
    names = [name for name in read_names(given["only"]) if given["on"] is None or name != "collectives"]
    checks.plan(LEVEL[given["suite"]], names, [])


def _show_suite(document: Mapping[str, Any], folder: Path) -> None:
    from trainmaster.cluster.acceptance.suite import last_line

    for part in document["parts"]:
        word = part["overall"] or "–"
        before = "finished before" if part["name"] in document["resumed"] else ""
        reason = part.get("skipped") or (last_line(part["reason"]) if part.get("reason") else "")
        note = "; ".join(filter(None, (before, reason)))
        text = f"{_console.paint(word, width=10)} {escape(part['title'])}  [dim]{escape(note)}[/]"
        _console.out.print(text, soft_wrap=True)
    _console.out.print(f"{_console.paint(document['overall'])}  {escape(str(folder / 'report.html'))}", soft_wrap=True)


def _read(given: Mapping[str, Any]) -> Options:
    """The options of a run from the words of the command line."""
    from trainmaster.bench.accept.options import read

    out: Path = given["out"]
    places = {
        "log_dir": given["log_dir"] or str(out.with_name(f"{out.stem}-logs")),
        "baselines": given["baselines"] or str(locate(given["home"]) / "baselines.toml"),
    }
    return read({**given, **places}, os.environ).checked()


def _show(document: dict[str, Any], out: Path) -> None:
    say = _console.out.print
    for check in document["checks"]:
        for finding in check["findings"]:
            device = f"{finding['device']}: " if finding["device"] else ""
            mark = _MARKS[finding["verdict"]]
            say(f"[{mark}]{finding['verdict']:<5}[/] {check['check']:<18} {escape(device + finding['reason'])}")
            if finding["action"] and finding["verdict"] != "pass":
                say(f"      {'':<18} [dim]{escape(finding['action'])}[/]")
    if "throughput_samples_per_second" in document:
        share = document["communication_share"]
        exchange = f", {share:.0%} of a step is exchange" if share is not None else ""
        say(
            f"{document['throughput_samples_per_second']:,.1f} samples/s, "
            f"{document['average_step_time_seconds'] * 1e3:.2f} ms a step on {document['world_size']} × "
            f"{escape(document['device'])}{exchange}"
        )
    say(f"{_console.paint(document['overall'])}  {escape(str(out))}", soft_wrap=True)
