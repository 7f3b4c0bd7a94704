"""Evidence bundle of a run: its findings and everything they rest on, so that it can be judged again.

    health.json         the whole ClusterHealth, with its times
    verdict.json        the judged part alone: the same document without times (`judged`)
    nodes/NAME/         the capture of that node (node/recorded.py)
    collectives/        output of each rank, where collectives ran

Judging a bundle again under the same version and expectations gives verdict.json byte for byte: a finding depends only
on the captured answers, so only the times of the two runs differ.

A bundle is not taken at its word. Each check of the level that the run did not leave out is judged, listed or not; a
capture without its node, a node listed twice, and a health.json that is not the one of verdict.json are errors: the
run is INCOMPLETE. An edit of all of them alike leaves a consistent bundle: only its digest, compared with the one that
`check` printed and recorded in the history at the time of the run, shows it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmaster import __version__, checks
from trainmaster.checks.document import clean
from trainmaster.checks.expectations import COLLECTIVES, unmeasured
from trainmaster.checks.expectations import NAMES as UNMEASURED
from trainmaster.cluster.collectives import rejudge_collectives
from trainmaster.cluster.health import compare
from trainmaster.core.errors import SpecError, UsageError
from trainmaster.core.expect import Expect
from trainmaster.core.files import write_whole
from trainmaster.core.health import ClusterHealth, NodeHealth, Silent
from trainmaster.core.results import CheckResult, Verdict, error
from trainmaster.core.schema import build
from trainmaster.node.recorded import RecordedHost

HEALTH = "health.json"
VERDICT = "verdict.json"
BUNDLE = "bundle"  # result for a bundle that is not whole
_DIGESTED = (HEALTH, VERDICT, "nodes", "collectives")  # reports are written again from these


def capture_folder(bundle: Path, node: str) -> Path:
    """Folder of a node's capture. The node's name is made safe for a path."""
    return bundle / "nodes" / (re.sub(r"[^A-Za-z0-9._:-]", "_", node).lstrip(".") or "node")


def refuse_used(bundle: Path) -> None:
    """UsageError if the folder already holds a run: two would mix their captures."""
    if (bundle / HEALTH).exists() or (bundle / "nodes").exists():
        others = (bundle.parent / f"{bundle.name}-{number}" for number in itertools.count(2))
        free = next(folder for folder in others if not folder.exists())
        raise UsageError(f"{bundle} already holds a run; use another folder: --out {free}")


def save(bundle: Path, health: ClusterHealth) -> None:
    """Write the run beside its captures."""
    bundle.mkdir(parents=True, exist_ok=True)
    # health.json last: a reader that sees it may trust what lies beside it.
    for name, text in ((VERDICT, judged(health)), (HEALTH, health.to_json() + "\n")):
        write_whole(bundle / name, text, durable=False)


def digest(bundle: Path) -> str:
    """SHA-256 of the evidence: health.json, verdict.json, nodes/ and collectives/, without the reports.

    It is the hash of the sorted output of `sha256sum`, so that it can be computed without Trainmaster:

        find health.json verdict.json nodes collectives -type f | LC_ALL=C sort | xargs sha256sum | sha256sum
    """
    files: dict[bytes, Path] = {}
    for top in (bundle / name for name in _DIGESTED):
        paths = [top] if top.is_file() else top.rglob("*")
        files |= {path.relative_to(bundle).as_posix().encode(errors="surrogateescape"): path for path in paths}
    whole = hashlib.sha256()
    for name, path in sorted(files.items()):
        if path.is_symlink():
            raise UsageError(f"{path} is a link: a bundle holds files only")
        if path.is_file():
            whole.update(hashlib.sha256(path.read_bytes()).hexdigest().encode() + b"  " + name + b"\n")
    return whole.hexdigest()


def load(bundle: Path) -> ClusterHealth:
    """The run as it was saved, with errors for what is missing from it."""
    health = _read(bundle)
    missing = [f"{node.node} has no {name}" for node in health.nodes for name in _unlisted(node)]
    return _add_faults(health, [*_find_faults(bundle, health), *missing])


def _read(bundle: Path) -> ClusterHealth:
    try:
        raw = (bundle / HEALTH).read_bytes()
    except OSError:
        raise UsageError(f"{bundle} holds no run: it has no {HEALTH}; `trainmaster check --out` writes one") from (None)
    try:
        return ClusterHealth.from_json(raw.decode("utf-8"))
    except (SpecError, ValueError, RecursionError) as error:
        raise UsageError(f"{bundle / HEALTH} is damaged: {str(error)[:300]}") from None


def judged(health: ClusterHealth) -> str:
    """The verdict and everything it rests on, without times: the bytes of verdict.json."""
    return _timeless(health).to_json() + "\n"


def rejudge(
    bundle: Path, overrides: Mapping[str, Any] | None = None, *, known_digest: str | None = None
) -> ClusterHealth:
    """Judge the captures again under the present rules; `overrides` replace the saved expectations.

    `known_digest`: the digest printed by the run; a bundle with another one is an error.
    """
    before = _read(bundle)
    nodes: list[NodeHealth] = []
    silent = list(before.silent)
    alone = all(result.check != COLLECTIVES for result in before.cluster)
    for node in before.nodes:
        again = _rejudge_node(capture_folder(bundle, node.node), node, overrides or {}, alone=alone)
        if isinstance(again, NodeHealth):
            nodes.append(again)
        else:
            silent.append(again)
    # Results between nodes (collectives) are in no node's capture; only new expectations are judged by what was kept.
    measured = tuple(
        rejudge_collectives.rejudge(result, before.nodes, overrides or {}) if result.check == COLLECTIVES else result
        for result in before.cluster
        if result.check not in compare.NAMES
    )
    compared = compare.compare(nodes) if len(before.asked) > 1 else ()
    health = dataclasses.replace(before, nodes=tuple(nodes), silent=tuple(silent), cluster=compared + measured)
    faults = _find_faults(bundle, before)
    if known_digest is not None and digest(bundle) != known_digest.strip().lower().removeprefix("sha256:"):
        faults.append(f"its digest is not {known_digest[:80]}: a file was changed, added or removed since the run")
    return _add_faults(health, faults)


def _find_faults(bundle: Path, health: ClusterHealth) -> list[str]:
    """Signs that a bundle was edited or is not whole."""
    faults = []
    try:
        verdict = ClusterHealth.from_json((bundle / VERDICT).read_text(encoding="utf-8"))
        if verdict != _timeless(health):
            faults.append(f"{HEALTH} is not the run of {VERDICT}: one of them was changed")
    except (OSError, SpecError, ValueError, RecursionError) as error:
        faults.append(f"{VERDICT} cannot be read: {str(error)[:120]}")
    faults += _find_repeated(bundle, health)
    names = {*health.asked, *(node.node for node in health.nodes), *(node.node for node in health.silent)}
    known = {capture_folder(bundle, name).name for name in names}
    captures = sorted(path.name for path in (bundle / "nodes").glob("*") if path.is_dir())
    faults += [f"there is a capture of {name}, which is not part of the run" for name in captures if name not in known]
    return faults


def _find_repeated(bundle: Path, health: ClusterHealth) -> list[str]:
    """Nodes that a run lists twice, or that share a capture: one machine must not stand for two."""
    answered = [*(node.node for node in health.nodes), *(node.node for node in health.silent)]
    faults = [f"{name} answered and was not asked" for name in dict.fromkeys(answered) if name not in health.asked]
    for names in (health.asked, answered):
        folders = Counter(capture_folder(bundle, name).name for name in names)
        faults += [f"{folder} is listed {count} times" for folder, count in folders.items() if count > 1]
    return list(dict.fromkeys(faults))


def _add_faults(health: ClusterHealth, faults: list[str]) -> ClusterHealth:
    if not faults:
        return health
    action = "use the bundle as `trainmaster check --out` wrote it, or check the nodes again"
    result = CheckResult.of(BUNDLE, [error(fault, action=action) for fault in faults])
    return dataclasses.replace(health, cluster=(*health.cluster, result))


def _unlisted(node: NodeHealth) -> list[str]:
    """Checks of the level that the run neither planned nor left out. Another version may not have had them."""
    known = {*node.planned, *node.left_out}
    return [name for name in checks.plan(node.level) if name not in known] if node.version == __version__ else []


def _rejudge_node(capture: Path, node: NodeHealth, overrides: Mapping[str, Any], *, alone: bool) -> NodeHealth | Silent:
    try:
        host = RecordedHost(capture)
    except UsageError as error:
        action = "use the complete bundle of the run, or check the node again"
        return Silent(node=node.node, verdict=Verdict.ERROR, reason=str(error), action=action)
    expect = build(Expect, {**node.expect, **overrides})
    planned = [name for name in node.planned if name not in UNMEASURED]
    planned += [name for name in checks.plan(node.level) if name not in {*planned, *node.left_out}]
    there = [name for name in planned if name in checks.names()]
    results = checks.run(host, expect, level=max(checks.LEVELS), only=there) if there else []
    by_check = {result.check: result for result in clean(results)}
    # A run that --only narrowed left expectations out on purpose; those of `overrides` are new and always count.
    whole = any(name in UNMEASURED for name in node.planned) or set(checks.plan(node.level)) <= set(planned)
    wanted = expect if whole else build(Expect, dict(overrides))
    left = unmeasured(wanted, level=node.level, left_out=node.left_out, alone=alone)
    return dataclasses.replace(
        node,
        planned=(*planned, *(result.check for result in left)),
        results=(*(by_check.get(name) or _no_such_check(name, node.version) for name in planned), *left),
        expect={**node.expect, **overrides},
        version=__version__,
    )


def _no_such_check(name: str, version: str) -> CheckResult:
    finding = error("this version has no check of that name", action=f"judge it with version {version}, which has it")
    return CheckResult.of(name, [finding])


def _timeless(health: ClusterHealth) -> ClusterHealth:
    def results(items: tuple[CheckResult, ...]) -> tuple[CheckResult, ...]:
        return tuple(dataclasses.replace(result, took_s=0.0) for result in items)

    return dataclasses.replace(
        health,
        nodes=tuple(
            dataclasses.replace(node, results=results(node.results), started_at="", took_s=0.0) for node in health.nodes
        ),
        silent=tuple(dataclasses.replace(node, took_s=0.0) for node in health.silent),
        cluster=results(health.cluster),
        started_at="",
        took_s=0.0,
    )
