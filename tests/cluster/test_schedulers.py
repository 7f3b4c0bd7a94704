"""What Slurm and Kubernetes say of a node is read right, or refused; never taken for "in service" by mistake."""

from __future__ import annotations

import json

import pytest

from trainmaster import targets
from trainmaster.cluster.remedy import schedulers
from trainmaster.core.errors import TargetError, UsageError
from trainmaster.targets import DrainState
from trainmaster.targets.kubernetes.drain import KubernetesScheduler
from trainmaster.targets.slurm.drain import SlurmScheduler

HEAD = "NodeName=n1 Arch=x86_64 CPUAlloc=0 CPUTot=8 "


@pytest.mark.parametrize(
    ("line", "place"),
    [
        (HEAD + "State=IDLE ThreadsPerCore=1", DrainState(out=False, reason="")),
        (HEAD + "State=MIXED*+PLANNED ThreadsPerCore=1", DrainState(out=False, reason="")),
        (HEAD + "State=DOWN* Reason=Not responding [slurm@2026-03-01T12:00:00]", DrainState(out=False, reason="")),
        (
            HEAD + "State=IDLE+DRAIN Partitions=gpu Reason=trainmaster: xid gpu3: Xid 79 [root@2026-03-01T12:00:00]",
            DrainState(out=True, reason="trainmaster: xid gpu3: Xid 79"),
        ),
        (
            HEAD + "State=DOWN*+DRAIN Reason=ask Kim [lab 2] [root@2026-03-01T12:00:00]",
            DrainState(out=True, reason="ask Kim [lab 2]"),
        ),
        (HEAD + "State=IDLE+DRAIN ThreadsPerCore=1", DrainState(out=True, reason="")),
    ],
)
def test_slurm(line: str, place: DrainState) -> None:
    assert SlurmScheduler().parse("n1", line + "\n") == place


@pytest.mark.parametrize(
    "answer",
    ["", "Node n1 not found", HEAD, HEAD.replace("n1", "n11") + "State=IDLE", f"{HEAD}State=IDLE\n{HEAD}State=IDLE\n"],
)
def test_slurm_that_does_not_say_it(answer: str) -> None:
    with pytest.raises(TargetError):
        SlurmScheduler().parse("n1", answer)


def node(name: str = "n1", *, cordoned: bool | None = None, reason: str | None = None) -> str:
    metadata: dict[str, object] = {"name": name}
    if reason is not None:
        metadata["annotations"] = {"trainmaster/reason": reason}
    return json.dumps({"metadata": metadata, "spec": {} if cordoned is None else {"unschedulable": cordoned}})


def test_kubernetes() -> None:
    parse = KubernetesScheduler().parse
    assert parse("n1", node()) == DrainState(out=False, reason="")
    assert not parse("n1", node(reason="trainmaster: old")).ours  # in service, whatever a note says
    assert parse("n1", node(cordoned=True, reason="trainmaster: xid")).ours
    assert not parse("n1", node(cordoned=True)).ours


@pytest.mark.parametrize("answer", ["", "{}", "[]", "null", '{"metadata": {"name": "n1"}}', node("n2")])
def test_kubernetes_that_does_not_say_it(answer: str) -> None:
    with pytest.raises(TargetError):
        KubernetesScheduler().parse("n1", answer)


@pytest.mark.parametrize("name", [name for name in targets.names() if targets.traits(name).drains])
def test_every_command_names_the_node_and_is_no_shell(name: str) -> None:
    scheduler = schedulers.load(name)
    for command in (*scheduler.drain("n1", "trainmaster: a b"), *scheduler.resume("n1"), scheduler.query("n1")):
        assert any(word in ("n1", "nodename=n1") for word in command)
        assert command[0] in ("scontrol", "kubectl")


def test_an_unknown_scheduler_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="one of kubernetes, slurm"):
        schedulers.load("pbs")
