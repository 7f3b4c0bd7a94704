"""Attempts with spares: a Job for each node, and a state that follows what node 0 decides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from kube import Kube
from targets.kubernetes.test_life_cycle import Place, Run, load  # noqa: F401 (a fixture)
from targets.kubernetes.test_manifests import ATTEMPT, plan
from trainmaster.core.errors import SpecError
from trainmaster.core.plan import MEMBERS_LOG, ExitRecord
from trainmaster.core.states import Reason, TargetState
from trainmaster.remote.framed_lines import Frame
from trainmaster.targets import Poll
from trainmaster.targets._spool import Spool
from trainmaster.targets.kubernetes import spares
from trainmaster.targets.kubernetes.logs import start_of

TRAIN = {"steps": 8, "batch_sequences": 16}
WANTED: dict[str, Any] = {"train": TRAIN, "resources": {"nodes": 2, "spares": 1, "processes_per_node": 8}}
TRIO = {"attempt": ATTEMPT, "nodes": 3, "spares": 1}
HANDLE = {**TRIO, "name": "tm-a-1"}
JOB = {"metadata": {"name": "tm-a-1", "labels": {}}, "suspended": False, "conditions": []}
RUNS = {"running": {}}


def test_each_node_is_a_job_that_pods_of_an_indexed_job_could_not_tell_from_theirs() -> None:
    made = plan("job", settings={"volumes": [{"mount": "/fsx", "claim": "fsx"}]}, **WANTED)
    (text,) = made.files.values()
    listed = list(yaml.safe_load_all(text))
    jobs = [one for one in listed if one["kind"] == "Job"]
    name = made.handle["name"]
    assert [one["metadata"]["name"] for one in jobs] == [name, f"{name}-1", f"{name}-2"]
    assert (made.handle["nodes"], made.handle["spares"]) == (3, 1)
    for node, one in enumerate(jobs):
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
        pod = one["spec"]["template"]
        env = {item["name"]: item.get("value") for item in pod["spec"]["containers"][0]["env"]}
        assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == (f"{name}-{node}", name)
        assert env["JOB_COMPLETION_INDEX"] == pod["metadata"]["labels"]["trainmaster/node"] == str(node)
        assert one["metadata"]["labels"]["trainmaster/attempt"] == ATTEMPT
        assert "podAntiAffinity" in pod["spec"]["affinity"], "a spare beside the node it replaces is lost with it"
    assert any(one["kind"] == "Service" for one in listed)


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("pytorchjob", {}, "its operator's"),
        ("trainjob", {}, "its operator's"),
        ("job", {"queue": "team"}, "Kueue"),
        ("job", {"hyperpod": {"auto_resume": True}}, "auto_resume"),
    ],
)
def test_spares_are_refused_where_another_program_has_the_pods(kind: str, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=rf"resources\.spares: .*{says}"):
        plan(kind, settings=settings, **WANTED)


def pod(node: int, state: Mapping[str, Any], *, host: str = "", made: int = 0, leaving: bool = False) -> dict[str, Any]:
    metadata = {
        "name": f"tm-a-1-{node}-{made}", "uid": f"{node}-{made}", "labels": {"trainmaster/node": str(node)},
        "creationTimestamp": f"2026-01-01T00:00:0{made}Z",
        "deletionTimestamp": "2026-01-01T00:01:00Z" if leaving else None,
    }  # fmt: skip
    status = {"phase": "Running", "conditions": [], "containerStatuses": [{"name": "trainmaster", "state": state}]}
    return {
        "metadata": metadata,
        "spec": {"nodeName": host or f"host-{node}", "container": "trainmaster"},
        "status": status,
    }


def ended(reason: Reason | None = None, *, ago_s: float = 0.0) -> dict[str, Any]:
    when = (datetime.now(UTC) - timedelta(seconds=ago_s)).isoformat(timespec="microseconds")
    record = ExitRecord(attempt=ATTEMPT, ok=reason is None, ended_at=when, reason=reason, message="over")
    return {"terminated": {"exitCode": 0, "message": json.dumps(json.loads(record.to_json()))}}


def state_of(one: dict[str, Any]) -> Any:
    return one["status"]["containerStatuses"][0]["state"]


def put(spool: Spool, node: int, stream: str, text: str) -> None:
    """Add to a file as the log of a node has it."""
    own = spool.node(node)
    own.begin(f"{node}-0/0")
    own.put(f"{node}-0/0", Frame(stream=stream, offset=own.sizes().get(stream, 0), data=text.encode()))


def tell(spool: Spool, text: str) -> None:
    put(spool, 0, MEMBERS_LOG, text)


def look(spool: Spool, *pods: dict[str, Any], lost: str = "", ago_s: float = 0.0) -> Poll:
    """`ago_s`: so long ago the ends of these pods were seen here first."""
    not_ready, ages = frozenset({lost} if lost else ()), {start_of(one): ago_s for one in pods}
    return spares.judge(JOB, pods, HANDLE, spool=spool, not_ready=not_ready, ended_s=ages)


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path)


@pytest.fixture
def begun(spool: Spool) -> Spool:
    assert look(spool, *(pod(node, RUNS) for node in range(3))).state is TargetState.RUNNING
    return spool


@pytest.mark.parametrize("spare", [[], [pod(2, {"waiting": {"reason": "ContainerCreating"}})]], ids=["none", "waits"])
def test_an_attempt_runs_without_its_spares_and_says_so(spool: Spool, spare: list[dict[str, Any]]) -> None:
    """Its agents do not wait for them either."""
    assert look(spool, pod(0, RUNS), *spare).state is TargetState.WAITING
    poll = look(spool, pod(0, RUNS), pod(1, RUNS), *spare)
    assert (poll.state, "spare" in poll.note, "node 2" in poll.note) == (TargetState.RUNNING, True, True)
    assert look(spool, pod(0, ended()), pod(1, ended()), *spare).state is TargetState.SUCCEEDED


def test_the_end_of_node_0_counts_where_nobody_saw_all_places_run(spool: Spool) -> None:
    poll = look(spool, pod(0, ended(Reason.NODE_LOST)), pod(1, {"waiting": {}}), pod(2, RUNS))
    assert (poll.state, poll.exit and poll.exit.reason) == (TargetState.FAILED, Reason.NODE_LOST)


def test_an_attempt_runs_where_a_spare_took_a_place_before_anybody_looked(spool: Spool) -> None:
    tell(spool, "[0, 2]\n")
    assert look(spool, pod(0, RUNS), pod(2, RUNS)).state is TargetState.RUNNING


@pytest.mark.parametrize(
    "second",
    [
        [],
        [pod(1, RUNS, leaving=True)],
        [pod(1, {"terminated": {"exitCode": 137}})],
        [pod(1, {})],  # its record is put in below: it is stamped with the time
        [pod(1, RUNS, leaving=True), pod(1, {"waiting": {"reason": "ContainerCreating"}}, made=1)],
    ],
    ids=["gone", "given up", "killed", "failed", "another pod"],
)
def test_a_lost_node_is_for_node_0_to_replace(begun: Spool, second: list[dict[str, Any]]) -> None:
    second = [one if state_of(one) else pod(1, ended(Reason.PREEMPTED)) for one in second]
    poll = look(begun, pod(0, RUNS), *second, pod(2, RUNS), lost="host-1" if not second else "")
    assert poll.state is TargetState.RUNNING, poll
    tell(begun, "[0, 2]\n")
    assert look(begun, pod(0, ended()), *second, pod(2, ended())).state is TargetState.SUCCEEDED


def test_the_end_of_node_0_is_the_end_if_every_place_has_ended_well(begun: Spool) -> None:
    assert look(begun, pod(0, ended()), pod(1, RUNS), pod(2, ended())).state is TargetState.RUNNING
    failed = look(begun, pod(0, ended()), pod(1, ended(Reason.CRASHED)), pod(2, ended()))
    assert (failed.state, failed.exit and failed.exit.reason) == (TargetState.FAILED, Reason.CRASHED)
    assert look(begun, pod(0, ended()), pod(2, ended())).state is TargetState.LOST
    assert look(begun, pod(0, ended(Reason.NODE_LOST)), pod(1, RUNS), pod(2, RUNS)).state is TargetState.FAILED
    tell(begun, "[0, 1]\n[0, 2]\n[0, ")  # a line that is on its way does not count
    assert look(begun, pod(0, ended()), pod(2, ended())).state is TargetState.SUCCEEDED


def test_a_machine_without_contact_is_waited_for_when_node_0_has_ended(begun: Spool) -> None:
    """It may have its record; without spares it is waited for as well."""
    first, spare = pod(0, ended()), pod(2, ended())
    assert look(begun, first, pod(1, RUNS), spare, lost="host-1").state is TargetState.UNKNOWN
    assert look(begun, first, pod(1, RUNS, leaving=True), spare).state is TargetState.RUNNING
    assert look(begun, first, pod(1, ended()), spare, lost="host-1").state is TargetState.SUCCEEDED
    poll = look(begun, first, pod(1, RUNS, leaving=True), spare, lost="host-1")
    assert (poll.state, poll.reason) == (TargetState.LOST, Reason.NODE_LOST)


def test_a_node_that_ended_well_before_node_0_is_not_lost(begun: Spool) -> None:
    assert look(begun, pod(0, RUNS), pod(1, ended()), pod(2, RUNS)).note == ""
    assert "looks for a spare" in look(begun, pod(0, RUNS), pod(1, ended(Reason.CRASHED)), pod(2, RUNS)).note


def test_a_failure_that_node_0_did_not_hear_of_ends_the_attempt_after_a_minute(begun: Spool) -> None:
    """A minute of the server's clock: that of the node may be late, and then a run that goes on would end at once."""
    pods = pod(0, RUNS), pod(1, ended(Reason.CHECK_FAILED, ago_s=3600)), pod(2, RUNS)
    assert look(begun, *pods, ago_s=50).state is TargetState.RUNNING
    assert look(begun, *pods, ago_s=70).exit is not None
    tell(begun, "[0, 2]\n")
    assert look(begun, *pods, ago_s=70).state is TargetState.RUNNING, "it was replaced"


@pytest.mark.parametrize("reason", [None, Reason.CRASHED])
def test_a_node_whose_pod_was_removed_has_ended_as_its_record_says(begun: Spool, reason: Reason | None) -> None:
    """Each node is a Job, which the cluster removes at a time of its own."""
    put(begun, 1, "exit.json", ended(reason)["terminated"]["message"])
    if reason is None:
        assert look(begun, pod(0, RUNS), pod(2, RUNS)).note == "", "it is not lost"
    poll = look(begun, pod(0, ended()), pod(2, ended()))
    assert (poll.state, poll.exit and poll.exit.reason) == (
        TargetState.FAILED if reason else TargetState.SUCCEEDED, reason
    )  # fmt: skip


def test_records_of_nodes_are_kept_until_node_0_has_ended() -> None:
    (text,) = plan("job", settings={"ttl_s": 5}, **WANTED).files.values()
    kept = [one["spec"]["ttlSecondsAfterFinished"] for one in yaml.safe_load_all(text) if one["kind"] == "Job"]
    assert kept == [5, 3600, 3600]


def test_the_loss_of_node_0_is_the_loss_of_the_attempt(begun: Spool) -> None:
    others = pod(1, RUNS), pod(2, RUNS)
    assert look(begun, pod(0, RUNS), *others, lost="host-0").state is TargetState.UNKNOWN
    poll = look(begun, pod(0, RUNS, leaving=True), *others, lost="host-0")
    assert (poll.state, poll.reason) == (TargetState.LOST, Reason.NODE_LOST)
    again = pod(0, RUNS, leaving=True), pod(0, RUNS, made=1)
    assert look(begun, *again, *others).state is TargetState.LOST


@pytest.mark.spawns
def test_everything_of_an_attempt_with_spares_is_found_and_released(
    kube: Kube,
    load: Any,  # noqa: F811 (the fixture)
    place: Place,
    run: Run,
    namespace: str,
) -> None:
    target = load(gpus=0)
    submission = target.plan(place(train=TRAIN, command=None, resources={"nodes": 2, "spares": 1}))
    jobs = f"/apis/batch/v1/namespaces/{namespace}/jobs"

    async def go() -> None:
        await target.submit(submission)
        assert len(kube.call("GET", jobs)["items"]) == 3
        (owned,) = await target.list_owned()  # without a database, as `reap` does
        assert owned.handle["name"] == submission.handle["name"]
        await target.release(owned.handle)
        assert kube.call("GET", jobs)["items"] == []
        assert kube.call("GET", f"/api/v1/namespaces/{namespace}/services")["items"] == []
        assert await target.list_owned() == []

    run(go())
