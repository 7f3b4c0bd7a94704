"""Attempts of each kind on a real API server: created, watched, described, conflicting, denied, deleted."""

from __future__ import annotations

import asyncio
import base64
import json
import urllib.error
from collections.abc import Callable, Coroutine
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from kube import LIMITED, Kube
from rests import rests
from trainmaster import targets
from trainmaster.core.errors import SpecError, TargetError, UsageError
from trainmaster.core.plan import ExitRecord
from trainmaster.core.states import Reason, TargetState
from trainmaster.targets import Handle, Placement, Poll, Submission
from trainmaster.targets.kubernetes.target import Kubernetes

pytestmark = pytest.mark.spawns
KINDS = {
    "job": ("batch/v1", "jobs"), "pytorchjob": ("kubeflow.org/v1", "pytorchjobs"),
    "trainjob": ("trainer.kubeflow.org/v1alpha1", "trainjobs"),
    "hyperpod": ("sagemaker.amazonaws.com/v1", "hyperpodpytorchjobs"),
}  # fmt: skip
Run = Callable[[Coroutine[Any, Any, Any]], Any]
Place = Callable[..., Placement]


def path_of(kind: str, namespace: str, name: str) -> str:
    api, plural = KINDS[kind]
    return f"/apis/{api}/namespaces/{namespace}/{plural}/{name}"


def make_pod(kube: Kube, submission: Submission, node: int = 0, *, suffix: str = "") -> str:
    """The pod that a controller would make, with its own labels."""
    handle = submission.handle
    job = kube.call("GET", path_of(str(handle["kind"]), str(handle["namespace"]), str(handle["name"])))
    spec = job["spec"]
    template = spec.get("template") or (spec.get("pytorchReplicaSpecs") or {}).get("Master", {}).get("template")
    template = template or spec["replicaSpecs"][0]["template"]
    name = f"{handle['name']}-{node}{suffix}"
    labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-completion-index": str(node)}
    body = {"metadata": {**template["metadata"], "name": name, "labels": labels}, "spec": template["spec"]}
    kube.call("POST", f"/api/v1/namespaces/{handle['namespace']}/pods", body)
    return name


def set_status(kube: Kube, namespace: str, pod: str, **status: Any) -> None:
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}/status"
    kube.call("PATCH", path, {"status": status}, kind="application/merge-patch+json")


def container(state: dict[str, Any], *, name: str = "trainmaster") -> list[dict[str, Any]]:
    base = {"name": name, "image": "train:1", "imageID": "", "ready": False, "restartCount": 0}
    return [{**base, "state": state}]


def waiting(reason: str, message: str) -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


def ended(record: ExitRecord | None, *, code: int = 0, **more: Any) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    message = {"message": json.dumps(json.loads(record.to_json()))} if record is not None else {}
    return {"terminated": {"exitCode": code, "startedAt": now, "finishedAt": now, **message, **more}}


def record(attempt: str, *, ok: bool = True, reason: Reason | None = None) -> ExitRecord:
    return ExitRecord(attempt=attempt, ok=ok, ended_at="2026-01-01T00:00:00+00:00", reason=reason, message="every rank")


async def until(target: Kubernetes, handle: Handle, state: TargetState, text: str = "") -> Poll:
    async with asyncio.timeout(30):
        for rest_s in rests():
            poll = await target.poll(handle)
            if poll.state is state and text in poll.note:
                break
            await asyncio.sleep(rest_s)
    return poll


@pytest.fixture
def load(settings_file: Callable[..., Path]) -> Callable[..., Kubernetes]:
    return lambda **more: targets.load(f"kubernetes:{settings_file(**more)}")  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
def test_an_attempt_is_created_found_and_deleted(
    kind: str, kube: Kube, load: Any, place: Place, run: Run, namespace: str
) -> None:
    target = load(kind=kind, gpus=0)
    # Kubernetes 1.20 has no indexed Jobs.
    submission = target.plan(place(resources={"nodes": 1 if kind == "job" else 2}))

    async def go() -> None:
        handle = await target.submit(submission)
        path = path_of(kind, namespace, handle["name"])
        first = kube.call("GET", path)["metadata"]
        assert await target.submit(submission) == handle
        again = kube.call("GET", path)["metadata"]
        assert (first["uid"], first.get("generation")) == (again["uid"], again.get("generation"))
        assert (await target.poll(handle)).state is TargetState.WAITING
        (owned,) = await target.list_owned()
        assert owned.attempt == handle["attempt"]
        await target.release(handle)
        with pytest.raises(urllib.error.HTTPError):
            kube.call("GET", path)
        for plural in ("configmaps", "secrets", "services", "pods"):
            listed = kube.call("GET", f"/api/v1/namespaces/{namespace}/{plural}?labelSelector=trainmaster/attempt")
            assert listed["items"] == [], plural
        assert await target.list_owned() == []
        await target.release(handle)
        await target.submit(submission)
        assert (await target.poll(handle)).state is TargetState.LOST

    run(go())


def test_what_pods_do_becomes_a_state(kube: Kube, load: Any, place: Place, run: Run, namespace: str) -> None:
    target = load(kind="pytorchjob", gpus=0)
    submission = target.plan(place(resources={"nodes": 2}))

    async def go() -> None:
        handle = await target.submit(submission)
        await until(target, handle, TargetState.WAITING, "no pod was created yet")
        pods = [make_pod(kube, submission, node) for node in (0, 1)]
        await until(target, handle, TargetState.WAITING, "no node was chosen yet")
        for pod in pods:
            set_status(
                kube, namespace, pod, phase="Running", containerStatuses=container({"running": {}}, name="pytorch")
            )
        await until(target, handle, TargetState.RUNNING)
        ok = record(handle["attempt"])
        set_status(kube, namespace, pods[1], phase="Succeeded", containerStatuses=container(ended(ok), name="pytorch"))
        assert (await target.poll(handle)).state is TargetState.RUNNING
        set_status(kube, namespace, pods[0], phase="Succeeded", containerStatuses=container(ended(ok), name="pytorch"))
        poll = await until(target, handle, TargetState.SUCCEEDED)
        assert poll.exit == ok
        await target.release(handle)
        assert await target.poll(handle) == poll, "it keeps how it ended"

    run(go())


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize(
    ("status", "state", "reason", "words"),
    [
        ({"phase": "Failed", "containerStatuses": container(ended(None, code=137, reason="OOMKilled"))},
         TargetState.FAILED, Reason.OUT_OF_MEMORY, "lack of memory"),
        ({"phase": "Failed", "containerStatuses": container(ended(None, code=1, reason="Error"))},
         TargetState.FAILED, Reason.CRASHED, "left no exit record"),
        ({"phase": "Failed", "containerStatuses": container(ended(None, code=128, reason="StartError"))},
         TargetState.FAILED, Reason.IMAGE_ERROR, "left no exit record"),
        ({"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
         TargetState.LOST, Reason.PREEMPTED, "low on resource"),
        ({"phase": "Failed", "reason": "NodeLost", "message": "gone"}, TargetState.LOST, Reason.NODE_LOST, "gone"),
        ({"phase": "Pending", "containerStatuses": container(waiting("ImagePullBackOff", "no"))},
         TargetState.FAILED, Reason.IMAGE_ERROR, "image train:1 cannot be pulled"),
        ({"phase": "Pending", "containerStatuses": container(waiting("ErrImagePull", "x509"))},
         TargetState.WAITING, None, "image train:1 cannot be pulled (ErrImagePull): x509"),
    ],
)  # fmt: skip
def test_ends_without_a_record_are_explained(
    status: Any, state: TargetState, reason: Reason | None, words: str, kube: Kube, load: Any, place: Place, run: Run,
    namespace: str,
) -> None:  # fmt: skip
    target = load(gpus=0)
    submission = target.plan(place())

    async def go() -> None:
        handle = await target.submit(submission)
        pod = make_pod(kube, submission)
        set_status(kube, namespace, pod, **status)
        poll = await until(target, handle, state, words)
        found = poll.exit.reason if poll.exit is not None else poll.reason
        assert found is reason
        await target.release(handle)

    run(go())


def test_a_job_that_was_deleted_by_somebody_is_lost(
    kube: Kube, load: Any, place: Place, run: Run, namespace: str
) -> None:
    target = load(gpus=0)
    submission = target.plan(place())

    async def go() -> None:
        handle = await target.submit(submission)
        assert (await target.poll(handle)).state is TargetState.WAITING
        kube.call("DELETE", path_of("job", namespace, handle["name"]) + "?propagationPolicy=Background")
        await until(target, handle, TargetState.LOST, "was deleted")

    run(go())


def test_a_stop_request_reaches_pods_and_those_that_come_later(
    kube: Kube, load: Any, place: Place, run: Run, namespace: str
) -> None:
    target = load(gpus=0)
    early, late = target.plan(place(number=1)), target.plan(place(number=2))

    async def go() -> None:
        handle = await target.submit(early)
        pod = make_pod(kube, early)
        await target.cancel(handle, reason="over_budget: enough")
        await target.cancel(handle, reason="user_cancelled")
        found = kube.call("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}")
        assert found["metadata"]["annotations"]["trainmaster/stop"] == "over_budget: enough"
        await target.cancel(late.handle, reason="user_cancelled")
        await target.submit(late)
        made = kube.call("GET", path_of("job", namespace, late.handle["name"]))
        assert made["spec"]["template"]["metadata"]["annotations"]["trainmaster/stop"] == "user_cancelled"

    run(go())


def test_a_job_that_waits_ends_when_it_is_cancelled_and_one_that_runs_is_left_to_its_agent(
    kube: Kube, load: Any, place: Place, run: Run, namespace: str
) -> None:
    target = load(gpus=0)
    waiting, running = target.plan(place(number=1)), target.plan(place(number=2))

    async def go() -> None:
        waits, runs = await target.submit(waiting), await target.submit(running)
        make_pod(kube, waiting)
        pod = make_pod(kube, running)
        set_status(kube, namespace, pod, phase="Running", containerStatuses=container({"running": {}}))
        await until(target, waits, TargetState.WAITING)
        await until(target, runs, TargetState.RUNNING)
        for handle in (waits, runs):
            await target.cancel(handle, reason="over_budget: enough")
        ended = await target.poll(waits)
        assert (ended.state, ended.exit.reason) == (TargetState.FAILED, Reason.OVER_BUDGET)
        assert "before any of its pods started" in ended.note
        assert (await target.poll(runs)).state is TargetState.RUNNING

    run(go())


@pytest.mark.parametrize("kind", KINDS)
def test_a_secret_is_in_secret_objects_alone(
    kind: str, kube: Kube, load: Any, place: Place, run: Run, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINMASTER_JOB_ENV", "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_planted0123456789")
    target = load(kind=kind, gpus=0)
    submission = target.plan(place())

    async def go() -> None:
        handle = await target.submit(submission)
        api, plural = KINDS[kind]
        seen = [f"/apis/{api}/namespaces/{namespace}/{plural}", f"/api/v1/namespaces/{namespace}/configmaps"]
        texts = [json.dumps(kube.call("GET", path)) for path in seen]
        texts += [submission.render(), json.dumps(handle), str(await target.poll(handle))]
        encoded = base64.b64encode(b"hf_planted0123456789").decode()
        assert not [text for text in texts if "hf_planted0123456789" in text or encoded in text]
        (secret,) = kube.call("GET", f"/api/v1/namespaces/{namespace}/secrets")["items"]
        assert secret["data"] == {"HF_TOKEN": encoded}
        assert "HF_TOKEN" in texts[0] or "secretRef" in texts[0]
        await target.release(handle)
        assert kube.call("GET", f"/api/v1/namespaces/{namespace}/secrets")["items"] == []

    run(go())


def test_a_field_that_somebody_else_owns_is_a_conflict(
    kube: Kube, load: Any, place: Place, run: Run, namespace: str
) -> None:
    target = load(kind="hyperpod", gpus=0)
    submission = target.plan(place())

    async def go() -> None:
        handle = await target.submit(submission)
        path = path_of("hyperpod", namespace, handle["name"]) + "?fieldManager=someone"
        kube.call("PATCH", path, {"spec": {"nprocPerNode": "4"}}, kind="application/merge-patch+json")
        with pytest.raises(TargetError, match=r"conflict.*someone.*nprocPerNode"):
            await target.submit(submission)

    run(go())


def edited(submission: Submission, kind: str, change: Callable[[Any], None]) -> Submission:
    """The submission with one object changed by hand."""
    ((name, text),) = submission.files.items()
    objects = list(yaml.safe_load_all(text))
    change(next(one for one in objects if one["kind"] == kind))
    return replace(submission, files={name: yaml.safe_dump_all(objects)})


def test_a_bad_object_is_a_spec_error_with_its_path(load: Any, place: Place, run: Run) -> None:
    plain, pytorch = load(gpus=0).plan(place()), load(kind="pytorchjob", gpus=0).plan(place(number=2))

    def no_image(one: Any) -> None:
        one["spec"]["template"]["spec"]["containers"][0]["image"] = ""

    with pytest.raises(SpecError) as wrong:
        run(load(gpus=0).submit(edited(plain, "Job", no_image)))
    assert "spec.template.spec.containers[0].image" in wrong.value.faults[0].path

    def no_count(one: Any) -> None:
        one["spec"]["pytorchReplicaSpecs"]["Master"]["replicas"] = -1

    with pytest.raises(SpecError) as wrong:
        run(load(kind="pytorchjob", gpus=0).submit(edited(pytorch, "PyTorchJob", no_count)))
    assert "spec.pytorchReplicaSpecs.Master.replicas" in wrong.value.faults[0].path


def test_a_job_that_the_cluster_refuses_leaves_nothing(
    kube: Kube, load: Any, place: Place, run: Run, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINMASTER_JOB_ENV", "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_planted0123456789")
    target = load(gpus=0)
    submission = target.plan(place(resources={"nodes": 2}))  # Kubernetes 1.20 has no indexed Jobs

    def count() -> dict[str, int]:
        plurals, label = ("configmaps", "secrets", "services"), "trainmaster/attempt"
        path = f"/api/v1/namespaces/{namespace}"
        return {one: len(kube.call("GET", f"{path}/{one}?labelSelector={label}")["items"]) for one in plurals}

    async def go() -> None:
        with pytest.raises(SpecError, match="completionMode"):
            await target.submit(submission)
        assert min(count().values()) == 1, "they are created before the job"
        await target.release(submission.handle)
        assert set(count().values()) == {0}
        await target.release(submission.handle)

    run(go())


def test_a_missing_right_is_named(load: Any, place: Place, run: Run, namespace: str) -> None:
    target = load(gpus=0, token=LIMITED)
    submission = target.plan(place())
    with pytest.raises(
        TargetError, match=rf"may not create configmaps in namespace {namespace}; apply deploy/kubernetes"
    ):
        run(target.submit(submission))
    poll = run(target.poll({**submission.handle, "submitted": True}))
    assert (poll.state, "may not list jobs.batch" in poll.note) == (TargetState.UNKNOWN, True), poll


def test_wrong_credentials_and_an_absent_server_are_told(load: Any, place: Place, run: Run, kube: Kube) -> None:
    target = load(gpus=0, token="nobody")
    submission = target.plan(place())
    with pytest.raises(TargetError, match="credentials are refused"):
        run(target.submit(submission))
    path = kube.kubeconfig("gone")
    path.write_text(path.read_text().replace(kube.url, "https://127.0.0.1:1"))
    target = load(gpus=0, kubeconfig=str(path))
    poll = run(target.poll({**submission.handle, "submitted": True}))
    assert poll.state is TargetState.UNKNOWN
    for word, change in (("insecure-skip-tls-verify", "certificate-authority"), ("https://", "http://127")):
        text = kube.kubeconfig("odd").read_text()
        text = text.replace("certificate-authority: certs/apiserver.crt", "insecure-skip-tls-verify: true") if (
            change == "certificate-authority") else text.replace("https://127", "http://127")  # fmt: skip
        (kube.folder / "kubeconfig-odd").write_text(text)
        with pytest.raises(UsageError, match=word):
            run(load(gpus=0, kubeconfig=str(kube.folder / "kubeconfig-odd")).submit(submission))


def test_many_jobs_cost_one_list_and_one_watch(kube: Kube, load: Any, place: Place, run: Run, namespace: str) -> None:
    target = load(gpus=0)
    submissions = [target.plan(place(number=number)) for number in range(1, 9)]

    async def go() -> None:
        handles = [await target.submit(one) for one in submissions]
        for _ in range(20):
            assert {(await target.poll(handle)).state for handle in handles} == {TargetState.WAITING}
        session = target._session(handles[0])
        assert (session.jobs.lists, session.pods.lists) == (1, 1)
        before = session.pods.changes
        pod = make_pod(kube, submissions[0])
        set_status(kube, namespace, pod, phase="Running", containerStatuses=container({"running": {}}))
        await until(target, handles[0], TargetState.RUNNING)
        assert session.pods.changes - before == 2, "one change for each of the two"
        # The history before this point is gone: the watch lists once more and goes on.
        session.pods._version = "1"
        session.pods._task.cancel()
        await asyncio.gather(session.pods._task, return_exceptions=True)
        set_status(
            kube, namespace, pod, phase="Succeeded", containerStatuses=container(ended(record(handles[0]["attempt"])))
        )
        await until(target, handles[0], TargetState.SUCCEEDED)

    run(go())
