"""One rank fails: it is the one that is named, with its last lines and its reason; its peers end; no secret shows."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from trainmaster.core.states import Reason

HERE = 'cd "$(dirname $TRAINMASTER_STOP)"; '


def test_the_rank_that_failed_first_is_named_with_its_last_lines(node: Any) -> None:
    script = (
        HERE
        + """
    if [ $RANK = 1 ]; then
        while [ ! -e up-0 ] || [ ! -e up-2 ]; do sleep 0.02; done
        for i in $(seq 60); do echo line $i; done; echo the cause >&2; exit 3
    fi
    trap 'echo Connection closed by peer; exit 1' TERM; touch up-$RANK; while :; do sleep 0.02; done"""
    )
    assert node.run(node.shell(script, ranks=3))[0] == 1
    record = node.record()
    assert record.reason is Reason.SCRIPT_FAILED
    assert record.message == "rank 1 of 3 exited with 3: the cause"
    assert record.exit_codes == {"0": 1, "1": 3, "2": 1}
    assert record.evidence["rank"] == 1
    assert record.evidence["log"] == "rank-1.log"
    assert record.evidence["last_lines"] == [f"line {i}" for i in range(22, 61)] + ["the cause"]


def test_peers_that_ignore_the_end_are_killed(node: Any) -> None:
    script = (
        HERE
        + """
    if [ $RANK = 0 ]; then while [ ! -e up-1 ]; do sleep 0.02; done; exit 3; fi
    trap '' TERM; touch up-$RANK; while :; do sleep 0.02; done"""
    )
    node.run(node.shell(script, ranks=2, limits={"grace_s": 0.2}))
    assert node.record().exit_codes == {"0": 3, "1": -9}
    assert node.record().evidence["rank"] == 0


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'OSError: [Errno 28] No space left on device'; exit 1", Reason.DISK_FULL),
        ("echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB'; exit 1", Reason.OUT_OF_MEMORY),
        ("echo anything; exit 65", Reason.BAD_DATA),
        ("echo anything; exit 66", Reason.BAD_CHECKPOINT),
        ("echo 'error: 3 bad steps; the run has been rolled back 2 times: lower it'; exit 67", Reason.DIVERGED),
        ("echo anything; exit 67", Reason.SCRIPT_FAILED),  # not of our trainer
        ("kill -SEGV $$", Reason.CRASHED),
        ("exit 1", Reason.SCRIPT_FAILED),
    ],
)
def test_the_reason_comes_from_the_code_and_the_log(node: Any, script: str, reason: Reason) -> None:
    assert node.run(node.shell(script))[0] == 1
    assert node.record().reason is reason
    assert node.events()[-1]["data"]["reason"] == reason.value


def test_a_signal_has_its_name(node: Any) -> None:
    node.run(node.shell("kill -SEGV $$"))
    assert node.record().exit_codes == {"0": -11}
    assert node.record().evidence["signal"] == "SIGSEGV"
    assert "was killed by SIGSEGV" in node.record().message


def test_no_secret_of_the_environment_reaches_the_record(node: Any) -> None:
    node.env |= {"HF_TOKEN": "hf_inherited", "TOKENIZERS_PARALLELISM": "false"}
    script = "echo login $HF_TOKEN as $MY_PASSWORD while false; exit 1"
    code, said = node.run(node.shell(script, env={"MY_PASSWORD": "pass-of-spec"}))
    assert code == 1
    written = "".join((node.folder / name).read_text() for name in ("exit.json", "events.jsonl", "agent.log"))
    for secret in ("hf_inherited", "pass-of-spec"):
        assert secret in (node.folder / "rank-0.log").read_text()
        assert secret not in written + said
    assert node.record().evidence["last_lines"] == ["login *** as *** while false"]


def test_of_two_found_dead_at_once_the_one_that_lost_its_peer_is_not_the_cause(node: Any) -> None:
    # Both are dead before the agent looks: it is stopped while they end.
    script = (
        HERE
        + """
    echo $$ > pid-$RANK; while [ ! -e go ]; do sleep 0.02; done
    if [ $RANK = 0 ]; then echo 'pair.cc Connection closed by peer'; else echo my own mistake; fi; exit 1"""
    )
    agent = node.start(node.shell(script, ranks=2))
    pids = [int(node.wait_for(f"pid-{rank}")) for rank in (0, 1)]
    agent.send_signal(signal.SIGSTOP)
    (node.folder / "go").touch()
    node.until(lambda: not any(node.alive(pid) for pid in pids), what="both ranks' death")
    agent.send_signal(signal.SIGCONT)
    assert agent.wait() == 1
    assert node.record().message == "rank 1 of 2 exited with 1: my own mistake"
