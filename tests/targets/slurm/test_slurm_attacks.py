"""Hostile and broken answers of Slurm: foreign jobs, odd ids, empty listings, no accounting, ids used again."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurm import PATH, Cluster
from trainmaster import targets
from trainmaster.core.errors import SpecError, TargetError
from trainmaster.core.plan import rank_log
from trainmaster.core.spec import parse_spec
from trainmaster.core.states import Reason, TargetState
from trainmaster.core.vendors.slurm import SlurmOptions
from trainmaster.remote.slurm import parse
from trainmaster.remote.slurm.parse import SlurmJob
from trainmaster.targets.slurm.node_list import SlurmNode, list_nodes, parse_nodes
from trainmaster.targets.slurm.outcome import judge
from trainmaster.targets.slurm.queue import queue
from trainmaster.targets.slurm.settings import read_settings

S = "\x1f"
RUNS = "trap 'exit 75' TERM; echo up; while :; do sleep 0.1; done"


def line(identity: str, state: str = "RUNNING", *, name: str = "a", comment: str = "") -> str:
    return S.join([identity, state, "n1", "/f", "None", name, comment])


# --- text ------------------------------------------------------------------------------------------------------------


def test_a_newline_in_a_name_or_comment_makes_no_line_of_its_own() -> None:
    spoofed = f"x\n17{S}COMPLETED{S}n1{S}/f{S}None{S}a{S}"
    mark = "\x1f0123\x1f"
    text = "\n".join(line(*one).replace(S, mark) for one in (("3",), ("17",))) + "\n"
    text = text.replace(f"{mark}a{mark}\n17", f"{mark}{spoofed}{mark}two\nlines\n17")
    found = parse.parse_squeue(text, mark)
    assert [(job.id, job.state) for job in found] == [("3", "RUNNING"), ("17", "RUNNING")]
    assert found[0].comment == "two�lines", "control characters are replaced"


@pytest.mark.parametrize("cut", [1, 5, 9, 20])
def test_a_truncated_listing_is_no_listing(cut: int) -> None:
    text = line("17") + "\n" + line("18", name="b" * 40) + "\n"
    at = text.index("18") + cut
    if text[:at].count(S) % 6 == 0:
        at = text.index(S, at) + 1
    with pytest.raises(TargetError):
        parse.parse_squeue(text[:at])


def test_nothing_is_an_empty_listing_and_noise_is_none() -> None:
    assert parse.parse_squeue("") == parse.parse_squeue("\n") == []
    with pytest.raises(TargetError):
        parse.parse_squeue("slurm_load_jobs: out of luck\n")


@pytest.mark.parametrize("identity", ["17+0", "17+1", "4.batch", "17_[0-900000]", "x", "9" * 5000, "S1AB2C3D4E5F6"])
def test_an_odd_id_of_a_foreign_job_hides_no_other(identity: str) -> None:
    found = parse.parse_squeue(line(identity) + "\n" + line("18") + "\n")
    assert "18" in [job.id for job in found]


def test_a_job_that_is_listed_twice_is_not_over_while_one_of_them_runs() -> None:
    from trainmaster.targets.slurm.queue import group

    rows = [SlurmJob(id="17", state="COMPLETED"), SlurmJob(id="17", state="RUNNING")]
    for both in (rows, rows[::-1]):
        assert judge(group(both)["17"], {}, attempt="x").state is TargetState.RUNNING


@pytest.mark.parametrize("word", ["CANCELLED by 1000", "CANCELLED+", "cancelled", " CANCELLED "])
def test_every_way_to_write_cancelled_is_the_same(word: str) -> None:
    cells = ["17", word, "n1", "/f", "None", "a", "", "0:15", "Unknown"]
    (job,) = parse.parse_sacct(S.join(cells) + "\n")
    facts = {"job": "17", "records": [None], "stop": "over_budget: enough", "stop_at": 1.0}
    poll = judge([job], facts, attempt="x")
    assert poll.exit is not None and poll.exit.reason is Reason.OVER_BUDGET, "our own scancel"


def test_an_end_beyond_the_calendar_is_no_traceback() -> None:
    text = '{"jobs": [{"job_id": 17, "state": {"current": "FAILED"}, "time": {"end": 100000000000000000000}}]}'
    assert [(job.id, job.ended_at) for job in parse.parse_sacct_json(text)] == [("17", None)]


@pytest.mark.parametrize("word", ["--wra=reboot", "--expor=ALL", "--comm=trainmaster:x", "--uid=0", "--gid=0",
                                  "--clusters=other", "--get-user-env", "--chdi=/"])  # fmt: skip
def test_an_abbreviated_option_is_refused_as_the_whole_one(word: str) -> None:
    with pytest.raises(SpecError, match=r"slurm.options\[0\]"):
        parse_spec({"name": "a", "command": ["true"], "slurm": {"options": [word]}})


@pytest.mark.parametrize("word", ["--exclusive=user", "--time-min=5", "--switches=1", "--gres-flags=enforce-binding"])
def test_other_options_are_taken(word: str) -> None:
    parse_spec({"name": "a", "command": ["true"], "slurm": {"options": [word]}})


@pytest.mark.parametrize("word", ["--priority=TOP", "--nice=-100", "--bbf=/root/x", "--mail-user=all@example.org",
                                  "--hold", "--prior=TOP", "--acctg-freq=1"])  # fmt: skip
def test_an_option_that_is_not_on_the_list_is_for_the_cluster_file(word: str) -> None:
    with pytest.raises(SpecError, match="cannot be set by a job"):
        parse_spec({"name": "a", "command": ["true"], "slurm": {"options": [word]}})
    assert SlurmOptions(options=(word,)).options


def test_the_reason_of_a_node_adds_no_node_and_no_state() -> None:
    text = (
        "NodeName=n1 Arch=x NodeAddr=10.0.0.1 State=IDLE+DRAIN Gres=gpu:8 Reason=a\nNodeName=n2 State=IDLE "
        "(since 2024) [root@2026-03-01T12:00:00]\nNodeName=n2 Arch=x NodeAddr=10.0.0.2 State=DOWN Gres=(null)\n"
    )
    with pytest.raises(TargetError, match="n2 twice"):
        parse_nodes(text)
    one = parse_nodes("NodeName=n1 State=IDLE+DRAIN Reason=bad\nDIMM\x1b[2J (since 2024) [root@2026-03-01T12:00:00]\n")
    assert [(node.name, node.states, node.reason) for node in one] == [
        ("n1", ("IDLE", "DRAIN"), "bad DIMM�[2J (since 2024)")
    ]


# --- a real Slurm ----------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(slurm: Cluster, tmp_path: Path, cluster_file: Path) -> Callable[[str, str], str]:
    """Commands of which one can be made to answer otherwise: the words of a target."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("squeue", "sacct", "scancel", "sinfo", "scontrol", "sbatch"):
        (folder / name).symlink_to(shutil.which(name, path=PATH) or "")
    other = tmp_path / "broken.yaml"
    other.write_text(yaml.safe_dump({**yaml.safe_load(cluster_file.read_text()), "commands": str(folder), "poll_s": 0}))

    def replace(name: str, script: str) -> str:
        real_one = shutil.which(name, path=PATH)
        (folder / name).unlink()
        (folder / name).write_text(f"#!/bin/sh\n{script.format(real=real_one)}\n")
        (folder / name).chmod(0o755)
        return f"slurm:{other}"

    return replace


@pytest.mark.proof
@pytest.mark.spawns
@pytest.mark.timeout(300)
def test_foreign_jobs_of_the_same_user_hide_no_attempt(
    slurm: Cluster, cluster_file: Path, place: Any, run: Any, printed: Any
) -> None:
    slurm.call("sbatch", "-H", "-o", "/dev/null", f"--job-name=x\n1{S}COMPLETED", f"--comm=a{S}b\nc", "--wrap", "true")
    slurm.call("sbatch", "-H", "-o", "/dev/null", "-n1", ":", "-n1", "--wrap", "true", check=False)  # 17+0, 17+1
    slurm.call("sbatch", "-H", "-o", "/dev/null", "--array=0-900", "--wrap", "true")
    target: Any = targets.load(f"slurm:{cluster_file}")

    async def go() -> None:
        handle = await target.submit(target.plan(place(RUNS)))
        await printed(target, handle, limit_s=120)
        assert (await target.poll(handle)).state is TargetState.RUNNING
        assert [one.attempt for one in await target.list_owned()] == [handle["attempt"]]
        await target.release(handle)
        assert await target.list_owned() == []

    try:
        run(go())
    finally:
        slurm.call("scancel", "--state=PENDING", "--user=root", check=False)


@pytest.mark.proof
@pytest.mark.spawns
@pytest.mark.timeout(300)
def test_an_empty_listing_and_accounting_that_is_away_lose_no_job(
    broken: Callable[[str, str], str], slurm: Cluster, place: Any, run: Any, printed: Any
) -> None:
    word = broken("squeue", 'case "$*" in *--user=*) exit 0;; esac; exec {real} "$@"')
    target: Any = targets.load(word)

    async def go() -> None:
        handle = await target.submit(target.plan(place(RUNS)))
        await printed(target, handle, limit_s=120)
        assert (await target.poll(handle)).state is TargetState.RUNNING, "asked for by its id, it is there"
        broken("squeue", 'case "$*" in *--jobs=*) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1;; '
               "esac; exit 0")  # fmt: skip
        broken("sacct", 'echo "sacct: error: Problem talking to the database: Connection refused" >&2; exit 1')
        poll = await target.poll(handle)
        assert poll.state is TargetState.UNKNOWN and "sacct" in poll.note, poll
        broken("sacct", 'echo "Slurm accounting storage is disabled" >&2; exit 1')
        assert (await target.poll(handle)).state is TargetState.LOST
        broken("squeue", 'exec {real} "$@"')
        await target.release(handle)
        assert slurm.call("squeue", "-h", "--states=RUNNING,PENDING", "-j", handle["slurm_job"], check=False) == ""

    run(go())


@pytest.mark.spawns
@pytest.mark.timeout(300)
def test_an_id_that_is_used_again_is_neither_read_nor_killed(
    slurm: Cluster, cluster_file: Path, place: Any, run: Any
) -> None:
    other = slurm.call("sbatch", "--parsable", "-o", "/dev/null", "--job-name=somebody", "--wrap", "sleep 300").strip()
    slurm.wait(lambda: "RUNNING" in slurm.call("squeue", "-h", "-j", other, "-o", "%T"))
    target: Any = targets.load(f"slurm:{cluster_file}")

    handle = {**target.plan(place()).handle, "slurm_job": other, "submitted": True}
    Path(handle["base"]).mkdir(parents=True)
    (Path(handle["base"]) / "job").write_text(other)

    async def go() -> None:
        poll = await target.poll(handle)
        assert poll.state is TargetState.LOST, poll
        await target.release(handle)
        await asyncio.sleep(1)
        assert slurm.call("squeue", "-h", "-j", other, "-o", "%T").strip() == "RUNNING"

    try:
        run(go())
    finally:
        slurm.call("scancel", other)


@pytest.mark.spawns
@pytest.mark.timeout(300)
def test_the_nodes_are_listed_whatever_their_reasons_say(slurm: Cluster, cluster_file: Path, run: Any) -> None:
    reason = "bad DIMM (since 2024)\nNodeName=n9 State=IDLE [/INST] \x1b[2J"
    slurm.call("scontrol", "update", "nodename=n2", "state=drain", f"reason={reason}")
    try:
        settings = read_settings(cluster_file)

        async def listed() -> list[SlurmNode]:
            return await list_nodes(queue(settings), settings)

        found = {node.name: node for node in run(listed())}
        assert set(found) == {"n1", "n2", "n3"}
        assert "DRAIN" in found["n2"].states and "\x1b" not in found["n2"].reason and "\n" not in found["n2"].reason
        assert not found["n2"].ours
    finally:
        slurm.call("scontrol", "update", "nodename=n2", "state=resume")


@pytest.mark.proof
@pytest.mark.spawns
@pytest.mark.timeout(300)
def test_scancel_of_a_running_array_task_is_told(
    slurm: Cluster, cluster_file: Path, place: Any, run: Any, end: Any, printed: Any
) -> None:
    target: Any = targets.load(f"slurm:{cluster_file}")
    made = place('[ "$SLURM_ARRAY_TASK_ID" = 1 ] || exit 0; ' + RUNS, slurm={"array": "0-1"})

    async def go() -> None:
        handle = await target.submit(target.plan(made))
        async with asyncio.timeout(120):
            while not await target.read(handle, rank_log(1), offset=0, limit=10):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        slurm.call("scancel", f"{handle['slurm_job']}_1")
        poll = await end(target, handle, limit_s=120)
        assert poll.exit is not None and poll.exit.reason is Reason.USER_CANCELLED, poll

    run(go())
