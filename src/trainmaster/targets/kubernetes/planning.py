"""Plan of an attempt on Kubernetes: the plan for its agents, the objects, the lint, and the text of `--dry-run`."""

from __future__ import annotations

import base64
import functools
import os
from dataclasses import replace

from trainmaster.core.errors import Fault, SpecError, UsageError
from trainmaster.core.plan import WORK_FOLDER, Plan
from trainmaster.core.spec import JobSpec
from trainmaster.core.workdir import find_digest
from trainmaster.remote import job_user
from trainmaster.remote.members import SPARES
from trainmaster.remote.package import Package, pack
from trainmaster.targets import Placement, Submission
from trainmaster.targets.kubernetes import hyperpod, kueue, manifests, names
from trainmaster.targets.kubernetes.lint import find_traps
from trainmaster.targets.kubernetes.pods import Object, PodPlan
from trainmaster.targets.kubernetes.settings import Settings


@functools.cache
def package() -> Package:
    """The node half of this installation, packed once."""
    return pack()


def plan(placement: Placement, settings: Settings) -> Submission:
    """The submission: objects without secret values, and the handle."""
    attempt, spec = placement.attempt, placement.spec
    settings = kueue.apply_queue(settings, spec.queue)
    _check_spares(spec, settings)
    pod = pod_plan(attempt, spec, settings)
    file = f"{pod.name}.yaml"
    return Submission(
        handle={
            "attempt": attempt,
            "name": pod.name,
            "namespace": settings.namespace,
            "kind": settings.kind,
            "nodes": spec.resources.machines,
            **({SPARES: spec.resources.spares} if spec.resources.spares else {}),
            # Whoever restarts the pods says when the job is over; after a preemption Kueue admits the same job again.
            "restarts": settings.kind == "hyperpod" or settings.hyperpod.auto_resume or spec.queue.preemptible,
            "ranks_per_node": spec.resources.processes_per_node,
            "folder": str(placement.job_folder.absolute() / "attempts" / attempt.rpartition(".")[2]),
        },
        files={file: manifests.render([*secrets(pod), *build(pod)])},
        commands=(("kubectl", "apply", "--server-side", f"--field-manager={names.MANAGER}", "-f", file),),
        work=placement.job_folder / WORK_FOLDER if find_digest(spec.workdir) is not None else None,
    )


def _check_spares(spec: JobSpec, settings: Settings) -> None:
    """SpecError where another program makes or admits the pods: a lost one is that program's to replace."""
    message = None
    if settings.kind != "job":
        message = f"pods of kind {settings.kind} are its operator's; write `kind: job` in the settings file"
    elif settings.queue is not None:
        message = "Kueue would admit each node for itself, and not all at once; leave out this, or the queue"
    elif settings.hyperpod.auto_resume:
        message = (
            "with `hyperpod.auto_resume` HyperPod restarts pods; leave out this, or auto_resume in the settings file"
        )
    if spec.resources.spares and message is not None:
        raise SpecError([Fault(path="resources.spares", message=message)])


def parse(submission: Submission) -> list[Object]:
    """The printed objects of a submission: what is applied is what was shown."""
    from trainmaster.documents import yaml_file

    ((name, text),) = submission.files.items()
    return yaml_file.parse_all(text.encode(), name)


def package_map(namespace: str) -> Object:
    """ConfigMap with the node half, shared by all attempts of this version."""
    made = package()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"trainmaster-{made.digest[:16]}",
            "namespace": namespace,
            "labels": {names.MANAGED_BY: names.MANAGER},
        },
        "binaryData": {"package.zip.gz": base64.b64encode(made.data).decode()},
    }


def build(pod: PodPlan) -> list[Object]:
    """Objects of an attempt, secrets left out; SpecError with every trap in them."""
    objects = manifests.build(node_plan(pod), pod)
    if faults := [fault for item in objects for fault in find_traps(item)]:
        raise SpecError(faults)
    return objects


def node_plan(pod: PodPlan) -> Plan:
    """Plan that every pod reads; each adds its node rank, and the address where the ranks meet."""
    spec, nodes = pod.spec, pod.spec.resources.nodes
    jobs = f"{pod.settings.folder.rstrip('/')}/jobs"
    if spec.train is None and spec.command is None:
        raise UsageError("command: write the program; on Kubernetes the agent starts it, not the image by itself")
    return Plan(
        attempt=pod.attempt,
        spec=replace(spec, container=None),  # the pod is the container
        folder=f"{names.RUN_FOLDER}/attempts/1",
        checkpoints=f"{jobs}/{spec.resume_from or names.job_of(pod.attempt)}/checkpoints",
        master_addr=f"{pod.name}-0.{pod.name}" if nodes > 1 else "127.0.0.1",
        master_port=names.MASTER_PORT if nodes > 1 else None,
    )


def pod_plan(attempt: str, spec: JobSpec, settings: Settings) -> PodPlan:
    """What the pods of an attempt need, as this server gives it to them. `spec` has its container still."""
    login = spec.container.login if spec.container is not None else None
    given = job_user.find_given(os.environ)
    if login is not None:
        given.pop(login.password_from, None)  # for the registry alone
    name = names.object_name(attempt)
    return PodPlan(
        name=name,
        attempt=attempt,
        spec=spec,
        settings=settings,
        container=manifests.RESOURCES[settings.kind].container,
        launcher=hyperpod.launcher(spec) if settings.kind == "hyperpod" else (),
        secrets=tuple(sorted(given)),
        package=f"trainmaster-{package().digest[:16]}" if settings.package == "send" else "",
        pull_secret=f"{name}-pull" if login is not None else None,
    )


def secrets(pod: PodPlan) -> list[Object]:
    """Secret objects of an attempt, as they may be printed: without values."""
    made = [manifests.secret(pod)] if pod.secrets else []
    container = pod.spec.container
    if container is not None and container.login is not None:
        made.append(manifests.pull_secret(pod, container.registry, container.login))
    return made


def reveal(secret: Object) -> Object:
    """A printed Secret with its values, from the environment of the server."""
    metadata = secret["metadata"]
    if secret["type"] == "Opaque":
        given = job_user.find_given(os.environ)
        if missing := sorted(set(secret["data"]) - given.keys()):
            raise UsageError(f"{', '.join(missing)}: no longer given to jobs by {job_user.PASSED}")
        data = {name: manifests.encode(given[name]) for name in secret["data"]}
    else:
        notes = metadata["annotations"]
        value = job_user.find_secret(notes[manifests.PASSWORD_FROM])
        data = manifests.docker_config(notes[manifests.REGISTRY], notes[manifests.USER], value)
    return {**secret, "data": data}
