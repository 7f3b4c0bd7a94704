"""Health report as JUnit XML for CI systems: one suite per node, one case per check and device.

pass and warn are passes (a warning goes to its case's output), fail is a failure, error (not measured) is an error,
skip is skipped with its reason. A silent node is a suite with one error.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from trainmaster.core.results import Verdict
from trainmaster.report.health.view import CLUSTER, Row, View

_TAGS = {Verdict.FAIL: "failure", Verdict.ERROR: "error", Verdict.SKIP: "skipped"}


def render(view: View) -> str:
    """The complete file. The view's text holds nothing that XML cannot."""
    suites = [(node.name, node.rows) for node in view.nodes]
    if view.cluster:
        suites.append((CLUSTER, view.cluster))
    every = [row for _, rows in suites for row in rows]
    root = ET.Element("testsuites", {"name": "trainmaster", **_counts(every), "time": f"{view.took_s:.3f}"})
    for name, rows in suites:
        suite = ET.SubElement(root, "testsuite", {"name": name, **_counts(rows), "time": f"{_time(rows):.3f}"})
        if re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d.*", view.started_at):
            suite.set("timestamp", view.started_at[:19])
        properties = ET.SubElement(suite, "properties")
        ET.SubElement(properties, "property", name="overall", value=str(view.overall))
        for row in rows:
            suite.append(_case(name, row))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(suite: str, row: Row) -> ET.Element:
    name = f"{row.check}[{row.device}]" if row.device else row.check
    case = ET.Element("testcase", classname=f"trainmaster.{suite}", name=name, time=f"{row.took_s:.3f}")
    text = row.reason + (f"\nfollows from: {row.cause}" if row.cause else "")
    text += f"\nwhat to do: {row.action}" if row.action else ""
    tag = _TAGS.get(row.verdict)
    if tag is not None:
        inner = ET.SubElement(case, tag, message=row.reason)
        if row.verdict is not Verdict.SKIP:
            inner.set("type", str(row.verdict))
            inner.text = text
    else:
        ET.SubElement(case, "system-out").text = f"{row.verdict}: {text}"
    return case


def _counts(rows: Sequence[Row]) -> dict[str, str]:
    verdicts = [row.verdict for row in rows]
    return {
        "tests": str(len(rows)),
        "failures": str(verdicts.count(Verdict.FAIL)),
        "errors": str(verdicts.count(Verdict.ERROR)),
        "skipped": str(verdicts.count(Verdict.SKIP)),
    }


def _time(rows: Sequence[Row]) -> float:
    """A check's time, counted once for all its devices."""
    return sum({row.check: row.took_s for row in rows}.values())
