"""Changes between two runs: worse, better, new, gone. Runs are judged on their own; this only compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainmaster.cluster.health.compared_values import same
from trainmaster.core.health import ClusterHealth
from trainmaster.core.results import Finding, Verdict, error

Kind = Literal["worse", "new", "gone", "better", "changed"]
KINDS: tuple[Kind, ...] = ("worse", "new", "gone", "better", "changed")  # in reading order
# Between two runs, no longer measured is nearly as bad as failed.
_WEIGHT = {Verdict.PASS: 0, Verdict.SKIP: 1, Verdict.WARN: 2, Verdict.ERROR: 3, Verdict.FAIL: 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One (node, check, device) that changed. None on a side: not in that run."""

    kind: Kind
    node: str
    check: str
    device: str | None
    before: Verdict | None
    after: Verdict | None
    reason: str  # of the later run; of the earlier one for what is gone
    action: str | None = None


Key = tuple[str, str, str | None]


def compare(before: ClusterHealth, after: ClusterHealth) -> list[Change]:
    """Every change, the worst first."""
    old, new = _findings(before), _findings(after)
    # A node that did not answer has one row, not one for every check that it has answered in the other run.
    silent = {node.node for node in (*before.silent, *after.silent)}
    keys = [key for key in {**old, **new} if key[0] not in silent or key[1] == "answer" or (key in old and key in new)]
    changes = [change for key in keys if (change := _change(key, old.get(key), new.get(key)))]
    return sorted(changes, key=lambda c: (KINDS.index(c.kind), -_weight(c.after), c.node, c.check, c.device or ""))


def _change(key: Key, old: Finding | None, new: Finding | None) -> Change | None:
    kind: Kind
    moved = ""
    if old is None or new is None:
        kind = "new" if old is None else "gone"
    elif _weight(old.verdict) != _weight(new.verdict):
        kind = "worse" if _weight(new.verdict) > _weight(old.verdict) else "better"
    else:
        moved = _moved(key[1], old, new)
        if not moved:
            return None
        kind = "changed"
    finding = new or old
    assert finding is not None
    node, check, device = key
    return Change(
        kind=kind,
        node=node,
        check=check,
        device=device,
        before=old.verdict if old else None,
        after=new.verdict if new else None,
        reason=moved if kind == "changed" else finding.reason,
        action=finding.action if new else None,
    )


def _moved(check: str, old: Finding, new: Finding) -> str:
    """Compared values that differ now, such as the driver."""
    return "; ".join(
        f"{rule.words} {old.values[name]} → {new.values.get(name)}"
        for name in old.values
        if (rule := same(check, name)) and old.values[name] != new.values.get(name)
    )


def _findings(health: ClusterHealth) -> Mapping[Key, Finding]:
    """The worst finding of each (node, check, device), including silence and comparisons."""
    findings: dict[Key, Finding] = {}

    def keep(key: Key, finding: Finding) -> None:
        if key not in findings or _weight(finding.verdict) > _weight(findings[key].verdict):
            findings[key] = finding

    for node in health.nodes:
        for result in node.results:
            for finding in result.findings:
                keep((node.node, result.check, finding.device), finding)
    for silent in health.silent:
        keep((silent.node, "answer", None), error(silent.reason, action=silent.action))
    for result in health.cluster:
        for finding in result.findings:
            # Agreement concerns no node and comes and goes with the differences, so only differences count.
            if finding.device or finding.verdict not in (Verdict.PASS, Verdict.SKIP):
                keep((finding.device or "", result.check, str(finding.values.get("what") or "") or None), finding)
    return findings


def _weight(verdict: Verdict | None) -> int:
    return -1 if verdict is None else _WEIGHT[verdict]
