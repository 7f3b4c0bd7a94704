"""The local target: what its folder shows at every point where somebody may have died."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainmaster import targets
from trainmaster.core.errors import TargetError, UsageError
from trainmaster.core.plan import Plan
from trainmaster.core.states import Reason, TargetState
from trainmaster.targets import Lists, Poll

LOCAL = targets.load("local")


def test_the_plan_is_a_file_and_a_command(place: Any) -> None:
    placement = place(resources={"processes_per_node": 2})
    submission = LOCAL.plan(placement)
    folder = placement.job_folder / "attempts" / "1"
    ((path, text),) = submission.files.items()
    assert path == str(folder / "plan.json")
    plan = Plan.from_json(text)
    assert (plan.attempt, plan.folder, plan.spec) == (placement.attempt, str(folder), placement.spec)
    assert plan.checkpoints == str(placement.job_folder / "checkpoints")
    assert submission.commands == ((sys.executable, "-m", "trainmaster.agent", "--detach", path),)


def test_local_is_one_node_without_options(place: Any) -> None:
    with pytest.raises(TargetError, match="local runs one node"):
        LOCAL.plan(place(resources={"nodes": 2}))
    with pytest.raises(UsageError, match="takes no options"):
        targets.load("local:fast")


def test_a_printed_command_can_be_typed_below_a_path_with_a_space() -> None:
    words = ("sbatch", "--parsable", "/home/a b/jobs/1/batch.sh")
    *_, line = targets.Submission(handle={}, files={}, commands=(words,)).render().splitlines()
    assert shlex.split(line) == ["$", *words]


SUBMITTER = """
import asyncio, json, os, signal, sys
from trainmaster import targets
handle, files, commands = json.loads(sys.argv[1])
submission = targets.Submission(handle=handle, files=files, commands=tuple(map(tuple, commands)))
asyncio.run(targets.load("local").submit(submission))
os.kill(os.getpid(), signal.SIGKILL)
"""


def submitter(submission: targets.Submission) -> list[str]:
    """A process that submits and is then killed."""
    words = json.dumps([submission.handle, submission.files, submission.commands])
    return [sys.executable, "-c", SUBMITTER, words]


@pytest.mark.matrix(one_in=2)
@pytest.mark.parametrize("file", ["plan.json", "agent.log", "agent.lock", "exit.json.tmp", "events.jsonl"])
def test_killed_anywhere_on_the_way_and_submitted_again_it_starts_once(
    place: Any, run: Any, end: Any, file: str
) -> None:
    submission = LOCAL.plan(place("echo started"))
    folder = Path(submission.handle["folder"])
    process = subprocess.Popen(submitter(submission))
    while not (folder / file).exists() and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    process.wait()

    async def go() -> None:
        handle = await LOCAL.submit(submission)
        assert (await end(LOCAL, handle)).state is TargetState.SUCCEEDED
        assert await LOCAL.read(handle, "rank-0.log", offset=0, limit=100) == b"started\n"

    run(go())


def test_the_attempt_outlives_whoever_submitted_it(place: Any, run: Any, end: Any, tmp_path: Path) -> None:
    submission = LOCAL.plan(place(f"while [ ! -e '{tmp_path}/go' ]; do sleep 0.02; done; echo done"))
    died = subprocess.run(submitter(submission), check=False, cwd=tmp_path)
    assert died.returncode == -signal.SIGKILL
    assert run(LOCAL.poll(submission.handle)).state is TargetState.RUNNING
    (tmp_path / "go").touch()
    assert run(end(LOCAL, submission.handle)).state is TargetState.SUCCEEDED


def test_a_killed_agent_is_lost(place: Any, run: Any, end: Any, printed: Any) -> None:
    submission = LOCAL.plan(place("echo $PPID; exec sleep 60"))

    async def go() -> None:
        handle = await LOCAL.submit(submission)
        os.kill(int(await printed(LOCAL, handle)), signal.SIGKILL)
        poll = await end(LOCAL, handle)
        assert (poll.state, poll.exit) == (TargetState.LOST, None)
        assert "no exit record" in poll.note
        await LOCAL.release(handle)

    run(go())


def test_killed_between_the_plan_and_the_start_it_is_lost_until_submitted_again(place: Any, run: Any, end: Any) -> None:
    submission = LOCAL.plan(place())
    ((path, text),) = submission.files.items()
    folder = Path(path).parent
    folder.mkdir(parents=True)
    Path(path).write_text(text)
    assert run(LOCAL.poll(submission.handle)).state is TargetState.LOST
    fd = os.open(folder, os.O_RDONLY)  # as a submit in progress holds it
    fcntl.flock(fd, fcntl.LOCK_SH)
    assert run(LOCAL.poll(submission.handle)).state is TargetState.WAITING
    os.close(fd)
    (folder / "agent.lock").touch()  # an agent that died before it could begin
    assert run(LOCAL.poll(submission.handle)).state is TargetState.LOST

    async def go() -> Any:
        return await end(LOCAL, await LOCAL.submit(submission))

    assert run(go()).state is TargetState.SUCCEEDED


def test_a_folder_that_was_removed_is_lost_not_waiting(place: Any, run: Any, end: Any) -> None:
    async def go() -> Poll:
        handle = await LOCAL.submit(LOCAL.plan(place()))
        await end(LOCAL, handle)
        shutil.rmtree(handle["folder"])
        return await LOCAL.poll(handle)

    assert run(go()).state is TargetState.LOST


def test_a_folder_that_cannot_be_read_is_unknown(place: Any, run: Any) -> None:
    placement = place()
    handle = LOCAL.plan(placement).handle
    placement.job_folder.write_text("a file where a folder must be")
    assert run(LOCAL.poll(handle)).state is TargetState.UNKNOWN
    with pytest.raises(TargetError):
        run(LOCAL.submit(LOCAL.plan(placement)))
    with pytest.raises(TargetError):
        run(LOCAL.cancel(handle, reason="x"))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"attempt": "a", "ok": "yes"}', "\xff"])
def test_a_record_that_cannot_be_read_ends_the_attempt_and_is_described(place: Any, run: Any, text: str) -> None:
    handle = LOCAL.plan(place()).handle
    folder = Path(handle["folder"])
    folder.mkdir(parents=True)
    (folder / "exit.json").write_text(text, encoding="latin-1")
    poll = run(LOCAL.poll(handle))
    assert poll.state is TargetState.FAILED and poll.exit is not None
    assert poll.exit.reason is Reason.TARGET_ERROR and "cannot be read" in poll.note


def test_an_agent_that_cannot_start_is_a_refusal_with_its_words(place: Any, run: Any) -> None:
    submission = LOCAL.plan(place())
    folder = Path(submission.handle["folder"])
    (folder / "agent.log").mkdir(parents=True)
    with pytest.raises(TargetError, match=r"agent\.log"):
        run(LOCAL.submit(submission))


def test_links_and_pipes_of_the_workload_are_not_followed(place: Any, run: Any) -> None:
    handle = LOCAL.plan(place()).handle
    folder = Path(handle["folder"])
    folder.mkdir(parents=True)
    (folder / "rank-0.log").symlink_to("/etc/passwd")
    os.mkfifo(folder / "rank-1.log")
    for stream in ("rank-0.log", "rank-1.log"):
        with pytest.raises(TargetError):
            run(LOCAL.read(handle, stream, offset=0, limit=10))
    with pytest.raises(TargetError, match="negative"):
        run(LOCAL.read(handle, "agent.log", offset=-1, limit=10))


def test_an_attempt_without_a_folder_has_no_files(place: Any, run: Any) -> None:
    """Cancelled before it was submitted: collecting and releasing find nothing, and end."""
    assert run(LOCAL.list_files(LOCAL.plan(place()).handle)) == []


def test_a_pipe_in_the_place_of_the_record_blocks_nobody(place: Any, run: Any) -> None:
    """A thread that waits for its writer would be lost to the whole control plane."""
    handle = LOCAL.plan(place()).handle
    folder = Path(handle["folder"])
    folder.mkdir(parents=True)
    os.mkfifo(folder / "exit.json")
    with _writer_after(folder / "exit.json", seconds=10.0) as waited:
        poll = run(LOCAL.poll(handle))
    assert not waited.is_set()
    assert poll.state is TargetState.FAILED and "cannot be read" in poll.note


def test_a_record_is_not_read_through_a_link(place: Any, run: Any, tmp_path: Path) -> None:
    handle = LOCAL.plan(place()).handle
    folder = Path(handle["folder"])
    folder.mkdir(parents=True)
    (tmp_path / "other.json").write_text('{"attempt": "a", "ok": true, "ended_at": "2026-01-01T00:00:00+00:00"}')
    (folder / "exit.json").symlink_to(tmp_path / "other.json")
    assert run(LOCAL.poll(handle)).state is TargetState.FAILED


_TAMPERED = {
    "removed": "rm plan.json",
    "a pipe": "rm plan.json; mkfifo plan.json",
    "no plan": "echo {} > plan.json",
    "of another attempt": 'sed -i "s/$TRAINMASTER_ATTEMPT/other.1/" plan.json',
}


@pytest.mark.matrix(one_in=2)
@pytest.mark.parametrize("how", _TAMPERED)
def test_what_a_job_does_to_its_plan_leaves_nothing_running(place: Any, run: Any, printed: Any, how: str) -> None:
    """Its agent killed, its plan gone or another one: release goes by the handle."""
    script = f"cd $(dirname $TRAINMASTER_EVENTS); {_TAMPERED[how]}; (setsid sleep 300 &); echo ready; sleep 300"
    submission = LOCAL.plan(place(script))

    async def go() -> None:
        handle = await LOCAL.submit(submission)
        await printed(LOCAL, handle)
        os.kill(int((Path(handle["folder"]) / "agent.lock").read_text().split()[1]), signal.SIGKILL)
        async with asyncio.timeout(60):
            await LOCAL.release(handle)
        assert isinstance(LOCAL, Lists)
        assert handle["attempt"] not in {owned.attempt for owned in await LOCAL.list_owned()}

    run(go())


def test_a_release_writes_nothing_through_a_link(place: Any, run: Any, printed: Any, tmp_path: Path) -> None:
    """The control plane may be root, and the job another user."""
    elsewhere = tmp_path / "made-by-release"
    link = f"cd $(dirname $TRAINMASTER_EVENTS); rm agent.lock; ln -s {elsewhere} agent.lock; echo ready; sleep 300"
    submission = LOCAL.plan(place(link))

    async def go() -> None:
        handle = await LOCAL.submit(submission)
        await printed(LOCAL, handle)
        await LOCAL.release(handle)

    run(go())
    assert not elsewhere.exists()


@contextlib.contextmanager
def _writer_after(pipe: Path, *, seconds: float) -> Iterator[threading.Event]:
    """Free a reader that hangs on a pipe after a time; set where that was needed."""
    waited = threading.Event()

    def write() -> None:
        waited.set()
        os.close(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))

    timer = threading.Timer(seconds, write)
    timer.start()
    try:
        yield waited
    finally:
        timer.cancel()
