"""Acceptance suites: checks, bandwidth, training, and isolation where something is slow, in one resumable run.

    plan ─▶ parts (command lines) ─▶ run, one process each ─▶ parts/NAME.json ─▶ one document with the verdict

A part that has ended is in its file, which is written last and whole. A suite that was interrupted goes on in the same
folder: parts with a file are not repeated, and the document states which they were.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from trainmaster import __version__
from trainmaster.core.errors import UsageError
from trainmaster.core.files import open_whole
from trainmaster.core.results import Overall, exit_code
from trainmaster.node.owner import die_with

Kind = Literal["check", "bandwidth", "training", "isolation"]
_STATE, _PARTS = "suite.json", "parts"
_LAST = 2000  # characters of a failed part's standard error
_LINE = 120  # characters of a line of progress
_LOOK_S, _EVERY_S, _MINUTE_S = 0.5, 10.0, 60.0  # a line of progress every 10 s at first, then every minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One measurement: a command line of Trainmaster that prints one JSON document."""

    name: str
    title: str
    kind: Kind
    words: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    skip: str | None = None  # reason why it does not apply here, with its proof
    if_slow: bool = False  # only where another part was slow


def run(
    suite: str,
    parts: Sequence[Part],
    folder: Path,
    *,
    on: str | None,
    show: Callable[[str], None],
    machine: str = "",
    program: Sequence[str] = (sys.executable, "-m", "trainmaster"),
) -> dict[str, Any]:
    """Run what is left of the suite in this folder; the document of all parts. `machine`: what it measures."""
    try:
        (folder / _PARTS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder}: no folder can be made there: {error.strerror or error}") from None
    with _alone(folder):
        state = _open(suite, parts, folder, on=on, machine=machine)
        results: list[dict[str, Any]] = []
        for part in parts:
            results.append(_take(part, folder, results, show, program, number=len(state["runs"])))
        document = _document(state, results)
        save(folder / "report.json", document)
    return document


def _take(
    part: Part, folder: Path, before: Sequence[Mapping[str, Any]], show: Callable[[str], None],
    program: Sequence[str], *, number: int,
) -> dict[str, Any]:  # fmt: skip
    """The record of a part: from its file, or measured now."""
    path = folder / _PARTS / f"{part.name}.json"
    if path.exists():
        show(f"{part.name}: finished before")
        return _read_part(part, path)
    plain = {"name": part.name, "title": part.title, "kind": part.kind, "words": list(part.words), "env": part.env}
    reason = part.skip or (_not_slow(before) if part.if_slow else None)
    if reason is not None:
        return {**plain, "overall": None, "skipped": reason, "run": number}
    show(f"{part.name}: begin")
    record = {**plain, **_execute(part, folder / _PARTS, program, show), "run": number}
    if record["document"] is not None:  # a part that crashed is measured again by the next run
        save(path, record)
    why = f": {last_line(record['reason'])}" if record["reason"] else ""
    show(f"{part.name}: {record['overall']}, {record['took_s']:.0f} s{why}")
    return record


def _execute(part: Part, folder: Path, program: Sequence[str], show: Callable[[str], None]) -> dict[str, Any]:
    started, begun = datetime.now(UTC), time.monotonic()
    out, err = folder / f"{part.name}.out", folder / f"{part.name}.err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            [*program, *part.words], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
            env={**os.environ, **part.env},
            preexec_fn=die_with(os.getpid(), signal.SIGTERM),  # noqa: PLW1509 (this process has one thread)
        )  # fmt: skip
        try:
            code = _wait(process, err, lambda text: show(f"{part.name}: {text}"))
        except BaseException:
            process.terminate()
            process.wait()
            raise
    document = _parse(out)
    reason: str | None
    if document is not None and code != exit_code(verdict_of(document)):
        reason = f"it printed {verdict_of(document)}, and then ended with {code}"
        overall, document = Overall.INCOMPLETE, None
    elif document is None:
        overall, reason = Overall.INCOMPLETE, err.read_text(errors="replace")[-_LAST:].strip() or "it printed nothing"
    else:
        overall = verdict_of(document)
        reason = find_reason(document, overall)
    return {
        "overall": str(overall), "exit_code": code, "reason": reason, "document": document,
        "started_at": started.isoformat(timespec="seconds"), "took_s": round(time.monotonic() - begun, 1),
    }  # fmt: skip


def _wait(process: subprocess.Popen[bytes], err: Path, show: Callable[[str], None]) -> int:
    """Wait for the end of a part; meanwhile show how long it has run, and the last line it printed."""
    begun, shown_s = time.monotonic(), 0.0
    while True:
        try:
            return process.wait(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            ran_s = time.monotonic() - begun
        if ran_s - shown_s >= (_EVERY_S if ran_s < _MINUTE_S else _MINUTE_S):
            shown_s = ran_s
            lines = err.read_text(errors="replace").strip().splitlines()
            show(f"{ran_s:.0f} s" + (f", {lines[-1][:_LINE]}" if lines else ""))


def _parse(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(path.read_text())
        verdict_of(document)
    except (ValueError, AttributeError, RecursionError):
        return None
    return dict(document)


def verdict_of(document: Mapping[str, Any]) -> Overall:
    """The verdict of a part's document; ValueError or AttributeError where it has none."""
    return Overall(str(document.get("overall", document.get("verdict"))))


def find_reason(document: Mapping[str, Any], verdict: Overall) -> str | None:
    """Why a part is INCOMPLETE or FAIL, by the first such finding of its document; None for other verdicts."""
    word = {Overall.INCOMPLETE: "error", Overall.FAIL: "fail"}.get(verdict)
    if word is None:
        return None
    results = [*document.get("checks", ()), *document.get("results", ()), *document.get("cluster", ())]
    nodes = document.get("nodes")
    for node in nodes if isinstance(nodes, list) else ():
        results += [{**result, "node": node.get("node")} for result in node.get("results", ())]
    for result in results:
        for finding in result.get("findings", ()):
            if finding.get("verdict") == word:
                host = (finding.get("values") or {}).get("host") or result.get("node")
                where = " ".join(filter(None, (host, finding.get("device"))))
                reason = str(finding.get("reason"))
                return f"{where}: {reason}" if where and not reason.startswith(where) else reason
    diagnosis, silent = document.get("diagnosis") or {}, document.get("silent")
    if notes := [*diagnosis.get("notes", ()), *filter(None, [diagnosis.get("action")])]:
        return str(notes[0])
    if isinstance(silent, Mapping) and silent:
        return "; ".join(f"{node}: {why}" for node, why in silent.items())
    if isinstance(silent, list) and silent:
        return f"{silent[0].get('node')} did not answer: {silent[0].get('reason')}"
    return "something that was planned has no result" if verdict is Overall.INCOMPLETE else None


def last_line(reason: str) -> str:
    """The last line of a reason: of what a part printed before it ended."""
    return (reason.strip().splitlines() or ["it printed nothing"])[-1]


def _not_slow(before: Sequence[Mapping[str, Any]]) -> str | None:
    """Reason to leave isolation out; None where a measured part failed or warned."""
    slow = [part["name"] for part in before if part["kind"] != "check" and part["overall"] in ("FAIL", "WARN")]
    return None if slow else "no measurement was slow: no part of bandwidth or training failed or warned"


def _document(state: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    overall, number = judge(parts), len(state["runs"])
    return {
        "v": 1,
        "suite": state["suite"],
        "on": state["on"],
        "host": socket.gethostname(),
        "overall": str(overall),
        "exit_code": exit_code(overall),
        "started_at": state["runs"][0],
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "runs": state["runs"],
        "resumed": [part["name"] for part in parts if "took_s" in part and part["run"] < number],
        "parts": list(parts),
        "trainmaster": __version__,
    }


def judge(parts: Sequence[Mapping[str, Any]]) -> Overall:
    """The worst of the parts; INCOMPLETE where none was measured."""
    verdicts = {part["overall"] for part in parts if part["overall"] is not None}
    order = (Overall.FAIL, Overall.INCOMPLETE, Overall.WARN, Overall.PASS)
    return next((verdict for verdict in order if str(verdict) in verdicts), Overall.INCOMPLETE)


def _open(suite: str, parts: Sequence[Part], folder: Path, *, on: str | None, machine: str) -> dict[str, Any]:
    """The state of the suite in this folder, with one more run. UsageError where another suite was begun there."""
    path = folder / _STATE
    wanted = [[part.name, list(part.words), dict(part.env)] for part in parts]
    state: dict[str, Any] = {"v": 1, "suite": suite, "on": on, "machine": machine, "plan": wanted, "runs": []}
    if path.exists():
        state = _load(path)
        if (state.get("suite"), state.get("on"), state.get("plan")) != (suite, on, wanted):
            raise UsageError(f"--out {folder}: another suite was begun there; choose another folder, or remove it")
        if state.get("machine") != machine:
            raise UsageError(
                f"--out {folder}: its parts were measured on {state.get('machine')!r:.200}, and this is "
                f"{machine!r:.200}; choose another folder"
            )
        runs = state.get("runs")
        if not isinstance(runs, list) or not runs or not all(isinstance(at, str) for at in runs):
            raise UsageError(f"{path}: damaged; remove the folder to measure again")
    elif any((folder / _PARTS).glob("*.json")):
        raise UsageError(f"{path}: not there, but {_PARTS}/ has results of an unknown suite; choose another folder")
    state["runs"].append(datetime.now(UTC).isoformat(timespec="seconds"))
    save(path, state)
    return state


def _read_part(part: Part, path: Path) -> dict[str, Any]:
    """The record of a finished part: it must be of this part, and its verdict that of its document."""
    record = _load(path)
    try:
        kept_part = [record["name"], record["kind"], record["words"], record["env"]]
        kept_verdict = record["overall"], record["exit_code"], type(record["run"]), type(record["took_s"])
        verdict = verdict_of(record["document"])
    except (KeyError, ValueError, AttributeError):
        raise UsageError(f"{path}: damaged; remove it to measure again") from None
    if kept_part != [part.name, part.kind, list(part.words), dict(part.env)]:
        raise UsageError(f"{path}: the result of another command; remove it to measure again")
    if kept_verdict != (str(verdict), exit_code(verdict), int, float):
        raise UsageError(f"{path}: damaged: its verdict is not that of its document; remove it to measure again")
    return record


def _load(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); remove it to measure again") from None
    if not isinstance(record, dict):
        raise UsageError(f"{path}: not a file of a suite; remove it to measure again")
    return record


def save(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document whole, and so that it survives the machine."""
    with open_whole(path, durable=True) as file:
        file.write((json.dumps(document, indent=1) + "\n").encode())


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot be written: {error.strerror or error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"--out {folder}: a suite runs there now") from None
        yield
