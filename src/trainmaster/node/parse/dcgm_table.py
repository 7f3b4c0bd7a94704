"""The tables that `dcgmi diag` prints without `-j`.

DCGM 3 writes one row per status, and leaves the first cell of the second and later ones empty:

    | Targeted Power            | Pass - GPUs: 0, 2, 3                           |
    |                           | Fail - GPU: 1                                  |
    | Warning                   | GPU 1 Max power of 224.1 did not reach desire  |
    |                           | d power minimum target_power_min_ratio of 224  |

DCGM 4 writes the test with its summary, then one row per GPU ("GPU1: Fail"), each with its own warnings
("Warning: GPU1"). A row that fits neither is a fault: it may be the one that says Fail.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from trainmaster.node.parse import ParseError, shorten, split_lines
from trainmaster.node.parse.dcgm_data import (
    GROUPS,
    NODE,
    Diag,
    Draft,
    Problem,
    Result,
    Status,
    Test,
    build,
    read_status,
)

_ROW = re.compile(r"\|(?P<name>[^|]*)\|(?P<info>.*)\|\s*")
_RULE = re.compile(r"[|+]-----  (?P<title>[A-Za-z][A-Za-z ]*?)  -*\+-*[|+]\s*")
_LINE = re.compile(r"\+[-=]{8,}\+[-=]{8,}\+\s*")
_SOME = re.compile(r"(?P<word>[A-Za-z ]+?) - (?:GPUs?: (?P<gpus>\d{1,4}(?:, ?\d{1,4})*)|(?P<all>All))")
_EACH = re.compile(rf"(?P<group>{'|'.join(sorted(GROUPS))})(?P<id>\d{{1,6}}): ?(?P<word>.*)")
_NOTE = re.compile(r"(?P<kind>Warning|Error|Info)(?:: (?P<group>[A-Za-z_]+?)(?P<id>\d{1,6}))?")
_ABOUT = re.compile(r"GPU (?P<id>\d{1,6})\b")
_ERROR = re.compile(r"^\s*(?:Error\b.*|Unable to .*|.*(?:host engine|hostengine) .*)", re.IGNORECASE)
_IDS = re.compile(r"[0-9a-fA-F]{1,8}(?:, ?[0-9a-fA-F]{1,8})*,?")
_META = {"DCGM Version", "Driver Version Detected", "GPU Device IDs Detected"}
_KNOWN_META = re.compile(r".* Device IDs Detected|Number of CPUs Detected|(?:CPU )?EUD (?:Test|Package) Version")


@dataclass(slots=True)
class _Reader:
    draft: Draft = field(default_factory=Draft)
    meta: dict[str, str] = field(default_factory=dict)
    category: str = ""
    tests: list[Test] = field(default_factory=list)
    rows: int = 0
    ended: bool = False
    each: bool = False  # one row per GPU, as DCGM 4 prints them
    note_at: int = 0  # which result of the last test a warning's next line belongs to
    goes_on: str | None = None  # what an empty first cell continues: "test", "note", a meta name, or nothing

    def read(self, line: str, number: int) -> None:
        if _LINE.fullmatch(line):
            self.ended, self.goes_on = True, None
            return
        rule = _RULE.fullmatch(line)
        if rule:
            self.category, self.ended, self.goes_on = rule["title"], False, None
            return
        row = _ROW.fullmatch(line)
        if row and (row["name"].strip(), row["info"].strip()) == ("Diagnostic", "Result"):
            return  # the head of the table
        if row is None or not self._row(row["name"].strip(), row["info"].strip()):
            self.draft.faults.append(f"line {number} of the table cannot be read: {shorten(line)}")
            self.goes_on = None
        self.ended = False
        self.rows += 1

    def _row(self, name: str, info: str) -> bool:
        if not name:
            return self._continue(info)
        if name in _META or (self.category in ("", "Metadata") and _KNOWN_META.fullmatch(name)):
            if name in self.meta:
                return False
            self.meta[name], self.goes_on = info, name
            return True
        note = _NOTE.fullmatch(name)
        if note:
            return self._note(note, info)
        self.tests.append(Test(name=name, category=self.category, results=()))
        self.goes_on = "test"
        return self._status(info)

    def _continue(self, info: str) -> bool:
        # A status is looked for first: what says Fail must not be taken for the rest of a warning's text.
        if _SOME.fullmatch(info) or _EACH.fullmatch(info):
            if not self.tests:
                self.tests.append(Test(name="", category=self.category, results=()))
                self._status(info)
                return False
            self.goes_on = "test"
            return self._status(info)
        if self.goes_on == "note":
            self._annotate(self.note_at, info, new=False)
            return True
        if self.goes_on == "info":
            return True
        if self.goes_on in self.meta:
            self.meta[self.goes_on or ""] += info
            return True
        return self.goes_on == "test" and info.startswith("Code: (")

    def _status(self, info: str) -> bool:
        some, each = _SOME.fullmatch(info), _EACH.fullmatch(info)
        if some:
            word = some["word"].strip()
            gpus: list[int | None] = [None] if some["all"] else [int(number) for number in some["gpus"].split(",")]
            for gpu in gpus:
                self._add(Result(status=read_status(word), word=word, gpu=gpu, entity="all" if gpu is None else None))
            return read_status(word) is not Status.UNKNOWN
        if each:
            self.each = True
            word, number = each["word"].strip(), int(each["id"])
            gpu = number if each["group"] == "GPU" else None
            entity = None if gpu is not None else f"{each['group']}{number}"
            self._add(Result(status=read_status(word), word=word, gpu=gpu, entity=entity))
            return read_status(word) is not Status.UNKNOWN
        status = read_status(info)
        if self.tests[-1].summary is None and not self.tests[-1].results:
            self.tests[-1] = replace(self.tests[-1], summary=status)
        return status is not Status.UNKNOWN

    def _add(self, result: Result) -> None:
        last = self.tests[-1]
        self.tests[-1] = replace(last, results=(*last.results, result))

    def _note(self, note: re.Match[str], info: str) -> bool:
        """A warning or remark below a row. It belongs to the GPU it names, else to the row just above."""
        self.goes_on = None
        if not self.tests:
            return False
        if note["kind"] == "Info":
            self.goes_on = "info"
            return True
        last = self.tests[-1]
        named = _ABOUT.match(info)
        gpu = int(note["id"]) if note["group"] == "GPU" else int(named["id"]) if named else None
        at = next((i for i, result in enumerate(last.results) if gpu is not None and result.gpu == gpu), None)
        if at is None and last.results:
            at = len(last.results) - 1
        if at is None:
            # No row but the summary: the warning is about the node, and weighs what the summary says.
            status = last.summary or Status.UNKNOWN
            self._add(Result(status=status, word=status.value, entity=NODE))
            at = 0
        self._annotate(at, info, new=True)
        self.note_at, self.goes_on = at, "note"
        return True

    def _annotate(self, at: int, text: str, *, new: bool) -> None:
        last = self.tests[-1]
        results = list(last.results)
        problems = list(results[at].problems)
        # dcgmi cuts a message every 45 characters, in the middle of words.
        problems = [*problems, Problem(text=text)] if new else [*problems[:-1], Problem(text=problems[-1].text + text)]
        results[at] = replace(results[at], problems=tuple(problems))
        self.tests[-1] = replace(last, results=tuple(results))


def parse_table(text: str) -> Diag:
    """One table, or one per iteration; DCGM's own words of failure instead of a table are its runtime error."""
    reader = _Reader()
    runtime_error = None
    lines = split_lines(text)
    inside = [i for i, line in enumerate(lines) if line.lstrip()[:1] in ("|", "+")]
    first, last = (inside[0], inside[-1]) if inside else (0, -1)
    for number, line in enumerate(lines, start=1):
        if first <= number - 1 <= last:
            if line.strip() and not _between(line):
                reader.read(line, number)
        elif _ERROR.match(line):
            runtime_error = runtime_error or shorten(line)
    if not reader.rows and runtime_error is None:
        raise ParseError("neither a table nor an error of dcgmi diag")
    draft = reader.draft
    draft.runtime_error = runtime_error
    if reader.rows and not reader.ended:
        draft.faults.append("the table ends without its last line: the output may have been cut off")
    ids = reader.meta.get("GPU Device IDs Detected")
    count = None
    if ids is not None and _IDS.fullmatch(ids):
        count = len([piece for piece in ids.split(",") if piece.strip()])
    elif ids is not None:
        draft.faults.append(f"the list of detected GPUs cannot be read: {shorten(ids)}")
    version = reader.meta.get("DCGM Version", "")
    draft.tests = [_spread(test, _numbers(reader.tests, count)) for test in reader.tests]
    return build(
        draft,
        form="text-4" if reader.each or version.startswith("4") else "text-3",
        dcgm=version or None,
        driver=reader.meta.get("Driver Version Detected"),
        count=count,
        known=(),
    )


def _between(line: str) -> bool:
    """What dcgmi prints between two iterations."""
    return bool(
        re.fullmatch(r"Running iteration \d+ of \d+\.\.\.|Successfully ran diagnostic for group\.", line.strip())
    )


def _numbers(tests: list[Test], count: int | None) -> list[int]:
    named = sorted({result.gpu for test in tests for result in test.results if result.gpu is not None})
    return named if count is not None and len(named) == count else list(range(count or 0))


def _spread(test: Test, gpus: list[int]) -> Test:
    """`Pass - All` is one result for each GPU; a word alone is one for the node."""
    results: list[Result] = []
    for result in test.results:
        if result.entity != "all":
            results.append(result)
        elif gpus:
            results.extend(replace(result, gpu=gpu, entity=None) for gpu in gpus)
        else:
            results.append(replace(result, entity=None))
    if not results and test.summary is not None:
        results.append(Result(status=test.summary, word=test.summary.value))
    return replace(test, results=tuple(results))
