"""Every state word of Slurm has a meaning of ours, and text and JSON of all versions give the same jobs."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from trainmaster.core.errors import TargetError
from trainmaster.core.states import Reason, TargetState
from trainmaster.remote.slurm import parse
from trainmaster.remote.slurm.parse import SlurmJob
from trainmaster.remote.slurm.states import STATES, choose, explain_pending, translate

# JOB STATE CODES of squeue(1) and sacct(1), and the flags of `job_state` in JSON, up to Slurm 25.05.
WORDS = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED COMPLETING CONFIGURING DEADLINE EXPEDITING FAILED LAUNCH_FAILED NODE_FAIL "
    "OUT_OF_MEMORY PENDING POWER_UP_NODE PREEMPTED RECONFIG_FAIL REQUEUED REQUEUE_FED REQUEUE_HOLD RESIZING "
    "RESV_DEL_HOLD REVOKED RUNNING SIGNALING SPECIAL_EXIT STAGE_OUT STOPPED SUSPENDED TIMEOUT UPDATE_DB".split()
)
MANUAL = Path("/usr/share/man/man1/squeue.1.gz")


def test_the_table_holds_every_word_and_no_other() -> None:
    assert set(STATES) == WORDS


@pytest.mark.skipif(not MANUAL.exists(), reason="no manual of squeue here: apt-get install slurm-client")
def test_the_table_holds_what_the_manual_of_this_slurm_lists() -> None:
    text = gzip.decompress(MANUAL.read_bytes()).decode()
    listed = set(re.findall(r"^\\fB[A-Z]{1,3}\s+([A-Z_]{4,})\\fR$", text.partition('.SH "JOB STATE CODES"')[2], re.M))
    assert len(listed) >= 20
    assert listed <= set(STATES)


@pytest.mark.parametrize(
    ("word", "state", "reason"),
    [
        ("PENDING", TargetState.WAITING, None),
        ("RUNNING", TargetState.RUNNING, None),
        ("COMPLETING", TargetState.RUNNING, None),
        ("SUSPENDED", TargetState.RUNNING, None),
        ("COMPLETED", TargetState.SUCCEEDED, None),
        ("FAILED", TargetState.FAILED, None),
        ("OUT_OF_MEMORY", TargetState.FAILED, Reason.OUT_OF_MEMORY),
        ("TIMEOUT", TargetState.FAILED, Reason.TIMED_OUT),
        ("DEADLINE", TargetState.FAILED, Reason.TIMED_OUT),
        ("CANCELLED by 1000", TargetState.FAILED, Reason.USER_CANCELLED),
        ("CANCELLED+", TargetState.FAILED, Reason.USER_CANCELLED),
        ("NODE_FAIL", TargetState.LOST, Reason.NODE_LOST),
        ("BOOT_FAIL", TargetState.LOST, Reason.NODE_LOST),
        ("PREEMPTED", TargetState.LOST, Reason.PREEMPTED),
        ("REVOKED", TargetState.UNKNOWN, None),
        ("A_NEW_STATE", TargetState.UNKNOWN, None),
        ("", TargetState.UNKNOWN, None),
    ],
)
def test_meaning(word: str, state: TargetState, reason: Reason | None) -> None:
    assert (translate(word).state, translate(word).reason) == (state, reason)


def test_no_end_without_its_reason() -> None:
    for word, meaning in STATES.items():
        if meaning.state is TargetState.LOST:
            assert meaning.reason is not None and meaning.reason.rule.retry, word


@pytest.mark.parametrize(
    ("words", "state"),
    [
        (["RUNNING"], "RUNNING"),
        (["NODE_FAIL", "COMPLETING"], "COMPLETING"),
        (["RUNNING", "CONFIGURING"], "CONFIGURING"),
        (["PENDING", "REQUEUED"], "REQUEUED"),
        (["RUNNING", "SIGNALING"], "SIGNALING"),
        ([], ""),
    ],
)
def test_of_several_words_in_json_the_flag_decides(words: list[str], state: str) -> None:
    assert choose(words) == state


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("Resources", "not enough free nodes (Resources)"),
        ("(QOSMaxGRESPerUser)", "a limit of its QOS is reached (QOSMaxGRESPerUser)"),
        ("AssocGrpCpuLimit", "a limit of its account or user is reached (AssocGrpCpuLimit)"),
        ("ReqNodeNotAvail, UnavailableNodes:n2", "a node that it names is down, drained or reserved; change "
         "slurm.nodelist (ReqNodeNotAvail, UnavailableNodes:n2)"),
        ("SomethingNew", "SomethingNew"),
    ],
)  # fmt: skip
def test_pending_is_explained_with_the_word_of_slurm(reason: str, text: str) -> None:
    assert explain_pending(reason) == f"waits in the queue of Slurm: {text}"


def line(*cells: str) -> str:
    return parse.SEPARATOR.join(cells) + "\n"


def test_text_of_squeue() -> None:
    text = (
        line("17", "RUNNING", "n[1-2]", "/f/a", "None", "llama.x", "trainmaster:x")
        + line("18_3", "PENDING", "", "/f/b", "Resources", "sweep", "(null)")
        + line("18_[4-6,9%2]", "PENDING", "", "/f/b", "JobArrayTaskLimit", "sweep | of, all", "(null)")
    )
    jobs = parse.parse_squeue(text)
    assert jobs[0] == SlurmJob(
        id="17", state="RUNNING", nodes="n[1-2]", folder="/f/a", name="llama.x", comment="trainmaster:x"
    )
    assert [job.id for job in jobs[1:]] == ["18_3", "18_4", "18_5", "18_6", "18_9"]
    assert (jobs[1].number, jobs[1].task, jobs[1].reason) == ("18", 3, "Resources")
    assert jobs[4].name == "sweep | of, all"
    assert parse.parse_squeue("") == []


def test_text_of_sacct() -> None:
    text = line("17", "CANCELLED by 1000", "n1", "/f/a", "None", "llama.x", "", "0:15", "2026-11-16T03:14:42") + line(
        "18_2", "OUT_OF_MEMORY", "n2", "/f/b", "OutOfMemory", "sweep", "trainmaster:y", "0:125", "Unknown"
    )
    first, second = parse.parse_sacct(text)
    assert (first.state, first.exit_code, first.signal) == ("CANCELLED", 0, 15)
    assert first.ended_at is not None and first.ended_at.startswith("2026-11-16T03:14:42")
    assert (second.id, second.state, second.signal, second.ended_at) == ("18_2", "OUT_OF_MEMORY", 125, None)


@pytest.mark.parametrize("text", ["slurm_load_jobs error", line("1", "RUNNING"), line(*"abcdefgh", "i")])
def test_other_text_is_refused(text: str) -> None:
    for read in (parse.parse_squeue, parse.parse_sacct):
        with pytest.raises(TargetError):
            read(text)


# As Slurm 22.05 prints them (openapi/v0.0.38), and as 23.11 and newer do (v0.0.40): the same job.
OLD = {
    "job_id": 3, "array_job_id": 0, "array_task_id": None, "array_task_string": "", "job_state": "RUNNING",
    "nodes": "n2", "current_working_directory": "/f", "state_reason": "None", "name": "a", "comment": "trainmaster:3",
    "exit_code": 0, "restart_cnt": 0,
}  # fmt: skip
NEW = {
    **OLD, "array_job_id": {"set": True, "infinite": False, "number": 0}, "array_task_id": {"set": False, "number": 0},
    "job_state": ["RUNNING"],
    "exit_code": {"status": ["SUCCESS"], "return_code": {"set": True, "infinite": False, "number": 0},
                  "signal": {"id": {"set": False, "infinite": False, "number": 0}, "name": ""}},
}  # fmt: skip


def test_both_shapes_of_json_are_the_same_job() -> None:
    (old,) = parse.parse_squeue_json(json.dumps({"jobs": [OLD]}))
    (new,) = parse.parse_squeue_json(json.dumps({"jobs": [NEW]}))
    assert old.signal == 0 and new.signal is None  # 0 is no signal
    assert (old.id, old.state, old.nodes, old.name, old.comment, old.exit_code) == (
        new.id, new.state, new.nodes, new.name, new.comment, new.exit_code,
    )  # fmt: skip
    assert old.id == "3" and old.reason == ""


def test_arrays_in_json() -> None:
    waits = {**OLD, "job_id": 4, "array_job_id": 4, "array_task_string": "2-4%2", "job_state": "PENDING"}
    runs = {**NEW, "job_id": 5, "array_job_id": {"set": True, "number": 4}, "array_task_id": {"set": True, "number": 1}}
    jobs = parse.parse_squeue_json(json.dumps({"jobs": [waits, runs]}))
    assert [(job.id, job.state) for job in jobs] == [
        ("4_2", "PENDING"), ("4_3", "PENDING"), ("4_4", "PENDING"), ("4_1", "RUNNING"),
    ]  # fmt: skip


def test_json_of_sacct() -> None:
    old = {
        "job_id": 7, "array": {"job_id": 0, "task_id": None}, "state": {"current": "FAILED", "reason": "None"},
        "exit_code": {"status": "ERROR", "return_code": 3}, "nodes": "n1", "working_directory": "/f", "name": "a",
        "comment": {"job": None}, "time": {"end": 1794798882},
    }  # fmt: skip
    new = {
        **old, "array": {"job_id": 7, "task_id": {"set": True, "number": 2}},
        "state": {"current": ["OUT_OF_MEMORY"], "reason": "OutOfMemory"},
        "exit_code": {"status": ["SIGNALED"], "return_code": {"set": False, "number": 0},
                      "signal": {"id": {"set": True, "number": 9}, "name": "KILL"}},
        "time": {"end": {"set": True, "number": 1794798882}},
    }  # fmt: skip
    first, second = parse.parse_sacct_json(json.dumps({"jobs": [old, new]}))
    assert (first.id, first.state, first.exit_code) == ("7", "FAILED", 3)
    assert (second.id, second.state, second.signal) == ("7_2", "OUT_OF_MEMORY", 9)
    assert first.ended_at == "2026-11-16T03:14:42+00:00"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"jobs": 3}', '{"jobs": [3]}', '{"jobs": [{}]}'])
def test_json_that_is_none_is_refused(text: str) -> None:
    for read in (parse.parse_squeue_json, parse.parse_sacct_json):
        with pytest.raises(TargetError):
            read(text)


def test_answers_of_sbatch_and_of_the_version() -> None:
    assert parse.parse_submitted("17\n") == parse.parse_submitted("warning: x\n17;cluster\n") == "17"
    for text in ("", "Submitted batch job 17", "17 18"):
        with pytest.raises(ValueError, match="no job id"):
            parse.parse_submitted(text)
    assert parse.parse_version("slurm-wlm 22.05.8\n") == (22, 5)
    assert parse.parse_version("nothing") == (0, 0)


@pytest.mark.parametrize(
    ("text", "tasks"), [("0-3", [0, 1, 2, 3]), ("1,4-5%2", [1, 4, 5]), ("0-9:4", [0, 4, 8]), ("[2]", [2])]
)
def test_array_expressions(text: str, tasks: list[int]) -> None:
    assert parse.expand_tasks(text) == tasks
