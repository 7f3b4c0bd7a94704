"""Verdict of an acceptance run from what its ranks printed and how they ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainmaster.bench.accept import baselines, judge, results
from trainmaster.bench.accept.options import Options
from trainmaster.cluster.collectives.launch import Outcome, last_line
from trainmaster.core import schema
from trainmaster.core.errors import NodeUnavailable
from trainmaster.core.results import CheckResult, Finding, error, exit_code, judge_overall
from trainmaster.targets import ClusterJobEnd, Result


def judge_job(options: Options, end: ClusterJobEnd, *, world: int) -> dict[str, Any]:
    """Rank 0's document; without one, how the job ended. A rank that failed is a FAIL; machines that never ran or were
    lost say nothing."""
    documents = find_documents(end.out)
    if len(documents) == 1 and is_whole(documents[0], world=world, code=end.code, highest=end.highest):
        return compare_golden(documents[0], options)
    if documents:
        finding = not_whole(documents[0], world=world)
    elif end.failed_rank is not None:
        finding = judge.judge_end(end.note, device=end.failed_rank)
    else:
        finding = error(end.note, action=end.action)
    checks = [CheckResult.of("accept_ranks", [finding])]
    return results.build_lost(options, checks, world=world)


def judge_outcomes(
    options: Options, names: Sequence[str], outcomes: Sequence[Outcome], *, per_node: int
) -> dict[str, Any]:
    """Rank 0's document; without one, the ranks that ended badly by name."""
    first = outcomes[0][0] if isinstance(outcomes[0], Sequence) else None
    documents = find_documents(first.out) if first is not None else []
    document = documents[0] if len(documents) == 1 else None
    world = len(names) * per_node
    if document is not None and first is not None and is_whole(document, world=world, code=first.code):
        return compare_golden(document, options)
    findings = [] if document is None else [not_whole(document, world=world)]
    for number, outcome in enumerate(outcomes):
        if not isinstance(outcome, Sequence):
            reason = outcome.reason if isinstance(outcome, NodeUnavailable) else "cut off after rank 0 had ended"
            findings.append(error(f"{names[number]}: {reason}", action="log in and look at it", device=names[number]))
            continue
        for local, result in enumerate(outcome):
            if result.code != 0 and not judge_peer(result):
                rank = number * per_node + local
                why = f"rank {rank} on {names[number]} ended with {result.code}: {last_line(result.err)}"
                findings.append(judge.judge_end(why, device=f"rank{rank}"))
    checks = [CheckResult.of("accept_ranks", findings)]
    return results.build_lost(options, checks, world=world)


def is_whole(document: Mapping[str, Any], *, world: int, code: int | None, highest: bool = False) -> bool:
    """Whether the document is of all ranks, and its program ended as it says.

    `highest`: the code is the highest of all ranks. Where the verdict is no 0, the first rank that ends with it has
    srun kill the others, whose signal counts for more; a verdict of 0 needs 0 of all.
    """
    stated = document.get("exit_code")
    expected = stated if highest and stated and code else code
    return (document.get("world_size"), stated) == (world, expected)


def not_whole(document: Mapping[str, Any], *, world: int) -> Finding:
    """A result that counts other ranks than were started, or whose program ended otherwise than it says."""
    result = f"{document.get('overall')!r:.40} of {document.get('world_size')!r:.40} ranks"
    reason = f"{world} ranks were started, and the result is {result}; its program ended otherwise, or it is of fewer"
    return error(reason, action="see which ranks took part: `ranks` in results.json; run again")


def judge_peer(result: Result) -> bool:
    """Whether a rank ended because another one did."""
    return any(word in result.err for word in ("Connection closed by peer", "Connection reset by peer"))


def find_documents(text: str) -> list[dict[str, Any]]:
    """Documents among the lines that ranks printed: one, of rank 0, where they have met."""
    return [document for line in text.splitlines() if (document := _parse(line)) is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        document = json.loads(line) if line.startswith("{") else None
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and "overall" in document and "checks" in document else None


def incomplete(options: Options, missing: Mapping[str, tuple[str, str]], *, world: int) -> dict[str, Any]:
    """The document of a run that could not begin."""
    findings = tuple(error(f"{name}: {why}", action=act, device=name) for name, (why, act) in missing.items())
    checks = [CheckResult.of("accept_ranks", findings)]
    return results.build_lost(options, checks, world=world)


def compare_golden(document: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """The document with the verdict of this site's golden run: nodes do not have its file."""
    if options.baselines is None or "ranks" not in document:
        return dict(document)
    now = baselines.figures_of(document, name="this run")
    golden = baselines.newest(baselines.load_golden(Path(options.baselines)), now.key)
    if golden is None:
        return dict(document)
    checks = {plain["check"]: schema.build(CheckResult, plain) for plain in document["checks"]}
    hosts = {rank["gpu"] or f"rank{rank['rank']}": (f"rank{rank['rank']}", rank["host"]) for rank in document["ranks"]}
    findings = judge.judge_golden(golden, now, hosts)
    checks["accept_regression"] = CheckResult.of("accept_regression", findings)
    shipped = (document["baseline"] or {}).get("judges", False)
    if not shipped and options.min_throughput is None:
        finding = judge.against_golden(golden, now.samples_per_s, {})
        checks["accept_throughput"] = CheckResult.of("accept_throughput", [finding])
    overall = judge_overall(list(checks.values()), planned=judge.CHECKS)
    ours = {"samples_per_s": golden.samples_per_s, "source": golden.source, "judges": True}
    return {
        **document,
        "overall": str(overall),
        "exit_code": exit_code(overall),
        "checks": [schema.to_plain(result) for result in checks.values()],
        "baseline": document["baseline"] if shipped else ours,
    }
