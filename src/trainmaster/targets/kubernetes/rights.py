"""Rights that the target needs, no more: as a manifest, and checked one by one at the cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainmaster.core.errors import TrainmasterError, UsageError
from trainmaster.targets.kubernetes import kueue
from trainmaster.targets.kubernetes.client import Client, Object, path_of
from trainmaster.targets.kubernetes.errors import Denied, Missing
from trainmaster.targets.kubernetes.kubeconfig import load_access
from trainmaster.targets.kubernetes.manifests import RESOURCES, render
from trainmaster.targets.kubernetes.settings import Settings

_REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
NAME = "trainmaster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """One verb on one resource."""

    group: str
    resource: str  # with its subresource after a slash
    verb: str
    use: str
    cluster: bool = False  # not of a namespace
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{'.' + self.group if self.group else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Whether the account has a right."""

    right: Right
    allowed: bool


def needed(settings: Settings, *, shell: bool = False) -> list[Right]:
    """Every right, in the order of use. Those of a shell in pods are given to people, not to a server."""
    resource = RESOURCES[settings.kind]
    group = resource.api.rpartition("/")[0]
    jobs = "create and find the job", "delete the job"
    rights = [
        *(_right("", "configmaps", verb, "plan, working folder, node half") for verb in ("create", "patch")),
        *(_right("", "secrets", verb, "secrets of jobs") for verb in ("create", "patch")),
        *(_right("", plural, "deletecollection", "clean up") for plural in ("configmaps", "secrets")),
        *(_right(group, resource.plural, verb, jobs[0]) for verb in ("create", "patch", "get", "list", "watch")),
        _right(group, resource.plural, "delete", jobs[1]),
        *(_right("", "pods", verb, "states of pods") for verb in ("list", "watch")),
        _right("", "pods", "patch", "stop requests"),
        _right("", "pods", "delete", "end pods by force"),
        _right("", "pods/log", "get", "events and logs"),
    ]
    if settings.kind == "job":
        use = "names of the pods of a job over several nodes"
        rights += [_right("", "services", verb, use) for verb in ("create", "patch", "delete")]
    use = "find plans that a killed run has left"
    rights.append(Right(group="", resource="configmaps", verb="list", use=use, optional=True))
    rights.append(Right(group="", resource="events", verb="list", use="explain a job without pods", optional=True))
    use = "say why Kueue does not admit a job"
    for verb in ("list", "watch"):
        rights.append(Right(group=kueue.GROUP, resource="workloads", verb=verb, use=use, optional=True))
    use = "tell a lost node from a deleted pod"
    rights.append(Right(group="", resource="nodes", verb="list", use=use, cluster=True, optional=True))
    if shell:
        # A WebSocket begins with GET; Kubernetes 1.35 and newer ask for `create` besides.
        rights += [_right("", "pods/exec", verb, "commands in pods") for verb in ("get", "create")]
        rights += [_right("", "pods", verb, "throw-away pods (--new)") for verb in ("create", "get")]
        rights.append(_right("", "configmaps", "get", "the pod of a rank (--rank)"))
    return rights


def _right(group: str, resource: str, verb: str, use: str) -> Right:
    return Right(group=group, resource=resource, verb=verb, use=use)


async def check(settings: Settings, *, shell: bool = False) -> list[Answer]:
    """Ask the cluster for each right."""
    client = Client(load_access(settings.kubeconfig, settings.context))
    try:
        wanted = needed(settings, shell=shell)
        return [Answer(right=right, allowed=await _query(client, right, settings.namespace)) for right in wanted]
    finally:
        await client.close()


async def find_namespace_id(settings: Settings) -> str:
    """The id of the namespace; UsageError where there is none, or the account may not ask."""
    client = Client(load_access(settings.kubeconfig, settings.context))
    try:
        found = await client.get(path_of("v1", "namespaces", name=settings.namespace))
    except Denied:
        raise UsageError(
            f"the kubeconfig may not read the namespace {settings.namespace}, so it cannot be told from that of "
            "another project; allow `get` of namespaces in its role there"
        ) from None
    except Missing:
        raise UsageError(f"there is no namespace {settings.namespace} in the cluster; make it first") from None
    except TrainmasterError as error:
        raise UsageError(f"the cluster cannot be asked: {error}") from None
    finally:
        await client.close()
    return f"namespace {found['metadata']['uid']}"


async def _query(client: Client, right: Right, namespace: str) -> bool:
    resource, _, inner = right.resource.partition("/")
    attributes: Object = {"group": right.group, "resource": resource, "verb": right.verb}
    if inner:
        attributes["subresource"] = inner
    if not right.cluster:
        attributes["namespace"] = namespace
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await client.post(_REVIEW, review)
    return (answer.get("status") or {}).get("allowed") is True


def role_objects(settings: Settings, *, shell: bool = False) -> list[Object]:
    """ServiceAccount with a Role in the namespace, and a ClusterRole that lists nodes."""
    namespace, wanted = settings.namespace, needed(settings, shell=shell)
    own_metadata = {"name": NAME, "namespace": namespace}
    subject = {"kind": "ServiceAccount", "name": NAME, "namespace": namespace}
    made: list[Object] = [{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": dict(own_metadata)}]
    for kind, metadata, inside in (
        ("Role", own_metadata, False),
        ("ClusterRole", {"name": f"{NAME}-{namespace}"}, True),
    ):
        rules = _rules([right for right in wanted if right.cluster is inside])
        api = "rbac.authorization.k8s.io/v1"
        made.append({"apiVersion": api, "kind": kind, "metadata": dict(metadata), "rules": rules})
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": metadata["name"]}
        binding = {"apiVersion": api, "kind": f"{kind}Binding", "metadata": dict(metadata), "roleRef": reference}
        made.append({**binding, "subjects": [dict(subject)]})
    return made


def _rules(wanted: Sequence[Right]) -> list[Object]:
    """One rule per resource."""
    verbs: dict[tuple[str, str], list[str]] = {}
    for right in wanted:
        verbs.setdefault((right.group, right.resource), []).append(right.verb)
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": allowed}
        for (group, resource), allowed in verbs.items()
    ]


def render_role(settings: Settings, *, shell: bool = False) -> str:
    """The manifest as YAML."""
    return render(role_objects(settings, shell=shell))
