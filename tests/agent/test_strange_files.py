"""A job owns its attempt's folder: pipes and links that it puts there neither hold the agent up nor mislead it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from trainmaster.agent.recovery import Recovery
from trainmaster.core.plan import Plan
from trainmaster.core.spec import parse_spec

HERE = 'cd "$(dirname $TRAINMASTER_STOP)"; '
STEP = json.dumps({"phase": "STEP", "event": "metrics", "data": {"step": 1, "loss": 2.0}})
# Until it is there: an agent that writes after the `rm` makes a new file.
SWAP = "until rm -f {file}; {make} {file}; do :; done; "
# Once a line is to be copied into the event file, from `global.json` or, as a figure, from the log.
WRITES = {"global.json": f"echo '{STEP}' > $WORK/global.json; ", "figures": "echo 'step 1 loss 2.0'; "}


def swap(file: str, make: str) -> str:
    return HERE + SWAP.format(file=file, make=make)


@pytest.mark.proof
@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("make", ["mkfifo", "ln -s target"])
def test_an_event_file_that_is_a_pipe_or_a_link_holds_no_agent_up(node: Any, make: str, what: str) -> None:
    script = f"WORK=$PWD; {HERE}echo kept > target; {SWAP.format(file='events.jsonl', make=make)}"
    agent = node.start(node.shell(script + WRITES[what] + "touch ready; exec sleep 60", limits={"grace_s": 1}))
    node.until((node.folder / "ready").exists, what="the rank")
    time.sleep(3.0)  # a look at the figures is due every two seconds; too early it would show nothing
    (node.folder / "stop").write_text("user_cancelled enough\n")
    assert node.over().reason.value == "user_cancelled", "it hears a stop"
    agent.wait()
    assert (node.folder / "target").read_text() == "kept\n"


@pytest.mark.proof
@pytest.mark.parametrize("file", ["rank-0.log", "agent.log"])
@pytest.mark.parametrize("make", ["mkfifo", "ln -s target"])
def test_a_log_that_is_a_pipe_or_a_link_does_not_keep_the_record(node: Any, make: str, file: str) -> None:
    """The reason is read from the rank's log, and the agent writes its own at the end."""
    node.run(node.shell(f"{HERE}echo kept > target; rm {file}; {make} {file}; exit 3"))
    assert node.record().exit_codes == {"0": 3}
    assert (node.folder / "target").read_text() == "kept\n"


def test_a_recovery_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    """Recovery reads the event file for checkpoints."""
    os.mkfifo(tmp_path / "events.jsonl")
    spec = parse_spec({"name": "a", "command": ["true"]})
    plan = Plan(attempt="a.1", spec=spec, folder=str(tmp_path), checkpoints=str(tmp_path))
    assert Recovery(plan, None)._has_saved() is False  # type: ignore[arg-type]
