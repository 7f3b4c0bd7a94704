"""Nodes that lack what equal nodes have: a value that a check reports elsewhere, or a place in the NVLink domain."""

from __future__ import annotations

from collections.abc import Sequence

from trainmaster.cluster.health.compared_values import peer, same
from trainmaster.cluster.health.reported_values import Fact, group
from trainmaster.core.health import NodeHealth
from trainmaster.core.results import Finding, Verdict, error, fail, warn


def find_unreported(nodes: Sequence[NodeHealth], facts: Sequence[Fact]) -> list[Finding]:
    """Nodes whose check passed without a value that more than half of the equal nodes report."""
    kinds = {name: _kind(of_node) for name, of_node in group(facts, lambda fact: fact.node).items()}
    passed = {(node.node, result.check) for node in nodes for result in node.results if result.verdict is Verdict.PASS}
    findings = []
    for (name, check), alike in group(facts, lambda fact: (fact.name, fact.check)).items():
        rule = same(check, name)
        number = peer(check, name)
        if (rule is None and number is None) or (rule is not None and rule.none):
            continue  # None is a value there
        words = rule.words if rule is not None else f"{number.unit} {number.words}" if number is not None else name
        having = {fact.node for fact in alike if fact.value is not None}
        for kind in sorted({kinds[node] for node in having}):
            peers = [node for node in having if kinds[node] == kind]
            lacking = sorted(
                node
                for node, of_kind in kinds.items()
                if of_kind == kind and node not in having and (node, check) in passed
            )
            if len(peers) <= len(lacking):
                continue
            reason = (
                f"{check} reports no {words}, and {len(peers)} of {len(peers) + len(lacking)} equal nodes report it"
            )
            action = f"run {check} on this node alone and compare what its tool prints with another node"
            findings += [error(reason, action=action, device=node, what=name) for node in lacking]
    return findings


def find_domains(facts: Sequence[Fact]) -> list[Finding]:
    """Nodes outside the NVLink domain of their peers. Domains of several nodes each are racks, and no fault."""
    fabric_facts = [fact for fact in facts if fact.check == "gpu_fabric" and fact.name in ("cluster_uuid", "clique")]
    domains = {
        node: (_only(node_facts, "cluster_uuid"), _only(node_facts, "clique"))
        for node, node_facts in group(fabric_facts, lambda fact: fact.node).items()
    }
    kinds = {fact.node: fact.kind for fact in fabric_facts}
    findings = []
    for kind in sorted(set(kinds.values())):
        by_domain = group(
            [node for node, domain in domains.items() if kinds[node] == kind and domain[0]], domains.__getitem__
        )
        total = sum(map(len, by_domain.values()))
        joined = sum(len(members) for (uuid, _), members in by_domain.items() if uuid.strip("0-"))
        for (uuid, clique), members in by_domain.items():
            if not uuid.strip("0-") and joined * 2 > total:
                reason = f"its GPUs are in no NVLink domain, and {joined} of {total} equal nodes are in one"
                action = "restart the fabric manager and IMEX of the rack; look at its NVLink switches"
                findings += [fail(reason, action=action, device=node, what="cluster_uuid") for node in members]
            elif uuid.strip("0-") and len(members) == 1 and total > 2 and len(by_domain) < total:
                reason = f"it is alone in its NVLink domain ({uuid}, clique {clique}) among {total} equal nodes"
                action = "if it stands in the rack of the others, reset its GPUs; if not, check each rack separately"
                findings.append(warn(reason, action=action, device=members[0], what="cluster_uuid"))
    return findings


def _kind(facts: Sequence[Fact]) -> str:
    """All GPU models of a node."""
    return " + ".join(sorted({str(fact.value) for fact in facts if fact.name == "model"})) or "no GPU"


def _only(facts: Sequence[Fact], name: str) -> str:
    """The value that all GPUs of a node share; empty where they differ, which is a fault of the node itself."""
    values = {str(fact.value) for fact in facts if fact.name == name and fact.value}
    return values.pop() if len(values) == 1 else ""
