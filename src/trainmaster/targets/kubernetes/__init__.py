"""Target `kubernetes:cluster.yaml`: attempts run in pods, as a Job, PyTorchJob, TrainJob or HyperPodPyTorchJob.

settings.py    the settings file                  pods.py        the pod, the same for every kind
manifests.py   the objects of an attempt          hyperpod.py    what only SageMaker HyperPod has
lint.py        traps in manifests                 names.py       names, labels, paths
target.py      the target                         planning.py    its plan, and the text of --dry-run
session.py     one cluster, shared by attempts    watch.py       a collection, kept up to date
states.py      jobs and pods as our states        pending.py     why a pod waits
logs.py        logs of pods                       spool.py       files put together from them
client.py      the API over HTTP                  errors.py      refusals as our errors
kubeconfig.py  address and credentials            rights.py      what the account may do
drain.py       nodes out of service and back      kueue.py       `queue:` as labels, and why a job waits
spares.py      state of an attempt with spares
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainmaster.core.errors import UsageError
from trainmaster.targets._queueing import MAX_WAIT
from trainmaster.targets._traits import Account, Traits

if TYPE_CHECKING:
    from trainmaster.targets._drain import Scheduler
    from trainmaster.targets.kubernetes.settings import Kind, Settings
    from trainmaster.targets.kubernetes.target import Kubernetes

TRAITS = Traits(
    title="pods of a Kubernetes cluster",
    option="file",
    example="cluster.yaml",
    starts="`{kind: job, image: registry.example.org/train:1, gpus: 8}` (docs/guides/kubernetes.md)",
    nodes=True,
    drains=True,
    queue={
        "name": "label kueue.x-k8s.io/queue-name, a Kueue LocalQueue of the namespace; the job is made suspended",
        "priority": "label kueue.x-k8s.io/priority-class, a WorkloadPriorityClass of this name; normal: none",
        "preemptible": "Kueue preempts by the rules of its ClusterQueue; the same job goes on once admitted again",
        "max_wait_s": MAX_WAIT,
    },
    accounts="NAMESPACE[/SERVICE-ACCOUNT]",
    spares="so many more pods are placed, checked, and wait with an agent; each node is a Job of its own (`kind: job`)",
)


def create(options: str, *, kind: Kind | None = None, user: str | None = None) -> Kubernetes:
    """The target with the settings of a file; without one, the current context of the kubeconfig.

    `user` is the namespace, and the service account of the pods, in place of those in the file.
    """
    from trainmaster.targets.kubernetes.target import Kubernetes

    return Kubernetes(Path(options) if options else None, kind=kind, user=user)


def read_settings(word: str) -> Settings:
    """The settings of a target whose jobs are pods, by its word of `--on`."""
    from trainmaster import targets
    from trainmaster.targets.kubernetes.target import Kubernetes

    target = targets.load(word)
    if not isinstance(target, Kubernetes):
        raise UsageError(f"{word!r} is no Kubernetes target; write kubernetes:FILE or hyperpod:FILE")
    return target.settings()


def runs_as(options: str, user: str | None) -> Account:
    """Namespace and service account of the pods."""
    settings = create(options, user=user).settings()
    server = ""
    if user is None and not options:
        server = "pods are made with the server's own kubeconfig in a namespace that nobody chose"
    return Account(name=settings.namespace, places=frozenset({_cluster(settings)}), server=server)


async def identify(options: str, user: str | None) -> dict[str, str]:
    """The namespace's own id, which no other namespace of any cluster has."""
    from trainmaster.targets.kubernetes.rights import find_namespace_id

    settings = create(options, user=user).settings()
    return {_cluster(settings): await find_namespace_id(settings)}


def _cluster(settings: Settings) -> str:
    return f"kubeconfig {settings.kubeconfig or 'of the server'}, context {settings.context or 'current'}"


def create_scheduler(options: str) -> Scheduler:
    """kubectl, which drains nodes of its current context."""
    from trainmaster.targets.kubernetes.drain import KubernetesScheduler

    if options:
        word = f"kubernetes:{options}"
        raise UsageError(
            f"--on {word}: write --on kubernetes; kubectl's current context decides which cluster is meant"
        )
    return KubernetesScheduler()
