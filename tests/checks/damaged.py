"""A recorded host with one damaged answer, and the ways to damage an answer: empty, cut, N/A, refused."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from trainmaster import checks
from trainmaster.checks.runner import WholeFiles
from trainmaster.core.errors import FileMissing, FileUnreadable, HostError, NotCaptured
from trainmaster.core.expect import Expect
from trainmaster.core.results import Finding, Verdict, error
from trainmaster.node.host import CommandResult, Disk, Host, KernelClock

Question = tuple[str, Any]  # ("run", argv), ("read", path), ("list", path)
_WEIGHT = {Verdict.SKIP: 0, Verdict.PASS: 1, Verdict.WARN: 2, Verdict.ERROR: 3, Verdict.FAIL: 4}
_VALUE = re.compile(r"\d[\d.,]*|\b(?:Yes|No|Active|Not Active|Enabled|Disabled|Completed|Success|LinkUp|Pass|Fail)\b")


class DamagedHost(Host):
    """Another host, with some answers replaced, and a list of what was asked."""

    def __init__(self, inner: Host, changes: Mapping[Question, Any] | None = None) -> None:
        super().__init__({})
        self._inner, self._changes = inner, dict(changes or {})
        self.asked: dict[Question, Any] = {}

    def run(self, *argv: str, timeout_s: float = 30.0) -> CommandResult:
        found: CommandResult = self._answer(("run", argv), lambda: self._inner.run(*argv, timeout_s=timeout_s))
        return found

    def read(self, path: str) -> str:
        return str(self._answer(("read", path), lambda: self._inner.read(path)))

    def list(self, path: str) -> tuple[str, ...]:
        return tuple(self._answer(("list", path), lambda: self._inner.list(path)))

    def disk(self, path: str) -> Disk:
        return self._inner.disk(path)

    def env(self, name: str) -> str | None:
        return self._inner.env(name)

    def kernel_clock(self) -> KernelClock:
        return self._inner.kernel_clock()

    def _answer(self, question: Question, ask: Any) -> Any:
        if question in self._changes:
            answer = self._changes[question]
            if isinstance(answer, HostError):
                raise answer
            return answer
        answer = ask()
        self.asked[question] = answer
        return answer


def judge(check: str, host: Host, expect: Expect) -> list[Finding]:
    """Findings of a check as the runner gives them, without its thread."""
    module = checks.load(check)
    try:
        found = module.judge(module.read(WholeFiles(host)), expect)
    except Exception as exc:  # the runner makes an error of each
        return [error(f"{type(exc).__name__}: {exc}", action="")]
    return found if isinstance(found, list) else [found]


def worst(findings: list[Finding]) -> Verdict:
    return max((finding.verdict for finding in findings), key=_WEIGHT.__getitem__, default=Verdict.ERROR)


def damages(answer: Any) -> Iterator[tuple[str, Any]]:
    """The answer emptied, cut, with N/A for its values, and refused."""
    yield "refused", FileUnreadable("permission denied", code=errno.EACCES)
    if isinstance(answer, CommandResult):
        yield from ((how, replace(answer, stdout=text)) for how, text in damage_text(answer.stdout))
        yield "nothing at all", replace(answer, stdout="", stderr="")
    elif isinstance(answer, str):
        yield from damage_text(answer)
    elif isinstance(answer, tuple):
        yield "empty", ()


def damage_text(text: str, *, lines: int = 5) -> Iterator[tuple[str, str]]:
    yield "empty", ""
    yield "a newline", "\n"
    yield "N/A", "N/A\n"
    for share in (0.25, 0.6, 0.95):
        cut = int(len(text) * share)
        if 0 < cut < len(text) and text[cut - 1] != "\n":  # at the end of a line nothing shows that more followed
            yield f"cut at {share:.0%}", text[:cut]
    yield "every value N/A", _VALUE.sub("N/A", text)
    rows = text.split("\n")
    if len(rows) < 4:
        return  # one value: it was N/A already
    telling = [number for number, row in enumerate(rows) if _VALUE.search(row)]
    step = max(1, len(telling) // lines)
    for number in telling[::step]:
        damaged = list(rows)
        damaged[number] = _VALUE.sub("N/A", rows[number])
        yield f"line {number} N/A", "\n".join(damaged)


def garble(answer: Any) -> Iterator[tuple[str, Any]]:
    """The answer with words that nobody writes there, whole or in place of each of its own."""
    text = answer.stdout if isinstance(answer, CommandResult) else answer
    if not isinstance(text, str):
        return
    junk = {
        "junk": "g@rb@ge %% zz\n",
        "junk lines": "zq=~ !!\n## zz\n}{ 0x\n",
        "words": re.sub(r"[0-9A-Za-z]+", "zq", text),
    }
    if re.fullmatch(r"\d+\s*", text):
        junk |= {"below zero": "-7\n", "endless": "9" * 25 + "\n", "no ASCII": "\u0663\n", "underscore": "1_0\n"}
    for how, garbage in junk.items():
        if garbage != text:
            yield how, replace(answer, stdout=garbage) if isinstance(answer, CommandResult) else garbage


def refusals() -> Iterator[tuple[str, HostError]]:
    """Ways in which the kernel, or a capture, refuses one file."""
    for code in (errno.EIO, errno.EINVAL, errno.EACCES, errno.EOPNOTSUPP):
        yield errno.errorcode[code], FileUnreadable(errno.errorcode[code], code=code)
    yield "FileMissing", FileMissing("it is not there")
    yield "NotCaptured", NotCaptured("the capture does not hold it")
    yield "cut short", HostError("it is empty or was cut short")


def masked(before: list[Finding], after: list[Finding], device: str) -> str | None:
    """How the finding of a sick device was lost because another one cannot be read; None: it is told as it was."""
    worse = {Verdict.WARN, Verdict.FAIL, Verdict.ERROR}
    (told,) = [finding for finding in before if finding.device == device and finding.verdict in worse]
    same = [finding for finding in after if finding.device == device]
    if not same:
        return f"{device} is not named: {after[0].reason}"
    return None if worst(same) is told.verdict else f"{told.verdict} of {device} became {worst(same)}: {same[0].reason}"


def opened(before: list[Finding], after: list[Finding]) -> str | None:
    """How a damaged answer made the judgement milder than it may be; None: it did not."""
    proofless = [finding.reason for finding in after if finding.verdict is Verdict.SKIP and not finding.proof]
    if proofless:
        return f"skipped without proof: {proofless[0]}"
    if worst(before) not in (Verdict.WARN, Verdict.FAIL, Verdict.ERROR):
        return None
    if worst(after) is Verdict.PASS:
        return f"{worst(before)} became pass: {after[0].reason}"
    for finding in before:
        if finding.device is None or finding.verdict not in (Verdict.WARN, Verdict.FAIL, Verdict.ERROR):
            continue
        same = [other for other in after if other.device == finding.device]
        # Of the node, or of a device that lost its name with the damage.
        whole = [other for other in after if other.device not in {one.device for one in before} or other.device is None]
        if same and worst([*same, *whole]) is Verdict.PASS:
            return f"{finding.verdict} of {finding.device} became pass: {same[0].reason}"
    return None
