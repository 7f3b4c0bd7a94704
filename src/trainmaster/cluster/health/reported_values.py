"""Values that nodes report about themselves and their devices, as a flat list for comparison."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.core.health import NodeHealth
from trainmaster.core.results import CheckResult, Verdict

# Checks that skip on a node without such devices, and the value that states their number. A skip is a number, 0: a node
# that lost all of them must not be left out of the comparison.
COUNTS = {"gpu_count": "listed", "ib_ports": "ports", "efa": "device_count"}
_ADDRESS = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One value reported by a node about itself or one of its devices."""

    node: str
    check: str
    device: str | None
    name: str
    value: Any
    kind: str  # the GPU model concerned, or all models of the node

    @property
    def where(self) -> str:
        return f"{self.node} {self.device}" if self.device else self.node


def collect(nodes: Iterable[NodeHealth]) -> list[Fact]:
    """Every value of every finding, and the number of devices of each kind on each node."""
    facts = []
    for node in nodes:
        models = {
            finding.device: str(finding.values["model"])
            for result in node.results
            for finding in result.findings
            if result.check in ("gpu_count", "gpu_model") and finding.device and finding.values.get("model")
        }
        whole = " + ".join(sorted(set(models.values()))) or "no GPU"
        facts += [
            Fact(
                node=node.node,
                check=result.check,
                device=finding.device,
                name=name,
                value=value,
                kind=models.get(finding.device or "", whole),
            )
            for result in node.results
            for finding in result.findings
            for name, value in _flat(finding.values)
        ]
        facts += [
            Fact(node=node.node, check=result.check, device=None, name=COUNTS[result.check], value=count, kind=whole)
            for result in node.results
            if result.check in COUNTS and (count := _count_devices(result)) is not None
        ]
    return facts


def _count_devices(result: CheckResult) -> int | None:
    """Number of devices where no finding states it; None where it is stated or unknown."""
    if result.verdict is Verdict.SKIP:
        return 0  # the check does not apply: the node has no such device
    name = COUNTS[result.check]
    if any(name in finding.values for finding in result.findings):
        return None
    if result.check == "efa":
        listed = [finding.values["devices"] for finding in result.findings if "devices" in finding.values]
        return len(listed[0]) if listed else None
    # An address of the PCI bus is an adapter without a port.
    ports = {finding.device for finding in result.findings if finding.device and not _ADDRESS.match(finding.device)}
    return len(ports) if ports and result.check == "ib_ports" else None


def _flat(values: Mapping[str, Any], head: str = "") -> Iterable[tuple[str, Any]]:
    """Every value with its name; a nested one is called `outer.inner`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{head}{name}.")
        else:
            yield f"{head}{name}", value


def group(items: Iterable[Any], key: Any) -> dict[Any, list[Any]]:
    """Items by key, in their order."""
    groups: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
