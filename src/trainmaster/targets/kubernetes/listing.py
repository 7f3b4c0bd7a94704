"""Objects of attempts in a namespace, by their labels and without a database, so that none is forgotten.

Most attempts have a job. A plan (ConfigMap) without one is left where its maker was killed before the job was there, or
where the cluster has removed a job that ended long ago.
"""

from __future__ import annotations

from trainmaster.targets import Owned
from trainmaster.targets.kubernetes import names
from trainmaster.targets.kubernetes.client import Object, path_of
from trainmaster.targets.kubernetes.errors import Denied, Missing
from trainmaster.targets.kubernetes.kubeconfig import Access
from trainmaster.targets.kubernetes.manifests import RESOURCES
from trainmaster.targets.kubernetes.session import Session, open_session
from trainmaster.targets.kubernetes.settings import Kind, Settings

_PLAIN: Kind = "job"  # of every pod that a run makes, whatever kind the settings state


async def list_objects(access: Access, settings: Settings) -> list[Owned]:
    """Jobs of the settings' kind and of runs, and plans without a job. Refused is only what the settings name."""
    session = open_session(access, settings.namespace, settings.kind)
    owned = {owned_job.attempt: owned_job for owned_job in await _list_jobs(session, settings, settings.kind)}
    if settings.kind != _PLAIN:
        owned |= {owned_job.attempt: owned_job for owned_job in await _list_optional(session, settings, _PLAIN)}
    try:
        path = path_of("v1", "configmaps", namespace=settings.namespace)
        plans = (await session.client.list(path, labelSelector=names.SELECTOR)).get("items") or ()
    except Denied:  # an account of an older role; reap names what it can list
        plans = ()
    for plan in plans:
        owned_plan = _owned(plan, settings, _PLAIN, "ConfigMap")
        if owned_plan is not None and owned_plan.attempt not in owned:
            owned[owned_plan.attempt] = owned_plan
    return list(owned.values())


async def _list_optional(session: Session, settings: Settings, kind: Kind) -> list[Owned]:
    try:
        return await _list_jobs(session, settings, kind)
    except (Denied, Missing):
        return []


async def _list_jobs(session: Session, settings: Settings, kind: Kind) -> list[Owned]:
    resource = RESOURCES[kind]
    path = path_of(resource.api, resource.plural, namespace=settings.namespace)
    listed = (await session.client.list(path, labelSelector=names.SELECTOR)).get("items") or ()
    made = (_owned(item, settings, kind, resource.kind) for item in listed)
    return [item for item in made if item is not None]


def _owned(made: Object, settings: Settings, kind: Kind, word: str) -> Owned | None:
    labels, name = made["metadata"].get("labels") or {}, str(made["metadata"]["name"])
    attempt = str(labels.get(names.ATTEMPT_LABEL, ""))
    if not attempt:
        return None
    name = name.removesuffix(f"-{labels.get(names.NODE_LABEL)}")  # the attempt's, by which all of it is released
    handle = {"attempt": attempt, "name": name, "namespace": settings.namespace, "kind": kind, "nodes": 1,
              "submitted": True}  # fmt: skip
    marks = {"home": names.HOME_LABEL, "run": names.RUN_LABEL}
    handle |= {field: str(labels[label]) for field, label in marks.items() if label in labels}
    return Owned(attempt=attempt, handle=handle, what=f"{word} {settings.namespace}/{name}")
