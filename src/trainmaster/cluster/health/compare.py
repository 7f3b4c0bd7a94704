"""Comparison of nodes: configuration drift, performance outliers among peers, and differing digests.

Pure: reads the values in the nodes' findings and gives one result per comparison. Which values are compared, and with
what tolerance, the checks state (COMPARES). A finding's device names the node. A majority is more than half of
the nodes that reported the value; without one the difference is reported and no node is blamed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from trainmaster.checks.comparison import EqualValue
from trainmaster.cluster.health.compared_values import SOFTWARE, peer, same
from trainmaster.cluster.health.peers import peers
from trainmaster.cluster.health.reported_values import COUNTS, Fact, collect, group, is_number
from trainmaster.core.health import NodeHealth
from trainmaster.core.results import CheckResult, Finding, Verdict, error, fail, ok, skip, warn

NAMES = ("drift", "peers", "digests")
SHOWN = 8  # names written out in a reason
_ORDER = (Verdict.FAIL, Verdict.ERROR, Verdict.WARN)


def compare(nodes: Sequence[NodeHealth]) -> tuple[CheckResult, ...]:
    """Every comparison between these nodes, one result each."""
    nodes = sorted(nodes, key=lambda node: node.node)  # the order of answers must not change the verdict
    facts = collect(nodes)
    findings = {"drift": drift(nodes, facts), "peers": peers(facts), "digests": digests(facts)}
    return tuple(CheckResult.of(name, findings[name]) for name in NAMES)


# --- drift: nodes that should be alike and are not -----------------------------------------------------------------


def drift(nodes: Sequence[NodeHealth], facts: Sequence[Fact]) -> list[Finding]:
    """Each node that differs from the majority, by name; agreement is one finding."""
    if len(nodes) < 2:
        return [skip("there is nothing to compare", proof=f"{len(nodes)} node answered")]
    findings, agreed = [*_one_machine_twice(facts), *_skipped_alone(nodes), *find_domains(facts)], {}
    findings += find_unreported(nodes, facts)
    for (name, check, kind), alike in group(facts, lambda fact: (fact.name, fact.check, _alike(fact))).items():
        rule = same(check, name)
        values = _per_node(alike, rule) if rule else {}
        if rule is None or len(values) < 2:
            continue
        groups = _groups(values, rule.tolerance)
        if len(groups) == 1:
            agreed[rule.words] = _show(groups[0][0], rule)
            continue
        total, (common, having) = len(values), groups[0]
        # Among nodes of one kind the kind is named: 3 of 16 nodes may be all that have this GPU.
        among = f"nodes with {kind}" if rule.alike else "nodes"
        if len(having) * 2 <= total:
            sides = "; ".join(f"{_show(value, rule)} on {_list(names)}" for value, names in groups)
            action = f"decide which {rule.words} is right and bring all nodes to it"
            reason = f"{rule.words} differs and none has a majority: {sides}"
            findings.append(warn(reason, action=action, what=name, total=total))
            continue
        for value, names in groups[1:]:
            for node in names:
                reason = f"{rule.words} {_show(value, rule)}{_odd_devices(alike, node, common, rule)}; "
                reason += f"{len(having)} of {total} {among} have {_show(common, rule)}"
                say = fail if rule.judge(value, common) is Verdict.FAIL else warn
                finding = say(
                    reason,
                    action=rule.action,
                    device=node,
                    what=name,
                    value=_plain(value),
                    majority=_plain(common),
                    having=len(having),
                    total=total,
                )
                findings.append(finding)
    if findings:
        return _distinct(findings)
    if not agreed:
        return [skip("there is nothing to compare", proof="no two nodes reported a comparable value")]
    return [ok(f"{len(nodes)} nodes agree in {', '.join(sorted(agreed))}", nodes=len(nodes), agreed=agreed)]


def _alike(fact: Fact) -> str:
    rule = same(fact.check, fact.name)
    return fact.kind if rule is not None and rule.alike else ""


def _one_machine_twice(facts: Sequence[Fact]) -> list[Finding]:
    """Nodes that report the same GPU: one machine under several names, or copies of one capture."""
    uuids = [fact for fact in facts if fact.check == "gpu_count" and fact.name == "uuid" and fact.value]
    shared: dict[tuple[str, ...], str] = {}
    for uuid, same_uuid in group(uuids, lambda fact: str(fact.value)).items():
        names = tuple(sorted({fact.node for fact in same_uuid}))
        if len(names) > 1:
            shared.setdefault(names, uuid)
    action = "list each machine once; if these are two, capture them again"
    return [
        warn(f"{_list(names)} report the same GPU {uuid}: they are one machine", action=action, what="uuid")
        for names, uuid in shared.items()
    ]


def _skipped_alone(nodes: Sequence[NodeHealth]) -> list[Finding]:
    """Checks that apply on some nodes and not on others. Checks of COUNTS are compared as numbers instead."""
    findings = []
    for check in sorted({result.check for node in nodes for result in node.results} - set(COUNTS)):
        results = {node.node: r for node in nodes for r in node.results if r.check == check}
        skipped = [name for name, result in results.items() if result.verdict is Verdict.SKIP]
        measured = [name for name, result in results.items() if result.verdict in (Verdict.PASS, Verdict.WARN)]
        if not skipped or len(measured) * 2 < len(results):
            continue
        action = "find the missing device; if the node is meant to differ, check it separately"
        if len(measured) * 2 == len(results):
            reason = f"{check} applies on {_list(measured)} and not on {_list(skipped)}; none has a majority"
            findings.append(warn(reason, action=action, what=check, total=len(results)))
            continue
        for name in skipped:
            reason = f"{check} does not apply here ({results[name].findings[0].reason}), "
            reason += f"while {len(measured)} of {len(results)} nodes have it"
            findings.append(
                warn(reason, action=action, device=name, what=check, having=len(measured), total=len(results))
            )
    return findings


def _per_node(alike: Sequence[Fact], rule: EqualValue) -> dict[str, Hashable]:
    """One comparable value per node: the value shared by its devices, or the set of their values."""
    values_by_node: dict[str, Hashable] = {}
    for node, facts in group(alike, lambda fact: fact.node).items():
        values = {_hashable(fact.value) for fact in facts if fact.value is not None or rule.none}
        if values:
            values_by_node[str(node)] = next(iter(values)) if len(values) == 1 else frozenset(values)
    return values_by_node


def _groups(values: Mapping[str, Hashable], tolerance: float) -> list[tuple[Hashable, list[str]]]:
    """Nodes by value, the largest group first. Numbers no further apart than the tolerance are one value."""
    groups: dict[Hashable, list[str]] = defaultdict(list)
    last: float | None = None
    key: Hashable = None
    for node, value in sorted(values.items(), key=lambda item: (not is_number(item[1]), _order(item[1]), item[0])):
        near = tolerance and is_number(value) and last is not None and abs(value - last) <= tolerance * abs(last)  # type: ignore[operator]
        if not near:
            key = value
        last = float(value) if is_number(value) else None  # type: ignore[arg-type]
        groups[key].append(node)
    return sorted(groups.items(), key=lambda group: (-len(group[1]), _order(group[0])))


def _odd_devices(alike: Sequence[Fact], node: str, common: Hashable, rule: EqualValue) -> str:
    """` on gpu3`, where only some of the node's devices are different."""
    of_node = [fact for fact in alike if fact.node == node and fact.device]
    odd = [fact for fact in of_node if _hashable(fact.value) != common]
    if not odd or len(odd) == len(of_node):
        return ""
    return f" ({', '.join(f'{fact.device}: {_show(_hashable(fact.value), rule)}' for fact in odd[:SHOWN])})"


# --- digests: equal chips under equal software compute equal bits --------------------------------------------------


def digests(facts: Sequence[Fact]) -> list[Finding]:
    """Each GPU whose results differ in any bit from those of equal GPUs."""
    software = {
        node: tuple(sorted({f"{fact.name} {fact.value}" for fact in of_node if fact.name in SOFTWARE}))
        for node, of_node in group(facts, lambda fact: fact.node).items()
    }
    digested = [(fact, fact.name, str(fact.value)) for fact in facts if "digest" in fact.name and fact.value]
    findings, compared = [], 0
    alike = group(digested, lambda item: (item[0].check, item[1], item[0].kind, software[item[0].node]))
    for (_check, what, kind, _software), items in alike.items():
        if len(items) < 2:
            continue
        compared += len(items)
        by_digest = sorted(group(items, lambda item: item[2]).values(), key=len, reverse=True)
        majority = by_digest[0]
        if len(majority) == len(items):
            continue
        action = "take the node out and run the corruption test on this GPU alone; if it repeats, replace the GPU"
        if len(majority) * 2 <= len(items):
            sides = "; ".join(_list([item[0].where for item in side]) for side in by_digest)
            reason = f"{what}: equal GPUs ({kind}) give different bits and none has a majority: {sides}"
            findings.append(fail(reason, action="run the corruption test on each of these GPUs alone", what=what))
            continue
        for fact, _, digest in (item for side in by_digest[1:] for item in side):
            reason = f"{fact.device or 'it'} gives other bits in {what} than {len(majority)} of {len(items)} equal GPUs"
            findings.append(fail(reason, action=action, device=fact.node, what=what, on=fact.device, digest=digest))
    if findings:
        return findings
    if not compared:
        return [skip("no digests to compare; level 2 computes them", proof="no two equal GPUs reported a digest")]
    return [ok(f"{compared} digests of equal GPUs are the same", compared=compared)]


# --- small things --------------------------------------------------------------------------------------------------


def _distinct(findings: list[Finding]) -> list[Finding]:
    """Findings without duplicates (two checks may report the same value), the worst first."""
    seen: dict[tuple[str | None, str], Finding] = {}
    for finding in findings:
        seen.setdefault((finding.device, finding.reason), finding)
    return sorted(seen.values(), key=lambda finding: _ORDER.index(finding.verdict))


def _hashable(value: object) -> Hashable:
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _hashable(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(item) for item in value)
    return value if isinstance(value, Hashable) else str(value)


def _order(value: object) -> tuple[float, str]:
    return (float(value), "") if is_number(value) else (0.0, repr(_plain(value)))  # type: ignore[arg-type]


def _plain(value: object) -> object:
    """A value for JSON: sets become sorted lists."""
    return sorted(value, key=repr) if isinstance(value, frozenset) else value


def _show(value: object, rule: EqualValue) -> str:
    if isinstance(value, (frozenset, tuple)):
        return " and ".join(_show(item, rule) for item in (sorted(value, key=repr)))
    if value is None:
        return rule.none or "none"
    if isinstance(value, (int, float)) and rule.unit == "GiB" and 0 < value < 1:
        return f"{value * 1024:g} MiB" if value * 1024 >= 1 else f"{value * 1024**2:g} KiB"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text} {rule.unit}".rstrip()


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


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
            telling = [node for node in having if kinds[node] == kind]
            lacking = sorted(
                node
                for node, of_kind in kinds.items()
                if of_kind == kind and node not in having and (node, check) in passed
            )
            if len(telling) <= len(lacking):
                continue
            reason = (
                f"{check} reports no {words}, and {len(telling)} of {len(telling) + len(lacking)} equal nodes report it"
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
