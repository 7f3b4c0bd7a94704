"""A plan that goes well: ranks with torchrun's environment, logs, events in order, a record; and plans that do not."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any

import pytest

from trainmaster import __version__
from trainmaster.core.states import Reason


def test_ranks_run_to_the_end_and_leave_a_record(node: Any) -> None:
    node.marked = False  # an agent that nobody marked starts once more
    code, said = node.run(node.shell("echo hello from $RANK; echo and this >&2", ranks=2))
    assert (code, said) == (0, "")
    record = node.record()
    assert (record.ok, record.reason, record.exit_codes) == (True, None, {"0": 0, "1": 0})
    assert datetime.fromisoformat(record.ended_at).utcoffset() is not None
    assert (node.folder / "rank-1.log").read_text() == "hello from 1\nand this\n"
    assert node.names()[0] == "PROJECT start"
    assert node.names()[-1] == "PROJECT end"
    start, end = node.events()[0]["data"], node.events()[-1]["data"]
    assert (start["attempt"], start["version"]) == (record.attempt, __version__)
    assert (end["ok"], end["reason"]) == (True, None)
    assert end["time_taken"] > 0
    assert node.checkpoints.is_dir()


def test_steps_that_a_command_prints_are_events(node: Any) -> None:
    node.run(node.shell('echo "step 1 | loss 2.5"; echo "step 2 | loss nan"; echo "step 2: val loss 2.25"', ranks=2))
    steps = [event["data"] for event in node.events() if event["phase"] == "STEP"]
    assert steps == [
        {"step": 1, "loss": 2.5, "read_from": "log"}, {"step": 2, "loss": "NaN", "read_from": "log"},
    ]  # fmt: skip
    (held_out,) = [event["data"] for event in node.events() if event["phase"] == "EVAL_MODEL"]
    assert held_out == {"step": 2, "loss": 2.25, "read_from": "log"}


def test_a_command_that_writes_its_own_events_has_no_others(node: Any) -> None:
    line = '{"phase":"STEP","event":"metrics","data":{"step":1,"loss":2}}'
    node.run(node.shell(f"echo '{line}' >> $TRAINMASTER_EVENTS; echo 'step 1 | loss 2'"))
    assert [event["data"] for event in node.events() if event["phase"] == "STEP"] == [{"step": 1, "loss": 2}]


def test_a_living_attempt_beats(node: Any) -> None:
    node.run(node.shell("sleep 0.3", ranks=2))
    beats = [event["data"] for event in node.events() if event["phase"] == "HEARTBEAT"]
    assert beats == [{"ranks": 2}]


def test_ranks_see_what_torchrun_would_give_them(node: Any) -> None:
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    spec = {"env": {"MINE": "1", "RANK": "77", "TRAINMASTER_ATTEMPT": "forged", "HOME": "/mine"}}
    node.run(node.plan(sys.executable, "-c", script, ranks=2, **spec))
    first, second = (json.loads((node.folder / f"rank-{n}.log").read_text()) for n in (0, 1))
    assert [env["RANK"] for env in (first, second)] == ["0", "1"]
    assert [env["LOCAL_RANK"] for env in (first, second)] == ["0", "1"]
    for name, value in {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MINE": "1",
        "HOME": "/mine",
        "TRAINMASTER_ATTEMPT": node.record().attempt,
        "TRAINMASTER_EVENTS": str(node.folder / "events.jsonl"),
        "TRAINMASTER_CHECKPOINTS": str(node.checkpoints),
        "TRAINMASTER_STOP": str(node.folder / "stop"),
    }.items():
        assert second[name] == value, name
    assert (first["WANDB_RUN_ID"], first["WANDB_RESUME"]) == (node.record().attempt.rpartition(".")[0], "allow")
    assert "WANDB_RUN_ID" not in second, "every rank that logs would write into the run of rank 0"
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert 1024 <= int(first["MASTER_PORT"]) <= 65535
    assert first["PATH"] == node.env["PATH"]


@pytest.mark.matrix(one_in=2, of="plans that an agent refuses")
def test_a_program_that_is_not_there(node: Any) -> None:
    code, said = node.run(node.plan("no-such-program", ranks=2))
    assert code == 1
    assert "no-such-program" in said
    record = node.record()
    assert (record.reason, record.exit_codes) == (Reason.SCRIPT_FAILED, {"0": 127})
    assert "could not start" in record.message
    assert record.message.endswith("no-such-program is not in PATH on that machine: name the whole path")
    assert "no-such-program" in (node.folder / "rank-0.log").read_text()


@pytest.mark.matrix(one_in=2, of="plans that an agent refuses")
def test_a_bad_plan_names_every_fault_and_starts_nothing(node: Any) -> None:
    plan = node.shell("true")
    mapping = json.loads(plan.read_text())
    mapping["spec"]["limits"]["grace_s"] = -1
    mapping["spec"]["comand"] = ["x"]
    for options in ((), ("--detach",)):
        plan.write_text(json.dumps(mapping))
        code, said = node.run(plan, *options)
        assert code == 2
        assert "spec.limits.grace_s" in said
        assert "spec.comand: unknown field" in said
        assert sorted(path.name for path in node.folder.iterdir()) == ["plan.json"]


@pytest.mark.matrix(one_in=2, of="plans that an agent refuses")
def test_faults_between_the_fields_of_a_plan(node: Any) -> None:
    plan = node.shell("true", resources={"nodes": 2})
    mapping = json.loads(plan.read_text()) | {"v": 2, "node_rank": 5, "folder": "here"}
    plan.write_text(json.dumps(mapping))
    code, said = node.run(plan)
    assert code == 2
    for path in ("v:", "node_rank:", "master_port:", "folder:"):
        assert path in said


@pytest.mark.matrix(one_in=2, of="plans that an agent refuses")
def test_a_plan_that_is_no_plan(node: Any) -> None:
    plan = node.shell("true")
    plan.write_text('{"half": ')
    assert node.run(plan)[0] == 2
    plan.unlink()
    code, said = node.run(plan)
    assert code == 2
    assert "No such file" in said


def test_a_failure_of_the_agent_itself_is_recorded_with_its_traceback(node: Any) -> None:
    plan = node.shell("true")
    node.checkpoints.write_text("a file where a folder must be")
    assert node.run(plan)[0] == 1
    assert node.record().reason is Reason.TARGET_ERROR
    assert "FileExistsError" in node.record().message
    assert "Traceback" in (node.folder / "agent.log").read_text()
    assert node.events()[-1]["data"]["reason"] == "target_error"
