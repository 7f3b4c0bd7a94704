"""Values that nodes report about themselves and their devices, as a flat list for comparison."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainmaster.core.health import NodeHealth


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
    found = []
    for node in nodes:
        models = {
            finding.device: str(finding.values["model"])
            for result in node.results
            for finding in result.findings
            if result.check in ("gpu_count", "gpu_model") and finding.device and finding.values.get("model")
        }
        whole = " + ".join(sorted(set(models.values()))) or "no GPU"
        found += [
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
    return found


def _flat(values: Mapping[str, Any], head: str = "") -> Iterable[tuple[str, Any]]:
    """Every value with its name; a nested one is called `outer.inner`."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{head}{name}.")
        else:
            yield f"{head}{name}", value


def group(items: Iterable[Any], key: Any) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return found


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
