"""Health report in Prometheus text format, for node_exporter's textfile collector.

`trainmaster_check_verdict > 0` selects every fault: 0 pass, 1 warn, 2 fail, 3 error (not measured), -1 does not apply.
Numbers of findings are `trainmaster_check_value`, by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from trainmaster.core.results import Overall, Verdict
from trainmaster.report.health import sanitise
from trainmaster.report.health.view import CLUSTER, WEIGHT, View

VERDICTS = {Verdict.SKIP: -1, Verdict.PASS: 0, Verdict.WARN: 1, Verdict.FAIL: 2, Verdict.ERROR: 3}
OVERALLS = {Overall.PASS: 0, Overall.WARN: 1, Overall.FAIL: 2, Overall.INCOMPLETE: 3}

Labels = tuple[tuple[str, str], ...]


def render(view: View) -> str:
    """The complete file. Every series appears once: the collector refuses duplicates."""
    return "".join(_families(view))


def _families(view: View) -> Iterator[str]:
    coverage = view.coverage
    yield _family(
        "trainmaster_overall",
        "1 for the verdict of the whole check, 0 for the others.",
        {(("overall", str(word)),): float(word is view.overall) for word in Overall},
    )
    yield _family(
        "trainmaster_nodes",
        "Nodes that were asked, that answered, and that gave no answer.",
        {
            (("state", "asked"),): float(coverage.nodes_asked),
            (("state", "heard"),): float(coverage.nodes_heard),
            (("state", "silent"),): float(coverage.nodes_asked - coverage.nodes_heard),
        },
    )
    overall: dict[Labels, float] = {}
    for node in view.nodes:
        key = (("node", node.name),)
        overall[key] = max(overall.get(key, 0.0), float(OVERALLS[node.overall]))
    yield _family("trainmaster_node_overall", "0 PASS, 1 WARN, 2 FAIL, 3 INCOMPLETE (not all was measured).", overall)
    worst: dict[Labels, Verdict] = {}
    values: dict[Labels, float] = {}
    seconds: dict[Labels, float] = {}
    for row in view.rows:
        where = (("node", row.node or CLUSTER), ("check", row.check))
        labels = (*where, ("device", row.device or ""))
        worst[labels] = max(worst.get(labels, row.verdict), row.verdict, key=WEIGHT.__getitem__)
        seconds[where] = row.took_s
        for name, value in row.values.items():
            measured = sanitise.number(value)
            if measured is not None:
                values[(*labels, ("name", name))] = measured
    verdicts = {labels: float(VERDICTS[verdict]) for labels, verdict in worst.items()}
    yield _family(
        "trainmaster_check_verdict", "-1 skip, 0 pass, 1 warn, 2 fail, 3 error (could not be measured).", verdicts
    )
    yield _family("trainmaster_check_value", "Each number that a finding holds, by its name.", values)
    yield _family("trainmaster_check_seconds", "How long the check took on the node.", seconds)
    yield _family("trainmaster_run_seconds", "How long the whole check took.", {(): view.took_s})
    began = _seconds(view.started_at)
    if began is not None:
        yield _family("trainmaster_run_timestamp_seconds", "When the check began, in Unix time.", {(): began})


def _family(name: str, text: str, series: Mapping[Labels, float]) -> str:
    if not series:
        return ""
    lines = [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
    for labels, value in series.items():
        inner = ",".join(f'{key}="{_escape(word)}"' for key, word in labels)
        lines.append(f"{name}{{{inner}}} {value!r}" if inner else f"{name} {value!r}")
    return "\n".join(lines) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _seconds(text: str) -> float | None:
    try:
        when = datetime.fromisoformat(text)
        # Without an offset the time is ambiguous.
        return when.timestamp() if when.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None
