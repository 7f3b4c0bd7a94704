"""A cluster's health at the terminal: equal nodes as one row, the worst first, and only what is not a pass in words."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich.markup import escape
from rich.table import Table

from trainmaster.cli import _console
from trainmaster.core.health import ClusterHealth, NodeHealth
from trainmaster.core.results import Finding, Verdict

_MARK = {"pass": "[green]·[/]", "skip": "[dim]-[/]", "warn": "[yellow]w[/]", "error": "[magenta]E[/]",
         "fail": "[bold red]F[/]", "none": "[magenta]?[/]"}  # fmt: skip
_LEGEND = "[dim]· pass, - does not apply, w warn, E error, F fail, ? no answer[/]"
_WORST = (Verdict.FAIL, Verdict.ERROR, Verdict.WARN)
_OVERALL = ("FAIL", "INCOMPLETE", "WARN", "PASS")
_AS_OVERALL = {Verdict.FAIL: "FAIL", Verdict.ERROR: "INCOMPLETE", Verdict.WARN: "WARN"} | dict.fromkeys(
    (Verdict.PASS, Verdict.SKIP), "PASS"
)


def show(health: ClusterHealth) -> None:
    """The matrix and its legend, the findings, one line with the verdict."""
    _console.out.print(_matrix(health))
    _console.out.print(_LEGEND)
    findings = _findings(health)
    if findings.row_count:
        _console.out.print()
        _console.out.print(findings)
    _console.out.print(f"\n{_console.paint(str(health.overall))}  {escape(count_line(health))}")


def count_line(health: ClusterHealth) -> str:
    """`14 of 16 nodes answered, 12 PASS, 2 WARN; silent: n3, n7; in 4.1 s`."""
    verdicts = [_overall(health, node) for node in health.nodes]
    counts = [f"{verdicts.count(word)} {word}" for word in _OVERALL if word in verdicts]
    parts = [f"{len(health.nodes)} of {len(health.asked)} nodes answered", *counts]
    silent = f"; silent: {fold(node.node for node in health.silent)}" if health.silent else ""
    between = [str(result.check) for result in health.cluster if result.verdict in _WORST]
    differ = f"; between nodes: {', '.join(between)}" if between else ""
    return f"{', '.join(parts)}{silent}{differ}; in {health.took_s:.1f} s"


def _overall(health: ClusterHealth, node: NodeHealth) -> str:
    """Verdict of a node with what the comparison of nodes found on it: one that drifts is not a PASS."""
    words = [str(node.overall)]
    for result in health.cluster:
        words += [_AS_OVERALL[finding.verdict] for finding in result.findings if finding.device == node.node]
    return min(words, key=_OVERALL.index)


def fold(names: Iterable[str]) -> str:
    """`n01, n02, n03, n07` as `n[01-03,07]`: a thousand nodes fit on a line."""
    texts: dict[tuple[str, str], list[str]] = defaultdict(list)
    plain = []
    for name in names:
        match = re.fullmatch(r"(.*?)(\d{1,9})(\D*)", name)
        if match:
            texts[match[1], match[3]].append(match[2])
        else:
            plain.append(name)
    groups: dict[tuple[str, int, str], list[int]] = defaultdict(list)
    for (head, tail), digits in texts.items():
        padded = any(text.startswith("0") and text != "0" for text in digits)
        for text in digits:  # n1 … n12 are one range; 01 and 1 are two names
            groups[head, len(text) if padded else 0, tail].append(int(text))
    folded = []
    for (head, width, tail), numbers in groups.items():
        runs: list[tuple[int, int]] = []
        for number in sorted(numbers):
            if runs and number == runs[-1][1] + 1:
                runs[-1] = (runs[-1][0], number)
            else:
                runs.append((number, number))
        middle = ",".join(f"{a:0{width}}" if a == b else f"{a:0{width}}-{b:0{width}}" for a, b in runs)
        folded.append(f"{head}{middle if len(numbers) == 1 else f'[{middle}]'}{tail}")
    return ", ".join([*folded, *plain])


def _matrix(health: ClusterHealth) -> Table:
    """One row per kind of node, one mark per check."""
    checks = list(dict.fromkeys(name for node in health.nodes for name in node.planned))
    between: dict[str, list[str]] = defaultdict(list)
    for result in health.cluster:
        for finding in result.findings:
            if finding.device and finding.verdict in _WORST:
                between[finding.device].append(f"{finding.verdict} {result.check}")
    groups: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]] = defaultdict(list)
    for node in health.nodes:
        marks = tuple(_mark(node, check) for check in checks)
        words = [f"{mark} {check}" for check, mark in zip(checks, marks, strict=True) if mark not in ("pass", "skip")]
        groups[_overall(health, node), marks, tuple(words + sorted(set(between[node.node])))].append(node.node)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("nodes", overflow="fold")
    table.add_column("", justify="right")
    table.add_column("verdict")
    table.add_column(f"{len(checks)} checks", overflow="fold")
    table.add_column("not pass", overflow="fold")
    for silent in health.silent:
        table.add_row(escape(silent.node), "1", "[magenta]silent[/]", _MARK["none"] * len(checks), "no answer")
    for (overall, row, not_pass), names in sorted(groups.items(), key=_rank):
        line = "".join(_MARK[mark] for mark in row)
        table.add_row(escape(fold(names)), str(len(names)), _console.paint(overall), line, _paint_words(not_pass))
    return table


def _rank(group: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], list[str]]) -> tuple[int, int, int, str]:
    (overall, _, words), names = group
    return _OVERALL.index(overall), -len(words), len(names), names[0]


def _mark(node: NodeHealth, check: str) -> str:
    return next((str(result.verdict) for result in node.results if result.check == check), "none")


def _paint_words(words: Sequence[str]) -> str:
    painted = (f"{_console.paint(word.split()[0])} {escape(word.partition(' ')[2])}" for word in words)
    return ", ".join(painted)


def _findings(health: ClusterHealth) -> Table:
    """What is not a pass, each kind once, with the nodes that have it."""
    by_finding: dict[tuple[Verdict, str, str], dict[str, list[str]]] = defaultdict(dict)

    def keep(check: str, finding: Finding, where: str) -> None:
        if finding.verdict in _WORST:
            by_finding[finding.verdict, finding.reason, finding.action or ""].setdefault(check, []).append(where)

    for node in health.nodes:
        for result in node.results:
            for finding in result.findings:
                keep(result.check, finding, " ".join(filter(None, (node.node, finding.device))))
    for result in health.cluster:
        for finding in result.findings:
            keep(result.check, finding, finding.device or "between nodes")
    for silent in health.silent:
        by_finding[Verdict.ERROR, silent.reason, silent.action].setdefault("answer", []).append(silent.node)
    grouped: dict[tuple[Verdict, str, str, str], list[str]] = {}
    for (verdict, reason, action), checks in by_finding.items():
        # Several checks that say the same of the same places have one cause, and are one row.
        for places in dict.fromkeys(map(tuple, checks.values())):
            names = ", ".join(check for check, where in checks.items() if tuple(where) == places)
            grouped[verdict, names, reason, action] = list(places)
    table = _console.table("verdict", "check", "where", "reason", "what to do", fold=True)
    for (verdict, check, reason, action), where in sorted(grouped.items(), key=lambda g: (_WORST.index(g[0][0]), g[0])):
        table.add_row(_console.paint(str(verdict)), check, escape(_where(where)), escape(reason), escape(action))
    return table


def _where(places: Sequence[str]) -> str:
    """Nodes folded; of devices, each node's together."""
    devices: dict[str, list[str]] = defaultdict(list)
    for place in places:
        node, _, device = place.partition(" ") if place != "between nodes" else (place, "", "")
        devices[device].append(node)
    return ", ".join(f"{fold(nodes)} {device}".rstrip() for device, nodes in devices.items())
