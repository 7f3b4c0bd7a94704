"""kubectl drains and resumes nodes of Kubernetes."""

from __future__ import annotations

import json

from trainmaster.core.errors import TargetError
from trainmaster.targets._drain import Command, DrainState, RunCommand
from trainmaster.targets.kubernetes.names import HEALTH_TAINT

WHY = "trainmaster/reason"  # annotation: a label value cannot hold a sentence


class KubernetesScheduler:
    """kubectl. Cordoned, tainted and labelled; pods that run stay until they end."""

    run: RunCommand | None = None

    def drain(self, node: str, reason: str) -> list[Command]:
        return [
            # The reason first: a drained node without it would look like somebody else's.
            ("kubectl", "annotate", "node", node, f"{WHY}={reason}", "--overwrite"),
            ("kubectl", "cordon", node),
            ("kubectl", "taint", "node", node, f"{HEALTH_TAINT}=fail:NoSchedule", "--overwrite"),
            ("kubectl", "label", "node", node, f"{HEALTH_TAINT}=fail", "--overwrite"),
        ]

    def resume(self, node: str) -> list[Command]:
        return [
            ("kubectl", "taint", "node", node, f"{HEALTH_TAINT}:NoSchedule-"),
            ("kubectl", "label", "node", node, f"{HEALTH_TAINT}-"),
            ("kubectl", "uncordon", node),
            ("kubectl", "annotate", "node", node, f"{WHY}-"),
        ]

    def query(self, node: str) -> Command:
        return ("kubectl", "get", "node", node, "--output=json")

    def parse(self, node: str, answer: str) -> DrainState:
        try:
            document = json.loads(answer)
            metadata, spec = document["metadata"], document["spec"]
            if metadata["name"] != node:
                raise TargetError(f"kubectl describes {metadata['name']!r:.80} instead of {node}")
            reason = (metadata.get("annotations") or {}).get(WHY, "")
            return DrainState(out=spec.get("unschedulable") is True, reason=str(reason))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise TargetError(f"kubectl does not describe the node {node}: {answer.strip()[:200]!r}") from None
