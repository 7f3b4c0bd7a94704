"""One attempt of a drill: one start under the agent, as every job has it. Whatever happens, nothing of it runs on."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainmaster.core.errors import TrainmasterError
from trainmaster.core.files import read_small, write_whole
from trainmaster.core.plan import EXIT_FILE, OWNER_VARIABLE, PLAN_FILE, Plan, rank_log
from trainmaster.core.results import error
from trainmaster.node.owner import name_process


class DrillFailed(TrainmasterError):
    """The drill itself could not be done: the undisturbed run failed."""


LOOK_S = 0.2
_LEAST_FREE = 1 << 20  # bytes; with less no program saves, and the agent cannot write its record
AGAIN = "drill again, to the end"
NOT_RUN = error("not run: the drill was interrupted", action=AGAIN)


def run(
    plan: Plan,
    *,
    variables: Mapping[str, str],
    look: Callable[[int], None],
    look_s: float = LOOK_S,
    agent_dies: bool = False,
) -> dict[str, Any]:
    """Run it to its end and return the agent's exit record. `look` is called again and again with the agent's pid.

    With `agent_dies`, an agent that was killed and left no record gives an empty one.
    """
    folder = Path(plan.folder)
    folder.mkdir(parents=True)
    path = folder / PLAN_FILE
    write_whole(path, plan.to_json(), durable=False, mode=0o600)  # a plan has the variables of the job
    command = [sys.executable, "-m", "trainmaster.agent", str(path)]
    agent = subprocess.Popen(
        command,
        env={**os.environ, **variables, OWNER_VARIABLE: name_process()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is ours to pass on
    )
    try:
        while agent.poll() is None:
            look(agent.pid)
            time.sleep(look_s)
    except BaseException:
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        subprocess.run([*command[:-1], "--kill", str(path)], check=False, capture_output=True)
        raise
    return {} if agent_dies and not (folder / EXIT_FILE).exists() else exit_record(folder)


def no_room(folder: Path, cause: BaseException | None = None) -> DrillFailed | None:
    """The error to be told where the disk of a drill's folder is full: what fails there says nothing of a program."""
    free = shutil.disk_usage(folder).free
    told = isinstance(cause, OSError) and os.strerror(errno.ENOSPC) in str(cause)  # shutil.Error has no errno
    if free >= _LEAST_FREE and not told:
        return None
    return DrillFailed(
        f"{folder}: {os.strerror(errno.ENOSPC)} ({free >> 10} KiB free): free some space there, or name a folder on "
        "another disk with --out; a drill keeps copies of the working folder there, and the checkpoints of each run"
    )


def exit_record(folder: Path) -> dict[str, Any]:
    """The exit record that an agent left in the folder of its attempt."""
    try:
        content: dict[str, Any] = json.loads(read_small(folder / EXIT_FILE))
    except OSError as error:
        raise DrillFailed(f"the agent left no record of an attempt: {error}") from None
    return content


def exit_codes(record: Mapping[str, Any]) -> tuple[int, ...]:
    """Exit codes of the ranks in their order; negative is a signal."""
    return tuple(code for _, code in sorted((int(rank), code) for rank, code in record["exit_codes"].items()))


def last_words(folder: Path) -> str:
    """Why an attempt ended, and where its log would be: without --out it goes with the drill's folder."""
    message = str(exit_record(folder).get("message", ""))
    return f"{message}; --out DIR keeps its log, {folder.parent.name}/{folder.name}/{rank_log(0)}"
