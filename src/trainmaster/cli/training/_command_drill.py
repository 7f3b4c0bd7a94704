"""The drill of a command: what is drilled, from a job spec or from the words after `--`."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from trainmaster.cli import _console
from trainmaster.core.errors import UsageError
from trainmaster.core.secret.in_spec import find_in_spec
from trainmaster.core.spec import JobSpec, parse_spec
from trainmaster.core.workdir import find_digest
from trainmaster.documents import yaml_file

if TYPE_CHECKING:
    from trainmaster.cli._views.drill_report import Report
    from trainmaster.drill.record import Setup

_UNDISTURBED = ("witness", "reference", "reference-2")  # in the folder of a drill, before anything is struck
# Options of drill, which people write behind `--` too.
_OWN = ("--strike", "--resume-command", "--workdir", "--link", "--out", "--json", "--processes", "--seed", "--command")
_DOCUMENTS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options that only a command takes; what is not stated is None or empty."""

    strike: tuple[str, ...] = ()
    resume_command: str | None = None
    workdir: Path | None = None
    link: tuple[str, ...] = ()

    @property
    def stated(self) -> list[str]:
        names = ("strike", "resume_command", "workdir", "link")
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name)]


def choose(first: str | None, words: Sequence[str], spec: Path | None, options: Options) -> Setup | None:
    """What to drill; None where the first word names a training config."""
    from trainmaster.drill.plan import STRIKES
    from trainmaster.drill.record import Setup

    if unknown := [name for name in options.strike if name not in STRIKES]:
        raise UsageError(f"--strike {unknown[0]}: the strikes are {', '.join(STRIKES)}; `--strike list` explains them")
    if spec is None and first is None:
        raise UsageError("name a training config or a job spec, or write the command: drill -- python train.py")
    if spec is not None:
        job, folder = _from_spec(spec, [*([first] if first else []), *words])
    elif Path(str(first)).suffix not in _DOCUMENTS:
        job, folder = _from_words([str(first), *words])
    elif _has_command(Path(str(first))):
        job, folder = _from_spec(Path(str(first)), words)
    elif options.stated:
        raise UsageError(f"{options.stated[0]} belongs to the drill of a command, and {first} is a training config")
    else:
        return None
    again = tuple(shlex.split(options.resume_command)) if options.resume_command else None
    _refuse_secrets(job, again)
    return Setup(
        spec=job,
        again=again,
        work=options.workdir.absolute() if options.workdir is not None else folder,
        links=options.link,
        strikes=options.strike or tuple(STRIKES),
        own_mounts=True,
    )


def _refuse_secrets(job: JobSpec, again: tuple[str, ...] | None) -> None:
    """UsageError for what `submit` refuses too: a drill prints its command, and keeps it in the proof."""
    named = [(fault.path, fault) for fault in find_in_spec(job)]
    if again is not None:
        resumed = find_in_spec(replace(job, command=again, env={}))
        named += [(fault.path.replace("command", "--resume-command", 1), fault) for fault in resumed]
    if named:
        place, fault = named[0]
        what = fault.message.partition(";")[0]
        raise UsageError(
            f"{place}: {what}; a drill prints its command and keeps it in the proof: export it as a variable before "
            "the drill, and let the program read that. If it is none, drill a spec with "
            f"allow: {{{fault.path!r}: reason}}"
        )


def settle(setup: Setup, processes: int | None, seed: int) -> Setup:
    """The same with the number of ranks and the seed of the command line."""
    resources = setup.spec.resources
    ranks = processes or resources.processes_per_node
    return replace(setup, seed=seed, spec=replace(setup.spec, resources=replace(resources, processes_per_node=ranks)))


def run(setup: Setup, folder: Path, say: Callable[[str, int, int], None]) -> Report:
    """Drill it, in this folder. Interrupted, it tells what was found until then."""
    from trainmaster.cli._views import command_proof
    from trainmaster.drill.attempt import DrillFailed
    from trainmaster.drill.record import Interrupted
    from trainmaster.drill.run import CommandDrill

    try:
        proof = CommandDrill(setup, folder, say).run()
    except Interrupted as interrupted:
        proof = interrupted.proof
    except DrillFailed as failed:
        words = [word for word in setup.spec.command or () if word.partition("=")[0] in _OWN]
        mine = [word for word in words if word in str(failed)]
        if not mine or not re.search("unrecogni[sz]ed|no such option|unknown", str(failed), re.IGNORECASE):
            raise
        raise DrillFailed(f"{failed}; {mine[0]} went to the program: options of drill stand before --") from None
    return command_proof.report(proof)


def list_leftovers(out: Path) -> list[Path]:
    """What a drill of a command left whose undisturbed run failed: nothing else is in the folder, and no report."""
    found = sorted(out.iterdir()) if out.is_dir() else []
    made = all(entry.name in _UNDISTURBED and entry.is_dir() and not entry.is_symlink() for entry in found)
    return found if made and (out / "witness" / "trainmaster_witness.py").is_file() else []


def list_strikes(names: Sequence[str], *, as_json: bool) -> None:
    """Where `list` is among the names, print every strike, a line each, and end the verb."""
    from trainmaster.drill.plan import STRIKES

    if "list" not in names:
        return
    if as_json:
        _console.as_json({"strikes": STRIKES})
    else:
        for name, what in STRIKES.items():
            _console.out.print(f"{name:<12} {what}", soft_wrap=True)
    raise typer.Exit


def show_plan(setup: Setup) -> None:
    """What is about to happen, before the first run has shown how the program saves."""
    from trainmaster.drill.plan import complete

    many = len(complete(setup.strikes))
    strikes = "1 strike" if many == 1 else f"up to {many} strikes"
    copied = f"copies of {setup.work}" if setup.work is not None else "an empty folder"
    _console.err.print(
        f"[dim]{_console.plain(shlex.join(setup.spec.command or ()))}: twice undisturbed, then "
        f"{strikes}, in {_console.plain(copied)}; seed {setup.seed}; W&B offline[/]",
        soft_wrap=True,
    )


def _has_command(path: Path) -> bool:
    value = yaml_file.load(path).value
    return isinstance(value, dict) and "command" in value


def _from_spec(path: Path, words: Sequence[str]) -> tuple[JobSpec, Path | None]:
    document = yaml_file.load(path)
    value = yaml_file.override(document.value, list(words))
    stated = value.get("workdir") if isinstance(value, dict) else None
    beside = stated if isinstance(stated, str) and not stated.startswith("/") and find_digest(stated) is None else None
    if beside is not None:  # `submit` reads it so too
        value = {name: item for name, item in value.items() if name != "workdir"}
    job = document.read(lambda _: parse_spec(value), list(words))
    if job.command is None:
        raise UsageError(f"{path} has no `command:`; a training config is drilled with: trainmaster drill CONFIG")
    if job.container is not None or job.resources.nodes > 1:
        what = "a container" if job.container is not None else f"{job.resources.nodes} nodes"
        raise UsageError(f"{path} has {what}, and a drill runs on this machine: leave it out for the drill")
    if job.workdir is not None and find_digest(job.workdir) is not None:
        raise UsageError(f"{path}: an uploaded `workdir` is not on this machine; name its folder with --workdir")
    if beside == "none":
        return job, None
    folder = Path(job.workdir) if job.workdir is not None else path.absolute().parent / (beside or "")
    return replace(job, workdir=None), folder


def _from_words(words: Sequence[str]) -> tuple[JobSpec, Path | None]:
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"{words[0]}: no such program, and no file that ends with .yaml; a command is written after --"
        )
    return JobSpec(name="drill", command=tuple(words)), Path.cwd()
