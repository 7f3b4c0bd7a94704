"""The ssh target over real OpenSSH servers: several machines, machines that are away, connections that are cut."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sshd import Lab, free_port, lab, needs_sshd
from trainmaster import targets
from trainmaster.core.errors import NoCapacity, NodeLost, SpecError, TargetError, Unreachable, UsageError
from trainmaster.core.plan import EVENTS_FILE, node_file, rank_log
from trainmaster.core.states import Reason, TargetState
from trainmaster.targets import Submission
from trainmaster.targets.ssh.target import Ssh

pytestmark = [pytest.mark.spawns, needs_sshd]


def edit(hosts_file: Path, change: Callable[[dict[str, Any]], None]) -> Ssh:
    """The target over an edited hosts file."""
    document = yaml.safe_load(hosts_file.read_text())
    change(document)
    hosts_file.write_text(yaml.safe_dump(document))
    target = targets.load(f"ssh:{hosts_file}")
    assert isinstance(target, Ssh)
    return target


async def started(target: Ssh, submission: Submission) -> dict[str, Any]:
    placed = replace(submission, handle=await target.place(submission))
    return dict(await target.submit(placed))


def test_the_ranks_of_two_nodes_meet_and_leave_their_files(hosts_file: Path, place: Any, run: Any, end: Any) -> None:
    target = targets.load(f"ssh:{hosts_file}")
    script = (
        'echo "$RANK of $WORLD_SIZE on node $GROUP_RANK at $MASTER_ADDR:$MASTER_PORT"; '
        'echo "$RANK" > "$TRAINMASTER_OUTPUTS/of-$RANK"'
    )
    submission = target.plan(place(script, resources={"nodes": 2, "processes_per_node": 2}))

    async def go() -> None:
        handle = await started(target, submission)
        assert (await end(target, handle)).state is TargetState.SUCCEEDED
        said = [(await target.read(handle, rank_log(rank), offset=0, limit=999)).decode() for rank in range(4)]
        places = {re.sub(r"^.* at ", "", text) for text in said}
        assert len(places) == 1 and re.fullmatch(r"127\.0\.0\.1:\d+\n", places.pop())
        assert [text.partition(" at ")[0] for text in said] == [f"{rank} of 4 on node {rank // 2}" for rank in range(4)]
        await target.release(handle)
        names = {file.name for file in await target.list_files(handle)}
        assert {"outputs/of-0", "outputs/node-1/of-2", "events.node-1.jsonl", "agent.node-1.log", "rank-3.log"} <= names
        assert await target.read(handle, "outputs/node-1/of-3", offset=0, limit=9) == b"3\n"
        assert await target.read(handle, node_file(EVENTS_FILE, 1), offset=0, limit=9) != b""
        with pytest.raises(TargetError, match="is not a stream"):
            await target.read(handle, node_file(EVENTS_FILE, 2), offset=0, limit=9)
        assert await target.list_owned() == []

    run(go())


@pytest.mark.proof
def test_one_node_that_fails_ends_the_attempt_and_its_peer_is_killed(
    hosts_file: Path, place: Any, run: Any, end: Any
) -> None:
    target = targets.load(f"ssh:{hosts_file}")
    script = '[ "$GROUP_RANK" = 1 ] && { sleep 0.3; echo "broken here"; exit 3; }; exec sleep 600'
    submission = target.plan(place(script, resources={"nodes": 2}))

    async def go() -> None:
        handle = await started(target, submission)
        poll = await end(target, handle)
        assert poll.state is TargetState.FAILED and poll.exit is not None
        assert poll.exit.reason is Reason.SCRIPT_FAILED and poll.note.startswith(f"{handle['nodes'][1]}: ")
        assert poll.exit.message.startswith(f"{handle['nodes'][1]}: "), "the reason of the job names the machine"
        (owned,) = [one for one in await target.list_owned() if one.attempt == handle["attempt"]]
        assert owned.what.startswith(f"{handle['nodes'][0]}: ")
        await target.release(owned.handle)
        assert await target.list_owned() == []

    run(go())


def test_a_slot_is_given_once_and_a_job_waits_for_it(hosts_file: Path, place: Any, run: Any, end: Any) -> None:
    target = edit(hosts_file, lambda document: document.update(hosts=[{**document["hosts"][0], "slots": 1}]))
    first, second = target.plan(place("sleep 0.5")), target.plan(place("true", number=2))

    async def go() -> None:
        handle = await started(target, first)
        with pytest.raises(NoCapacity, match="waiting for 1 free machine: 0 of 1 are free"):
            await target.place(second)
        await end(target, handle)  # over, though not released yet: nothing runs there
        assert (await target.place(second))["nodes"] == ["n1"]
        await target.release({**second.handle, "nodes": []})  # as after a crash between the choice and its commit
        assert second.handle["attempt"] not in [one.attempt for one in await target.list_owned()]

    run(go())


@pytest.mark.proof
def test_a_reservation_that_is_not_used_lapses(
    hosts_file: Path, machines: Lab, place: Any, run: Any, reserve: Any
) -> None:
    target = edit(hosts_file, lambda document: document.update(hosts=[{**document["hosts"][0], "slots": 1}]))
    first, second = target.plan(place("true")), target.plan(place("true", number=2))

    async def go() -> None:
        placed = await reserve(target, first)
        assert await target.place(first) == placed.handle  # found, not taken twice
        (claim,) = (machines.hosts[0].home / ".trainmaster" / "claims" / "n1").glob("*.json")
        os.utime(claim, (time.time() - 3600, time.time() - 3600))
        assert (await target.place(second))["nodes"] == ["n1"]
        with pytest.raises(TargetError, match="gave the slot of this attempt to another job"):
            await target.submit(placed)
        await target.release({**second.handle, "nodes": ["n1"]})

    run(go())


@pytest.mark.proof
def test_a_machine_that_is_away_is_unknown_and_others_are_used(
    hosts_file: Path, place: Any, run: Any, end: Any
) -> None:
    dead = {"host": "127.0.0.1", "name": "dead", "port": free_port()}
    target = edit(hosts_file, lambda document: document["hosts"].insert(0, dead))
    submission = target.plan(place("echo up"))

    async def go() -> None:
        handle = await started(target, submission)
        assert handle["nodes"] == ["n1"]
        assert (await end(target, handle)).state is TargetState.SUCCEEDED
        with pytest.raises(Unreachable, match="1 of 4 machines cannot be asked: dead: nothing listens"):
            await target.list_owned()  # nothing is left over: that cannot be said
        await target.list_owned(partial=True)
        away = {**handle, "nodes": ["dead"]}
        poll = await target.poll(away)
        assert poll.state is TargetState.UNKNOWN and "nothing listens at 127.0.0.1" in poll.note
        with pytest.raises(Unreachable):
            await target.release(away)  # never taken for released
        with pytest.raises(Unreachable, match="is no longer in"):
            await target.poll({**handle, "nodes": ["n9"]})

    run(go())


def test_a_machine_that_stays_away_before_the_start_is_lost_and_not_waited_for(
    hosts_file: Path, place: Any, run: Any
) -> None:
    dead = {"host": "127.0.0.1", "name": "dead", "port": free_port(), "lost_after_s": 1.5}
    target = edit(hosts_file, lambda document: document["hosts"].insert(0, dead))
    planned = target.plan(place("echo up"))
    submission = replace(planned, handle={**planned.handle, "nodes": ["dead"]})

    async def go() -> None:
        with pytest.raises(Unreachable, match="nothing listens"):
            await target.submit(submission)
        await asyncio.sleep(1.6)
        with pytest.raises(NodeLost, match="nothing listens"):
            await target.submit(submission)
        await target.release(submission.handle)

    run(go())


@pytest.mark.proof
def test_a_connection_that_is_cut_is_opened_again_and_the_job_goes_on(
    tmp_path: Path, place: Any, run: Any, end: Any, printed: Any
) -> None:
    (tmp_path / "lab").mkdir()
    with lab(tmp_path / "lab") as own:
        host = own.start("solo")
        own.wait()
        file = tmp_path / "hosts.yaml"
        entry = {"host": "127.0.0.1", "name": "solo", "port": host.port, "key": str(own.key), "python": sys.executable}
        file.write_text(yaml.safe_dump({"known_hosts": str(own.known_hosts), "hosts": [entry]}))
        target = targets.load(f"ssh:{file}")
        submission = target.plan(place("echo up; sleep 2; echo done"))

        async def go() -> None:
            handle = await started(target, submission)
            await printed(target, handle)
            host.cut(also_server=False)
            states = []
            async with asyncio.timeout(60):
                while not (poll := await target.poll(handle)).state.over:
                    states.append(poll.state)
                    await asyncio.sleep(0.05)
            assert poll.state is TargetState.SUCCEEDED
            assert set(states) <= {TargetState.RUNNING, TargetState.UNKNOWN}
            assert await target.read(handle, rank_log(0), offset=0, limit=99) == b"up\ndone\n"

        run(go())


def test_it_connects_through_another_machine(hosts_file: Path, machines: Lab, place: Any, run: Any, end: Any) -> None:
    jump = f"127.0.0.1:{machines.hosts[2].port}"
    target = edit(hosts_file, lambda document: document.update(hosts=[{**document["hosts"][0], "jump": jump}]))
    submission = target.plan(place('echo "$SSH_CONNECTION" > /dev/null; echo here'))

    async def go() -> None:
        handle = await started(target, submission)
        assert handle["nodes"] == ["n1"]
        assert (await end(target, handle)).state is TargetState.SUCCEEDED

    run(go())


@pytest.mark.proof
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare (util-linux)")
def test_nodes_that_cannot_reach_each_other_start_nothing(
    hosts_file: Path, tmp_path: Path, place: Any, run: Any, reserve: Any
) -> None:
    alone = tmp_path / "python-without-network"
    alone.write_text(f'#!/bin/sh\nexec unshare -n "{sys.executable}" "$@"\n')
    alone.chmod(0o755)
    target = edit(hosts_file, lambda document: document["hosts"][1].update(python=str(alone)))
    submission = target.plan(place("echo up", resources={"nodes": 2}))

    async def go() -> None:
        placed = await reserve(target, submission)
        with pytest.raises(TargetError, match=r"n2 cannot reach n1 at 127.0.0.1 port .* open the ports between the"):
            await target.submit(placed)
        assert await target.list_owned() == []
        assert (await target.poll(placed.handle)).state is TargetState.WAITING

    run(go())


@pytest.mark.proof
def test_a_working_folder_is_sent_once_and_resumed_where_it_was_cut(
    hosts_file: Path, machines: Lab, tmp_path: Path, place: Any, run: Any, end: Any, reserve: Any
) -> None:
    target = edit(hosts_file, lambda document: document.update(hosts=document["hosts"][:1]))
    work = tmp_path / "a-job" / "work"
    (work / "inner").mkdir(parents=True)
    (work / "run.sh").write_text("#!/bin/sh\ncat inner/data link | sha256sum\n")
    (work / "run.sh").chmod(0o755)
    (work / "inner" / "data").write_bytes(os.urandom(9 << 20))
    (work / "link").symlink_to("inner/data")
    submission = target.plan(place("./run.sh; echo changed > inner/data", workdir=f"sha256:{'0' * 64}"))
    home = machines.hosts[0].home / ".trainmaster" / "jobs"

    async def go() -> None:
        placed = await reserve(target, submission)
        job = home / placed.handle["attempt"].partition(".")[0]
        sending = asyncio.ensure_future(target.submit(placed))
        while not list(job.glob(".work-*")) and not sending.done():  # noqa: ASYNC110 (a file has no event)
            await asyncio.sleep(0)
        machines.hosts[0].cut(also_server=False)
        with contextlib.suppress(Unreachable):
            await sending
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(Unreachable):
                    handle = await target.submit(placed)
                    break
                await asyncio.sleep(0.1)
        assert (await end(target, handle)).state is TargetState.SUCCEEDED
        whole = (work / "inner" / "data").read_bytes()
        said = await target.read(handle, rank_log(0), offset=0, limit=99)
        assert said.split()[0].decode() == hashlib.sha256(whole + whole).hexdigest()
        again = replace(submission, handle=handle)
        await target.submit(again)
        assert (job / "work" / "inner" / "data").read_text() == "changed\n"  # the job's own by now
        assert list(job.glob(".work-*")) == []

    run(go())


@pytest.mark.proof
def test_machines_that_share_a_folder_each_bring_the_working_folder_there(
    hosts_file: Path, tmp_path: Path, place: Any, run: Any, end: Any
) -> None:
    """As with home folders on NFS: every machine is asked, finds nothing, and sends the same files to one place."""
    target = edit(hosts_file, lambda document: document["defaults"].update(folder=f"{tmp_path}/shared"))
    work = tmp_path / "a-job" / "work"
    for number in range(40):
        (work / f"part-{number}").mkdir(parents=True)
        (work / f"part-{number}" / "data").write_bytes(os.urandom(1 << 18))
    submission = target.plan(place("cat part-*/data | sha256sum", workdir=f"sha256:{'0' * 64}", resources={"nodes": 3}))
    whole = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(work.glob("part-*/data")))).hexdigest()

    async def go() -> None:
        handle = await started(target, submission)
        assert (await end(target, handle)).state is TargetState.SUCCEEDED
        for rank in range(3):
            said = await target.read(handle, rank_log(rank), offset=0, limit=99)
            assert said.split()[0].decode() == whole
        job = tmp_path / "shared" / "jobs" / handle["attempt"].partition(".")[0]
        assert sorted(entry.name for entry in job.iterdir()) == ["attempts", "checkpoints", "work"]

    run(go())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"user": "nobody-here"}, "it refuses user nobody-here"),
        ({"python": "/no/such/python"}, "there is no such Python on it"),
        ({"python": "/bin/echo"}, "without an answer"),
        ({"folder": "/proc/no"}, "the connection was lost"),
    ],
)
def test_a_machine_that_cannot_be_used_is_explained(
    hosts_file: Path, place: Any, run: Any, change: dict[str, Any], message: str
) -> None:
    target = edit(hosts_file, lambda document: document.update(hosts=[{**document["hosts"][0], **change}]))
    with pytest.raises(Unreachable, match=message):
        run(target.place(target.plan(place())))


def test_an_unknown_host_key_is_refused(hosts_file: Path, tmp_path: Path, place: Any, run: Any) -> None:
    (tmp_path / "none").write_text("")
    target = edit(hosts_file, lambda document: document.update(known_hosts=str(tmp_path / "none")))
    with pytest.raises(Unreachable, match="its host key is not in known_hosts"):
        run(target.place(target.plan(place())))


def test_a_changed_host_key_is_refused_and_its_replacement_explained(
    hosts_file: Path, tmp_path: Path, machines: Any, place: Any, run: Any
) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
    other = (tmp_path / "key.pub").read_text().split()[1]
    lines = [line.split() for line in machines.known_hosts.read_text().splitlines()]
    (tmp_path / "old").write_text("".join(f"{line[0]} {line[1]} {other}\n" for line in lines))
    target = edit(hosts_file, lambda document: document.update(known_hosts=str(tmp_path / "old")))
    with pytest.raises(Unreachable, match="another machine answers, or it was reinstalled") as refused:
        run(target.place(target.plan(place())))
    command = f"ssh-keygen -R {shlex.quote(lines[0][0])}"
    assert command in str(refused.value)
    subprocess.run([*shlex.split(command), "-f", str(tmp_path / "old")], check=True, capture_output=True)
    assert lines[0][0] not in (tmp_path / "old").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts: [", "hosts.yaml:1: not YAML"),
        ("hosts: []", "no host is listed"),
        ("hosts: [{host: a, slots: 0}]", "slots"),
        ("hosts: [{host: a, folder: relative}]", "folder"),
        ("hosts: [{host: a, jump: 'x; rm'}]", "jump"),
        ("hosts: [{host: a, password: x}]", "secrets are not allowed"),
    ],
)
def test_a_hosts_file_with_a_fault_is_refused_when_the_job_is(
    tmp_path: Path, place: Any, text: str, message: str
) -> None:
    (tmp_path / "hosts.yaml").write_text(text)
    with pytest.raises((UsageError, SpecError), match=message):
        targets.load(f"ssh:{tmp_path / 'hosts.yaml'}").plan(place())


def test_what_it_cannot_take_is_refused_when_the_job_is(hosts_file: Path, place: Any) -> None:
    target = targets.load(f"ssh:{hosts_file}")
    with pytest.raises(TargetError, match=r"asks for 9 nodes, .* lists 3"):
        target.plan(place(resources={"nodes": 9}))
    with pytest.raises(UsageError, match=r"write ssh:hosts\.yaml"):
        targets.load("ssh")
    with pytest.raises(UsageError, match="cannot be read"):
        targets.load("ssh:/no/such/file.yaml").plan(place())


@pytest.mark.proof
def test_the_gpus_of_hosts_are_listed_and_ranks_see_those_that_the_queue_gave_them(
    hosts_file: Path, tmp_path: Path, place: Any, run: Any, end: Any
) -> None:
    document = yaml.safe_load(hosts_file.read_text())
    for host, gpus in zip(document["hosts"], ("GPU-b1 GPU-b2", "GPU-c1 GPU-c2", ""), strict=True):
        folder = tmp_path / host["name"]
        folder.mkdir()
        lines = "".join(f"echo 'GPU {n}: NVIDIA H200 (UUID: {gpu})'\n" for n, gpu in enumerate(gpus.split()))
        memory = "".join(f"echo '{gpu}, 4'\n" for gpu in gpus.split())
        smi = f'#!/bin/sh\ncase "$1" in\n-L) :\n{lines};;\n--query-gpu=*) :\n{memory};;\nesac\n'
        wrapper = f'#!/bin/sh\nPATH="{folder}:$PATH" exec "{sys.executable}" "$@"\n'
        for name, text in (("nvidia-smi", smi), ("python", wrapper)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        host |= {"python": str(folder / "python"), "slots": 1}
    document["hosts"].append({"host": "127.0.0.1", "name": "dead", "port": free_port()})
    hosts_file.write_text(yaml.safe_dump(document))
    target = targets.load(f"ssh:{hosts_file}")
    script = 'echo "$CUDA_VISIBLE_DEVICES"'

    async def go() -> None:
        listing = await target.list_devices()
        assert [(device.machine, device.id, device.used) for device in listing.devices["gpu"]] == [
            ("n1", "GPU-b1", None), ("n1", "GPU-b2", None), ("n2", "GPU-c1", None), ("n2", "GPU-c2", None),
        ]  # fmt: skip
        assert list(listing.silent) == ["dead"]
        handles = []
        for number, given in enumerate(({"n2": ["GPU-c2"], "n1": ["GPU-b1"]}, {"n2": ["GPU-c1"]}), start=1):
            planned = target.plan(place(script, number=number, resources={"nodes": len(given)}))
            handles.append(await started(target, replace(planned, handle={**planned.handle, "devices": given})))
        assert handles[0]["nodes"] == ["n2", "n1"]
        assert [(await end(target, handle)).state for handle in handles] == [TargetState.SUCCEEDED] * 2
        logs = [await target.read(handles[0], rank_log(rank), offset=0, limit=99) for rank in range(2)]
        assert [*logs, await target.read(handles[1], rank_log(0), offset=0, limit=99)] == [
            b"GPU-c2\n", b"GPU-b1\n", b"GPU-c1\n",
        ]  # fmt: skip
        for handle in handles:
            await target.release(handle)

    run(go())
