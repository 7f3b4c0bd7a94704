"""`trainmaster cluster shell`: a shell or a command in a pod of a job, or in a throw-away pod like it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainmaster.cli import _console
from trainmaster.cli._jobs.cluster_test import JOB_NAME
from trainmaster.core.errors import UsageError

if TYPE_CHECKING:
    from trainmaster.cluster.pod_shell import Choice
    from trainmaster.targets.kubernetes.client import Client
    from trainmaster.targets.kubernetes.commands import Place, Terminal
    from trainmaster.targets.kubernetes.settings import Settings

_HOUR_S = 3600


def shell(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND …]", help="Command to run in place of a shell.")
    ] = None,
    job: Annotated[str, typer.Option(help="Name or id of the job, or name of its object in the cluster.")] = JOB_NAME,
    rank: Annotated[int | None, typer.Option(min=0, help="In the pod of this rank.")] = None,
    node: Annotated[str | None, typer.Option(help="In the pod of this node: its rank in the job, or its name.")] = None,
    pod: Annotated[str | None, typer.Option(help="In the pod with this name.")] = None,
    new: Annotated[
        bool,
        typer.Option("--new", help="In a pod of its own, without GPUs, deleted afterwards; --node NAME places it."),
    ] = False,
    manifest: Annotated[
        Path | None, typer.Option(help="With --new: manifest of a job that is not in the cluster.")
    ] = None,
    hours: Annotated[float, typer.Option(min=0.01, help="With --new: the pod ends by itself after this time.")] = 8.0,
    on: Annotated[str, typer.Option(help="Cluster, as kubernetes:cluster.yaml.")] = "kubernetes",
) -> None:
    """Open a shell in a pod of a job: by rank, node or name; else that of node 0.

    With --new, in a throw-away pod with the image, the mounts, the environment and the user of the job's pods. It is
    deleted when the shell ends, also after Ctrl-C; after SIGKILL the next one deletes it.

    The exit code is that of the command. Without a terminal, write the command; it gets no input.

    Needs the rights that `trainmaster cluster rights --shell` asks for. No kubectl is needed.

    [bold]Examples[/]

      trainmaster cluster shell --on kubernetes:cluster.yaml --job my-run --rank 8

      trainmaster cluster shell --on hyperpod:cluster.yaml --node 0 -- nvidia-smi

      trainmaster cluster shell --on hyperpod:cluster.yaml --new -- ls /fsx/checkpoints
    """
    from trainmaster.cluster.pod_shell import SHELL, Choice
    from trainmaster.targets.kubernetes import read_settings

    if sum(option is not None for option in (rank, node, pod)) > 1:
        raise UsageError("write one of --rank, --node and --pod")
    if new and (rank is not None or pod is not None or (node or "").isdecimal()):
        raise UsageError("--new makes a pod of its own; only --node with the name of a node goes with it")
    if manifest is not None and not new:
        raise UsageError("--manifest goes with --new")
    screen = sys.stdin.isatty() and sys.stdout.isatty()
    if not words and not screen:
        raise UsageError("no terminal here: write the command after --, as in: -- nvidia-smi")
    settings = read_settings(on)
    place = _Place(
        job=job, choice=Choice(rank=rank, node=node, pod=pod), manifest=manifest, lasts_s=int(hours * _HOUR_S)
    )

    async def go(client: Client) -> int:
        async with place.open(client, settings.namespace, new=new) as chosen:
            return await _run(client, chosen, words or SHELL, screen=screen)

    if code := _call(go, settings):
        raise typer.Exit(code)


class _Place:
    """Where the command runs."""

    def __init__(self, *, job: str, choice: Choice, manifest: Path | None, lasts_s: int) -> None:
        self._job, self._choice, self._manifest, self._lasts_s = job, choice, manifest, lasts_s

    @contextlib.asynccontextmanager
    async def open(self, client: Client, namespace: str, *, new: bool) -> AsyncIterator[Place]:
        from trainmaster.cluster import pod_shell

        if not new:
            place = await pod_shell.find_place(client, namespace, self._job, self._choice)
            _console.note(f"pod {place.pod}")
            yield place
            return
        spec = self._spec() or await pod_shell.pod_spec_of(client, namespace, self._job)
        async with pod_shell.throw_away(
            client, namespace, self._job, spec, node=self._choice.node, lasts_s=self._lasts_s, tell=_console.note
        ) as place:
            yield place

    def _spec(self) -> dict[str, object] | None:
        from trainmaster.cli._documents.manifest_file import load
        from trainmaster.cluster.hyperpod.manifest import find_job, pod_template

        if self._manifest is None:
            return None
        made = find_job(load(self._manifest))
        if made is None:
            raise UsageError(f"{self._manifest} has no training job")
        return dict(pod_template(made)["spec"])


def _call(work: Callable[[Client], Awaitable[int]], settings: Settings) -> int:
    """Run with a client. Ctrl-C, SIGTERM and a closed terminal cancel: a throw-away pod is removed first."""
    from trainmaster.targets.kubernetes.client import Client
    from trainmaster.targets.kubernetes.kubeconfig import load_access

    async def go() -> int:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, _cancel, task, number)
        client = Client(load_access(settings.kubeconfig, settings.context))
        try:
            return await work(client)
        finally:
            await client.close()

    try:
        return asyncio.run(go())
    except asyncio.CancelledError as ended:
        raise typer.Exit(128 + int(str(ended) or signal.SIGTERM)) from None


def _cancel(task: asyncio.Task[int], number: int) -> None:
    """Cancel once: a second signal must not break off the removal of the pod."""
    if not task.cancelling():
        task.cancel(str(int(number)))


async def _run(client: Client, place: Place, words: Sequence[str], *, screen: bool) -> int:
    from trainmaster.targets.kubernetes.commands import Terminal, run_command

    def write(number: int) -> Callable[[bytes], None]:
        def put(data: bytes) -> None:
            while data:
                data = data[os.write(number, data) :]

        return put

    terminal = Terminal() if screen else None
    with _keyboard(terminal) if terminal is not None else contextlib.nullcontext():
        return await run_command(client, place, words, out=write(1), err=write(2), terminal=terminal)


@contextlib.contextmanager
def _keyboard(terminal: Terminal) -> Iterator[None]:
    """Every key goes to the pod as it is typed, Ctrl-C too, and the size of the window when it changes."""
    import termios
    import tty

    loop, number = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(number)

    def resize() -> None:
        size = shutil.get_terminal_size()
        terminal.resize(size.columns, size.lines)

    def read() -> None:
        data = os.read(number, 4096)
        if data:
            terminal.type(data)
        else:
            loop.remove_reader(number)

    tty.setraw(number)
    loop.add_reader(number, read)
    loop.add_signal_handler(signal.SIGWINCH, resize)
    resize()
    try:
        yield
    finally:
        loop.remove_reader(number)
        loop.remove_signal_handler(signal.SIGWINCH)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
