"""Nodes of a Kubernetes cluster, as its API server describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainmaster.targets._nodes import Node
from trainmaster.targets.kubernetes import names
from trainmaster.targets.kubernetes.errors import Denied
from trainmaster.targets.kubernetes.kubeconfig import load_access
from trainmaster.targets.kubernetes.session import open_session
from trainmaster.targets.kubernetes.settings import Settings
from trainmaster.targets.kubernetes.states import is_ready

NOT_READY = "it is not Ready"
NO_GPU = "none of its GPUs is in working order, by the device plugin"
_HOSTNAME = "kubernetes.io/hostname"
_TAINTS = ("NoSchedule", "NoExecute")
_NOT_READY_TAINT = "node.kubernetes.io/not-ready"  # follows the condition Ready, which is judged by itself, by seconds
_UNSCHEDULABLE = "node.kubernetes.io/unschedulable"  # follows a cordon


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeNode:
    """A node as the API server describes it."""

    name: str
    gpus: int  # in working order
    installed: int
    fault: str  # why nothing can start there now; empty: it can
    hostname: str = ""  # its label, by which a pod chooses it
    taints: tuple[str, ...] = ()  # keys that the settings do not tolerate
    lost: bool = False  # it has GPUs or had some, and offers none now

    @property
    def closed(self) -> str:
        """Why nothing can be measured there now; empty: it can. A cordon and our own taint keep out only others."""
        if self.fault == NOT_READY:
            return self.fault
        if self.lost:
            return NO_GPU
        return next((f"no toleration for its taint {key}" for key in self.taints if key != names.HEALTH_TAINT), "")

    def describe(self, settings: Settings) -> Node:
        installed = None if settings.gpus == 0 else self.installed  # the pods ask for none
        return Node(name=self.name, gpus=self.gpus, installed=installed, closed=self.closed or None)


async def list_nodes(settings: Settings, *, without_gpus: bool = False) -> list[KubeNode]:
    """Nodes with GPUs that the cluster file does not leave out; all nodes where none has a GPU, or none is wanted."""
    access = load_access(settings.kubeconfig, settings.context)
    session = open_session(access, settings.namespace, settings.kind)
    try:
        listed = (await session.client.list("/api/v1/nodes")).get("items") or ()
    except Denied as error:
        raise Denied(f"{error}; the nodes have to be listed: all of them are measured") from None
    return find_nodes(listed, settings, without_gpus=without_gpus)


def find_nodes(
    listed: Sequence[Mapping[str, Any]], settings: Settings, *, without_gpus: bool = False
) -> list[KubeNode]:
    """Nodes with GPUs that the settings file does not leave out; all nodes where no GPU is wanted, or none is there."""
    nodes = [_read_node(node, settings) for node in listed if _is_chosen(node, settings)]
    without = without_gpus or settings.gpus == 0
    with_gpus = [] if without else [node for node in nodes if node.installed or node.lost]
    # A control plane node that takes no pods is no part of what is measured.
    return with_gpus or [node for node in nodes if without or not node.fault]


def _is_chosen(node: Mapping[str, Any], settings: Settings) -> bool:
    labels = node["metadata"].get("labels") or {}
    wanted = all(labels.get(name) == value for name, value in settings.node_labels.items())
    return wanted and node["metadata"]["name"] not in settings.not_nodes


def _read_node(node: Mapping[str, Any], settings: Settings) -> KubeNode:
    status = node.get("status") or {}
    installed, free = (_count(status.get(name), settings.gpu_resource) for name in ("capacity", "allocatable"))
    # A kubelet lists a resource whose device plugin is gone with the amount 0; a node without GPUs does not list it.
    lost = settings.gpus != 0 and not free and settings.gpu_resource in (status.get("capacity") or {})
    tolerated = {toleration.key for toleration in settings.tolerations} | {
        settings.gpu_resource,
        _NOT_READY_TAINT,
        _UNSCHEDULABLE,
    }
    taints = tuple(
        str(taint.get("key"))
        for taint in (node.get("spec") or {}).get("taints") or ()
        if taint.get("effect") in _TAINTS and taint.get("key") not in tolerated and None not in tolerated
    )
    fault, name = "", str(node["metadata"]["name"])
    if not is_ready(node):
        fault = NOT_READY
    elif (node.get("spec") or {}).get("unschedulable"):
        fault = "it is cordoned"
    elif taints:
        fault = f"no toleration for its taint {taints[0]}"
    hostname = str((node["metadata"].get("labels") or {}).get(_HOSTNAME) or name)
    return KubeNode(name=name, gpus=free, installed=installed, fault=fault, hostname=hostname, taints=taints, lost=lost)


def _count(amounts: Any, name: str) -> int:
    text = str((amounts or {}).get(name, "0"))
    return int(text) if text.isascii() and text.isdigit() else 0
