"""Content of an acceptance report: what all formats show, computed once from the suite's document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low
from typing import Any

from trainmaster.core.results import Overall, Verdict
from trainmaster.report.health import sanitise

SLOW_WARN, SLOW_FAIL = 0.10, 0.20  # as bench/accept/judge.py judges stragglers
_BAD = (Verdict.FAIL, Verdict.ERROR, Verdict.WARN)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """One part of the suite."""

    title: str
    overall: Overall | None  # None: left out
    note: str
    took_s: float | None
    resumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One figure against its baseline."""

    name: str
    measured: float
    unit: str
    baseline: float | None
    source: str  # of the baseline; or why there is none
    verdict: Verdict

    @property
    def share(self) -> float | None:
        return self.measured / self.baseline if self.baseline else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A finding that is not a pass."""

    part: str
    check: str
    verdict: Verdict
    where: str
    reason: str
    action: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One rank in one training: its own step time against the median of all ranks."""

    label: str
    over: float
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """Ranks of one node, by training."""

    name: str
    cells: Mapping[str, Sequence[Cell]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Bus bandwidth over message size."""

    title: str
    points: Sequence[tuple[float, float]]
    baseline: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The whole report."""

    overall: Overall
    title: str
    sentence: str
    started_at: str
    finished_at: str
    version: str
    resumed: Sequence[str]
    runs: int
    parts: Sequence[PartRow]
    measurements: Sequence[Measurement]
    problems: Sequence[Problem]
    not_measured: Sequence[str]
    nodes: Sequence[NodeRow]
    trainings: Sequence[str]
    curves: Sequence[Curve]
    versions: Mapping[str, str]
    recommendations: Sequence[str]


def build(document: Mapping[str, Any]) -> View:
    """The view of a suite's document. Names and reasons come from nodes: without characters that act on a reader."""
    document = sanitise.plain(document)
    parts, overall = document["parts"], Overall(document["overall"])
    trained = [part for part in parts if part["kind"] == "training" and _ran(part, "ranks")]
    problems = [problem for part in parts for problem in _problems(part)]
    resumed = [part["title"] for part in parts if part["name"] in document["resumed"]]
    where = document["on"] or document["host"]
    return View(
        overall=overall,
        title=f"Acceptance of {where}",
        sentence=_sentence(overall, parts, problems),
        started_at=document["started_at"],
        finished_at=document["finished_at"],
        version=document["trainmaster"],
        resumed=resumed,
        runs=len(document["runs"]),
        parts=[_part(part, document["resumed"]) for part in parts],
        measurements=[*(_throughput(part) for part in trained), *(row for part in parts for row in _bandwidth(part))],
        problems=[problem for problem in problems if problem.verdict is not Verdict.ERROR],
        not_measured=[
            *_not_measured(parts),
            *(_say(problem) for problem in problems if problem.verdict is Verdict.ERROR),
        ],
        nodes=_nodes(trained),
        trainings=[part["name"] for part in trained],
        curves=[curve for part in parts for curve in _curves(part)],
        versions=_versions(parts),
        recommendations=_recommendations(trained),
    )


def _recommendations(trained: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each sentence once; with the trainings that it is of, unless it is of all."""
    titles: dict[str, list[str]] = {}
    for part in trained:
        for line in part["document"]["recommendations"]:
            titles.setdefault(line, []).append(str(part["title"]))
    return [line if len(of) == len(trained) else f"{', '.join(of)}: {line}" for line, of in titles.items()]


def _ran(part: Mapping[str, Any], field: str) -> bool:
    return bool(part.get("document")) and field in part["document"]


def _part(part: Mapping[str, Any], resumed: Sequence[str]) -> PartRow:
    overall = Overall(part["overall"]) if part["overall"] is not None else None
    return PartRow(
        title=part["title"],
        overall=overall,
        note=_note(part),
        took_s=part.get("took_s"),
        resumed=part["name"] in resumed,
    )


def _note(part: Mapping[str, Any]) -> str:
    """Why a part was left out, or has no verdict, or failed."""
    note = str(part.get("skipped") or part.get("reason") or "").strip()
    return note.splitlines()[-1] if note else ""


def _sentence(overall: Overall, parts: Sequence[Mapping[str, Any]], problems: Sequence[Problem]) -> str:
    measured = [part for part in parts if part["overall"] in ("PASS", "WARN", "FAIL")]
    bad = [part["title"] for part in parts if part["overall"] in ("FAIL", "INCOMPLETE")]
    count = f"{len(measured)} of {len(parts)} parts were measured"
    if overall is Overall.PASS:
        return f"{count}, and every finding passed."
    if overall is Overall.WARN:
        return f"{count}; {len(problems)} findings are warnings."
    if overall is Overall.FAIL:
        first = next((problem for problem in problems if problem.verdict is Verdict.FAIL), None)
        why = f" First: {first.where + ': ' if first.where else ''}{first.reason}." if first else ""
        return f"{count}; not accepted: {', '.join(bad)}.{why}"
    unsure = [
        f"{part['title']}{f' ({note})' if (note := _note(part)) else ''}" for part in parts if part["title"] in bad
    ]
    return f"{count}; no verdict is possible on: {', '.join(unsure) or 'anything'}. Not measured is not a pass."


def _checks(part: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Check, node and finding of everything in a part's document."""
    document = part.get("document") or {}
    for result in [*document.get("checks", ()), *document.get("results", ()), *document.get("cluster", ())]:
        for finding in result.get("findings", ()):
            yield result["check"], "", finding
    for node in document.get("nodes", ()) if isinstance(document.get("nodes"), list) else ():
        for result in node.get("results", ()):
            for finding in result.get("findings", ()):
                yield result["check"], str(node.get("node") or ""), finding


def _problems(part: Mapping[str, Any]) -> list[Problem]:
    problems = []
    for check, node, finding in _checks(part):
        verdict = Verdict(finding["verdict"])
        if verdict in _BAD:
            host = str(finding.get("values", {}).get("host") or node)
            where = " ".join(filter(None, (host, finding.get("device") or "")))
            problems.append(
                Problem(
                    part=part["title"], check=check, verdict=verdict, where=where, reason=finding["reason"],
                    action=finding.get("action") or "",
                )
            )  # fmt: skip
    return sorted(problems, key=lambda problem: _BAD.index(problem.verdict))


def _say(problem: Problem) -> str:
    where = f" ({problem.where})" if problem.where else ""
    return f"{problem.part}, {problem.check}{where}: {problem.reason}"


def _not_measured(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    sentences = [f"{part['title']}: {part['skipped']}" for part in parts if part.get("skipped")]
    for part in parts:
        if only := [name for word, name in pairwise(part.get("words") or ()) if word == "--only"]:
            sentences.append(f"{part['title']}: all but {', '.join(only)} (--only)")
        silent = (part.get("document") or {}).get("silent")
        for node in silent if isinstance(silent, list) else ():
            sentences.append(f"{part['title']}: {node.get('node')} did not answer: {node.get('reason')}")
        if part["overall"] is not None and not part.get("document"):
            last = str(part.get("reason") or "").strip().splitlines()[-1:] or ["it printed nothing"]
            sentences.append(f"{part['title']}: ended with {part['exit_code']} and no result: {last[0]}")
        elif (
            part["overall"] == "INCOMPLETE"
            and _note(part)
            and not silent
            and not any(finding["verdict"] == Verdict.ERROR for _, _, finding in _checks(part))
        ):
            sentences.append(f"{part['title']}: {_note(part)}")
    return sentences


def _throughput(part: Mapping[str, Any]) -> Measurement:
    document = part["document"]
    verdict = next(
        (Verdict(finding["verdict"]) for check, _, finding in _checks(part) if check == "accept_throughput"),
        Verdict.ERROR,
    )
    baseline, floor = document["baseline"], document["options"].get("min_throughput")
    if floor is not None:
        value, source = float(floor), "floor of the user (--min-throughput)"
    elif baseline is not None:
        value, source = baseline["samples_per_s"], baseline["source"]
        source += "" if baseline["judges"] else "; shown, does not judge"
    else:
        value, source = None, "no baseline is known"
    name = f"{part['title']}, {document['precision']}, {document['world_size']}× {document['device']}"
    return Measurement(
        name=name, measured=document["throughput_samples_per_second"], unit="samples/s", baseline=value, source=source,
        verdict=verdict,
    )  # fmt: skip


def _bandwidth(part: Mapping[str, Any]) -> list[Measurement]:
    if part["kind"] != "bandwidth" or not _ran(part, "rows"):
        return []
    measurements = []
    for check, _, finding in _checks(part):
        values = finding.get("values") or {}
        if check != "collective_bandwidth" or not isinstance(values.get("busbw_gbps"), Mapping):
            continue
        size, rate = max(((int(size), rate) for size, rate in values["busbw_gbps"].items()), key=lambda pair: pair[0])
        compared = [baseline for baseline in values.get("compared") or () if isinstance(baseline, Mapping)]
        last = compared[-1] if compared else {}
        if last.get("size_bytes") in (None, size) or str(last.get("size_bytes")) not in values["busbw_gbps"]:
            at = size
        else:
            at, rate = int(last["size_bytes"]), values["busbw_gbps"][str(last["size_bytes"])]
        measurements.append(
            Measurement(
                name=f"{part['title']}: {values.get('collective')} at {at:,} bytes",
                measured=rate,
                unit="GB/s",
                baseline=last.get("baseline_gbps"),
                source=str(last.get("source") or finding["reason"]),
                verdict=Verdict(finding["verdict"]),
            )
        )
    return measurements


def _curves(part: Mapping[str, Any]) -> list[Curve]:
    if part["kind"] != "bandwidth" or not _ran(part, "rows"):
        return []
    rows: dict[str, list[tuple[float, float]]] = {}
    for row in part["document"]["rows"]:
        rows.setdefault(row["collective"], []).append((row["size_bytes"], row["busbw_gbps"]))
    compared: dict[str, list[tuple[float, float]]] = {}
    for _, _, finding in _checks(part):
        values = finding.get("values") or {}
        for baseline in values.get("compared") or ():
            if isinstance(baseline, Mapping) and baseline.get("baseline_gbps") and baseline.get("size_bytes"):
                compared.setdefault(str(values.get("collective")), []).append(
                    (baseline["size_bytes"], baseline["baseline_gbps"])
                )
    return [
        Curve(title=f"{part['title']}: {name}, GB/s", points=points, baseline=compared.get(name, ()))
        for name, points in rows.items()
        if len(points) > 1
    ]


def _nodes(trained: Sequence[Mapping[str, Any]]) -> list[NodeRow]:
    nodes: dict[str, dict[str, list[Cell]]] = {}
    for part in trained:
        ranks = part["document"]["ranks"]
        usual = median_low([rank["alone_s"]["p50"] for rank in ranks])
        for rank in ranks:
            over = rank["alone_s"]["p50"] / usual - 1
            verdict = Verdict.FAIL if over >= SLOW_FAIL else Verdict.WARN if over >= SLOW_WARN else Verdict.PASS
            name = (
                f"{rank['host']}"
                if part["document"]["nodes"] == len({r["host"] for r in ranks})
                else (f"{rank['host']} (node {rank['node']})")
            )
            cells = nodes.setdefault(name, {}).setdefault(part["name"], [])
            cells.append(Cell(label=f"rank {rank['rank']}", over=over, verdict=verdict))
    return [NodeRow(name=name, cells=cells) for name, cells in nodes.items()]


def _versions(parts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    versions: dict[str, str] = {}
    for part in parts:
        document = part.get("document") or {}
        if isinstance(document.get("versions"), Mapping):
            versions.update({str(name): str(value) for name, value in document["versions"].items()})
        for check, _, finding in _checks(part):
            kernel = (finding.get("values") or {}).get("kernel") if check == "kernel" else None
            if kernel:
                versions.setdefault("kernel", str(kernel))
    return dict(sorted(versions.items()))
