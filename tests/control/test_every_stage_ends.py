"""A job ends whatever fails inside its stages: bytes in its last lines, an unreadable record, a target that refuses."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from trainmaster.agent import pod
from trainmaster.cli.training import _second_start, train
from trainmaster.control import quotas, reconcile
from trainmaster.control import submit as submitting
from trainmaster.control.collect import escape
from trainmaster.control.deadlines import Deadlines, StopRequest
from trainmaster.core.errors import SpecError, TargetError, UsageError
from trainmaster.core.plan import ExitRecord, Plan
from trainmaster.core.spec import JobSpec, Limits, parse_spec
from trainmaster.core.states import Reason, Stage, Status, TargetState
from trainmaster.remote import attempt_host, bootstrap
from trainmaster.report import folder as folder_report
from trainmaster.store import artifacts, attempts, events, jobs
from trainmaster.store.database import Database
from trainmaster.store.rows import AttemptRow, JobRow
from trainmaster.targets import Handle, Poll

from .scripted import RUNNING, Scripted

pytestmark = pytest.mark.spawns

ENDS_S = 90.0


def finish(db: Database, home: Path, spec: dict[str, Any], **options: Any) -> JobRow:
    """Run one job to its end; the test fails if it does not come to one."""
    load = {"load": options["load"]} if "load" in options else {}
    job = submitting.submit(db, parse_spec({"name": "a", "preflight": {"level": 0}, **spec}), **load)
    when: Callable[[JobRow], bool] = options.pop("cancel_when", lambda _row: False)

    async def go() -> None:
        stop = asyncio.Event()
        task = asyncio.create_task(reconcile.run(db, home, stop=stop, tick_s=0.1, **options))
        end = time.monotonic() + ENDS_S
        while time.monotonic() < end:
            row = await asyncio.to_thread(jobs.find_job, db, job.id)
            assert row is not None
            if row.status.final:
                break
            if not row.cancel_requested and when(row):
                await asyncio.to_thread(submitting.cancel, db, job.id)
            await asyncio.sleep(0.05)
        stop.set()
        await task

    asyncio.run(go())
    row = jobs.find_job(db, job.id)
    assert row is not None and row.status.final, f"still {row and row.stage}: {row and row.message}"
    return row


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize(
    "script", [r'printf "a\000b\n"; exit 3', "head -c 5000 /dev/urandom; exit 3", r'printf "\355\240\200\n"; exit 3']
)
def test_any_bytes_in_the_last_lines_end_the_job(db: Database, tmp_path: Path, script: str) -> None:
    job = finish(db, tmp_path, {"command": ["sh", "-c", script]})
    assert (job.status, job.reason) == (Status.FAILED, Reason.SCRIPT_FAILED)
    (attempt,) = attempts.list_attempts(db, job.id)
    assert attempt.exit is not None and attempt.exit.exit_codes == {"0": 3}


@pytest.mark.parametrize("text", [b"", b"rubbish", b"[1]", b"\xff\xfe", b'{"attempt": 1}', b"[" * 5000])
def test_an_exit_record_that_cannot_be_read_is_described(text: bytes) -> None:
    record = ExitRecord.read(text, attempt="x.1")
    assert (record.ok, record.reason) == (False, Reason.TARGET_ERROR)
    assert record.message.startswith("the agent's exit record cannot be read")


@pytest.mark.proof
def test_a_job_that_writes_its_own_exit_record_ends(db: Database, tmp_path: Path) -> None:
    script = 'echo rubbish > "$(dirname "$TRAINMASTER_EVENTS")/exit.json"; sleep 60'
    job = finish(db, tmp_path, {"command": ["sh", "-c", script]})
    assert (job.status, job.reason) == (Status.FAILED, Reason.TARGET_ERROR)


def test_what_postgresql_refuses_is_stored_cleaned(db: Database) -> None:
    job_id = "00000000-0000-4000-8000-000000000001"
    at = datetime.now(UTC)
    record = ExitRecord(
        attempt=f"{job_id}.1", ok=False, ended_at=at.isoformat(), reason=Reason.SCRIPT_FAILED, message="a\x00b",
        evidence={"last_lines": ["a\x00b", "\ud800"], "loss": float("nan")},
    )  # fmt: skip
    with db.write() as conn:
        jobs.insert_job(conn, job_id, JobSpec(name="a", command=("true",)), at=at)
        attempt = attempts.insert_attempt(conn, job_id, 1, handle={}, at=at)
        jobs.advance(conn, job_id, seen=Stage.QUEUED, to=Stage.PLACING, at=at, message="a\x00b \ud800")
        attempts.end_attempt(
            conn, attempt, report=TargetState.FAILED, reason=Reason.SCRIPT_FAILED, message="a\x00b", exit_record=record,
            at=at,
        )  # fmt: skip
    (row,) = attempts.list_attempts(db, job_id)
    assert row.message == "a\ufffdb" and row.exit is not None and row.exit.evidence["last_lines"][0] == "a\ufffdb"


class Blind(Scripted):
    """A target that submits and then can say nothing of the attempt."""

    async def poll(self, handle: Handle) -> Poll:
        raise TargetError("no such attempt list")


def test_checking_that_only_fails_ends_at_its_deadline(db: Database, tmp_path: Path) -> None:
    late = Deadlines(checking_s={0: 0.5})
    job = finish(db, tmp_path, {"target": "scripted", "command": ["true"]}, load=Blind().load, deadlines=late)
    assert (job.status, job.reason) == (Status.FAILED, Reason.CHECK_INCOMPLETE)


def test_a_running_attempt_that_cannot_be_asked_is_given_up_after_many_tries(db: Database, tmp_path: Path) -> None:
    target = Scripted(RUNNING, *[Poll(state=TargetState.UNKNOWN, note="away")] * 99)
    job = finish(
        db, tmp_path, {"target": "scripted", "command": ["true"]}, load=target.load,
        deadlines=Deadlines(unreachable_tries=3),
    )  # fmt: skip
    assert (job.status, job.reason) == (Status.FAILED, Reason.NODE_LOST)


def test_a_cancel_ends_a_job_whose_target_only_fails(db: Database, tmp_path: Path) -> None:
    job = finish(
        db, tmp_path, {"target": "scripted", "command": ["true"], "limits": {"grace_s": 0}}, load=Blind().load,
        deadlines=Deadlines(stop_margin_s=0.5), cancel_when=lambda row: row.stage is Stage.CHECKING,
    )  # fmt: skip
    assert job.status is Status.CANCELLED


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("make", ["mkdir", "mkfifo", "ln -s /etc/passwd"])
def test_an_event_file_that_cannot_be_read_is_a_fault_and_the_job_ends(db: Database, tmp_path: Path, make: str) -> None:
    # Until it is there: an agent that writes after the `rm` makes a new event file, which can be read.
    script = f'until rm "$TRAINMASTER_EVENTS"; {make} "$TRAINMASTER_EVENTS"; do :; done; sleep 3'
    job = finish(db, tmp_path, {"command": ["sh", "-c", script]})
    assert job.status.final
    faults = [row.fault for row in events.list_events(db, job.id) if row.fault]
    assert any("cannot be read" in fault or "removed" in fault for fault in faults), faults
    assert len(faults) <= 2


HOSTILE_NAMES = r"""
cd "$TRAINMASTER_OUTPUTS"
printf a > "$(printf 'not-utf8-\377')"; printf b > "$(printf 'new\nline')"; printf c > 'back\slash'
printf d > "$(printf '%0250d' 0)"
d=.; for i in 1 2 3 4 5 6 7; do d=$d/$(printf '%0200d' $i); mkdir $d; done; printf e > $d/deep
mkfifo pipe; ln -s /etc/passwd link; printf f > '100%'; printf g > '%0Aescaped'
"""


def test_outputs_with_any_name_are_stored_or_named(db: Database, tmp_path: Path) -> None:
    job = finish(db, tmp_path, {"command": ["sh", "-c", HOSTILE_NAMES]})
    assert job.status is Status.COMPLETED
    stored = {row.path: row.size_bytes for row in artifacts.list_artifacts(db, job.id) if row.kind == "output"}
    assert {"outputs/not-utf8-%FF", "outputs/new%0Aline", "outputs/back%5Cslash"} <= set(stored)
    assert {"outputs/100%", "outputs/%250Aescaped"} <= set(stored)
    assert len(stored) == 7 and not any("pipe" in path or "link" in path for path in stored)
    assert job.message.endswith(
        "2 files were not stored: outputs/link: symbolic link, not a plain file; "
        "outputs/pipe: named pipe, not a plain file"
    )


def test_a_folder_too_deep_is_named_as_not_stored(db: Database, tmp_path: Path) -> None:
    script = 'cd "$TRAINMASTER_OUTPUTS"; for i in $(seq 80); do mkdir d; cd d; done; echo > x'
    job = finish(db, tmp_path, {"command": ["sh", "-c", script]})
    assert job.status is Status.COMPLETED
    assert "1 file was not stored" in job.message and "deeper than 64 folders" in job.message


def test_an_outputs_folder_that_became_a_link_is_named_as_not_stored(db: Database, tmp_path: Path) -> None:
    script = 'rm -r "$TRAINMASTER_OUTPUTS"; ln -s /etc "$TRAINMASTER_OUTPUTS"'
    job = finish(db, tmp_path, {"command": ["sh", "-c", script]})
    assert job.status is Status.COMPLETED
    assert job.message.endswith("1 file was not stored: outputs: symbolic link, not a plain file")


@pytest.mark.proof
def test_a_sparse_output_is_stored_without_reading_its_holes(db: Database, tmp_path: Path) -> None:
    script = 'cd "$TRAINMASTER_OUTPUTS"; truncate -s 256M a; printf xyz | dd of=a seek=99999999 bs=1 conv=notrunc'
    before = read_bytes()
    job = finish(db, tmp_path, {"command": ["sh", "-c", script]})
    assert read_bytes() - before < 64 << 20, "it has 256 MiB and is read twice"
    (row,) = (row for row in artifacts.list_artifacts(db, job.id) if row.kind == "output")
    whole = bytearray(256 << 20)
    whole[99999999:100000002] = b"xyz"
    assert (row.size_bytes, row.sha256) == (256 << 20, hashlib.sha256(whole).hexdigest())


def read_bytes() -> int:
    """Bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.proof
@pytest.mark.parametrize(("code", "status"), [(0, Status.COMPLETED), (3, Status.CANCELLED)])
def test_a_cancel_ends_a_job_that_is_collecting(
    db: Database, tmp_path: Path, code: int, status: Status, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(quotas.VARIABLE, "4000")
    script = f'cd "$TRAINMASTER_OUTPUTS"; truncate -s 2T large; printf 1 > a; printf 2 > z; exit {code}'
    job = finish(
        db, tmp_path, {"command": ["sh", "-c", script]}, deadlines=Deadlines(cancelled_late_s=0.5),
        cancel_when=lambda row: row.stage is Stage.COLLECTING,
    )  # fmt: skip
    assert job.status is status, "what succeeded stays so"
    assert "outputs/large: the job was cancelled, or reached a cap on its cost, before it was stored" in job.message
    stored = {row.path for row in artifacts.list_artifacts(db, job.id)}
    assert {"outputs/a", "attempts/1/rank-0.log"} <= stored and not {"outputs/large", "outputs/z"} & stored


@pytest.mark.proof
def test_what_a_job_leaves_has_a_quota(db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(quotas.VARIABLE, "0.001")
    script = 'cd "$TRAINMASTER_OUTPUTS"; printf 1 > a; truncate -s 2M b; printf 2 > c'
    job = finish(db, tmp_path, {"command": ["sh", "-c", script]})
    assert job.status is Status.COMPLETED
    assert f"outputs/b: over the 0.001 GiB that a job may leave here ({quotas.VARIABLE})" in job.message
    stored = {row.path for row in artifacts.list_artifacts(db, job.id)}
    assert {"outputs/a", "outputs/c"} <= stored and "outputs/b" not in stored


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan"])
def test_a_quota_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=quotas.VARIABLE):
        quotas.read_limit(text)


@pytest.mark.parametrize("read", ["pod", "train", "second start", "report", "lock", "bootstrap"])
def test_a_record_of_fifty_gibibytes_is_not_read_whole(tmp_path: Path, read: str) -> None:
    """Sparse, as `truncate` makes it in a moment; whoever reads it whole needs the memory."""
    folder = tmp_path / "attempt"
    folder.mkdir()
    for name in ("exit.json", "agent.lock", "plan.json"):
        with (folder / name).open("wb") as file:
            file.truncate(50 << 30)
    plan = Plan(attempt="x.1", folder=str(folder), spec=JobSpec(name="a", command=("true",)), checkpoints=str(tmp_path))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if read == "pod":
        assert "cannot be read" in pod._end(plan, 0, launched=False).message
    elif read == "train":
        assert train._read_record(folder) is None
    elif read == "second start":
        assert _second_start._follow(_second_start.Running(agent=1, folder=folder)) == 1
    elif read == "report":
        assert folder_report._exit(folder / "exit.json") is None and folder_report._plan(folder / "plan.json") is None
    elif read == "lock":
        assert attempt_host._find_stopped(folder / "agent.lock") == ""
    else:
        assert bootstrap._text(folder / "exit.json", 10) == "\0" * 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10, "KiB"


@pytest.mark.parametrize("name", ["a", "outputs/x.json", "outputs/" + "y" * 300, "outputs/" + "z/" * 600 + "end.bin"])
def test_an_escaped_path_is_bounded_and_plain_names_stay(name: str) -> None:
    path = escape(name)
    assert len(path.encode()) <= 900 and all(len(part.encode()) <= 255 for part in path.split("/"))
    assert path == name or len(name) > 200
    assert escape(os.fsdecode(b"outputs/\xff\n\\")) == "outputs/%FF%0A%5C"


@pytest.mark.parametrize("grace_s", [1e14, 1e6, 3601])
def test_a_grace_without_bound_is_refused_and_an_old_row_is_still_stopped(grace_s: float) -> None:
    with pytest.raises(SpecError, match=r"limits.grace_s.*at most 3600"):
        parse_spec({"name": "a", "command": ["true"], "limits": {"grace_s": grace_s}})
    spec = JobSpec(name="a", command=("true",), limits=Limits(grace_s=grace_s))
    at = datetime.now(UTC)
    job = JobRow(
        id="x", name="a", project="p", target="local", status=Status.CANCELLING, stage=Stage.RUNNING, reason=None,
        message="", spec=spec, attempts=1, cancel_requested=True, created_at=at, started_at=at, ended_at=None,
    )  # fmt: skip
    request = StopRequest(reason=Reason.USER_CANCELLED, since=at, text="")
    assert Deadlines().must_force(job, request, at + timedelta(hours=2))


@pytest.mark.parametrize("by", ["user", "cap"])
@pytest.mark.parametrize(("ended_s", "limit_s"), [(None, 600), (5, 600), (-5, 30)])
def test_a_cancel_after_the_end_leaves_less_time_to_store(ended_s: int | None, limit_s: int, by: str) -> None:
    at = datetime.now(UTC)
    job = JobRow(
        id="x", name="a", project="p", target="local", status=Status.CANCELLING, stage=Stage.COLLECTING, reason=None,
        message="", spec=JobSpec(name="a", command=("true",)), attempts=1, cancel_requested=True, created_at=at,
        started_at=at, ended_at=None, cancel_at=at,
    )  # fmt: skip
    attempt = AttemptRow(
        id="x.1", job_id="x", number=1, handle=None, report=None, reason=None, message="", exit=None, created_at=at,
        started_at=at, ended_at=None if ended_s is None else at + timedelta(seconds=ended_s),
    )  # fmt: skip
    if by == "cap":
        job = replace(job, cancel_requested=False, cancel_at=None)
        attempt = replace(attempt, stop_reason=Reason.OVER_BUDGET, stop_at=at)
    late = [Deadlines().must_stop_storing(job, attempt, at + timedelta(seconds=limit_s + more)) for more in (-1, 1)]
    assert late == [False, True]
    wanted = replace(job, cancel_requested=False, cancel_at=None)
    free = replace(attempt, stop_reason=None, stop_at=None)
    assert not Deadlines().must_stop_storing(wanted, free, at + timedelta(days=9))
