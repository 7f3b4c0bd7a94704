"""Output of nccl-tests and rccl-tests (all_reduce_perf and its siblings): the printed table, or the file of `-J`.

Every width since 2017 is read by its own header, not by counting: `error` became `#wrong`, per-iteration and timestamp
columns came later (src/util.cu and src/common.cu of NVIDIA/nccl-tests, to v2.19.6; rccl-tests has the same columns).
Lines are first sorted by their launcher's prefix (launcher_log.py), because N processes that never met each print a
whole table, and their lines mix. A `#` that a log viewer stripped is not needed.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainmaster.node.parse import ParseError, as_text, read_float, read_int, shorten, split_lines
from trainmaster.node.parse.launcher_log import released_job, reports_death, revoked_job, split_mark, strip_colours
from trainmaster.node.parse.nccl_tests_data import (
    Device,
    Measure,
    Output,
    Row,
    Run,
    collective_of,
    contradicts,
    expected_sizes,
    find_lost_sizes,
    find_shared_gpu,
    infer_collective,
    measure,
    proven_ranks,
)
from trainmaster.node.parse.nccl_tests_json import parse_documents

__all__ = ["Output", "Row", "Run", "parse"]

_SIZES = re.compile(
    r"#?\s*nThread (?P<threads>\d{1,9}) nGpus (?P<gpus>\d{1,9}) minBytes (?P<min>\d{1,18}) maxBytes (?P<max>\d{1,18})"
    r" step: (?P<step>\d{1,18})\((?P<how>factor|bytes)\)(?:.*\bvalidation: (?P<check>\d{1,9}))?"
)
_RANK = re.compile(
    r"#?\s*Rank\s+(?P<rank>\d{1,9})(?:\s+Group\s+(?P<group>\d{1,9}))?\s+Pid\s+(?P<pid>\d{1,18})\s+on\s+(?P<host>[A-Za-z0-9._-]+)"
    r"\s+device\s+(?P<device>\d{1,9})\s+\[(?P<bus>[0-9a-fA-Fx:.]+)\]\s*(?P<name>.*)"
)
_BOUNDS = re.compile(r"#?\s*Out of bounds values\s*:\s*(?P<count>\d{1,18})\s*(?P<word>OK|FAILED)\s*")
_AVERAGE = re.compile(r"#?\s*Avg bus bandwidth\s*:\s*(?P<value>[0-9.eE+-]+)\s*(?:OK|FAILED)?\s*")
_ROW = re.compile(r"\s*(?P<size>\d{1,18})\s+(?P<count>\d{1,18})\s+(?P<type>[a-z]\w*)\s+(?P<rest>\S.*)")
_REDOP = re.compile(r"[a-z][a-z0-9]*")
_TIME_AT_END = re.compile(r"\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")
_BEGIN = re.compile(
    r"\s*#?\s*(?:nThread|nccl-tests version|Collective test starting|Rank|Using devices)\b|rccl-tests: "
)
_HEAD = re.compile(
    r"\s*(?:#|nThread\b|Rank +\d|nccl-tests version|Collective test|Out of bounds|Avg bus|Using devices"
    r"|Reducing maxBytes|size +count +type|bytes +N +type)"
)
_COMMAND = re.compile(
    r"(?:^|[\s/'\"])(all_reduce|all_gather|reduce_scatter|alltoall|sendrecv|broadcast|reduce|gather|scatter|hypercube)_perf(?:_mpi)?\b"
)
_FAILURE = re.compile(r"Test (?:NCCL |CUDA )?failure|Test timeout|^#\s*error: \S")
_NCCL = re.compile(r"\bNCCL (?:INFO|WARN|TRACE|VERSION|ABORT)\b")
_COLUMNS = {
    "bytes": "size",
    "N": "count",
    "op": "redop",
    "res": "delta",
    "error": "delta",
    "#wrong": "wrong",
    "wrong": "wrong",
}
_DEFAULT = ("time", "algbw", "busbw", "wrong")
_TYPES = frozenset(
    "int8 char uint8 int32 int uint32 int64 uint64 half float16 float float32 double float64 bfloat16 "
    "f8e4m3 f8e5m2 fp8_e4m3 fp8_e5m2 fp8e4m3 fp8e5m2".split()
)
_UNITS = frozenset({"(B)", "(bytes)", "(elements)", "(us)", "(GB/s)"})
_MOST = 50  # distinct messages kept


def parse(raw: str | bytes) -> Output:
    """The output of one or more runs, or one or more `-J` files."""
    text = as_text(raw)
    if text.lstrip()[:1] in ("{", "["):
        try:
            return Output(runs=parse_documents(text))
        except ParseError:
            if text.lstrip()[:1] == "{":
                raise  # else it is the prefix of a launcher
    reader = _Reader()
    for line in split_lines(text):
        reader.read(line)
    return reader.end()


@dataclass(slots=True)
class _Draft:
    """A run as read so far."""

    label: str
    faults: list[str] = field(default_factory=list)
    version: str | None = None
    nccl_version: str | None = None
    collective: str | None = None
    sizes: Sequence[int] | None = None
    expected_ranks: int | None = None
    validated: bool | None = None
    devices: list[Device] = field(default_factory=list)
    sides: tuple[tuple[str, ...], ...] = ()
    headed: bool = False
    stamped: bool = False
    rows: list[Row] = field(default_factory=list)
    bounds: int | None = None
    average: float | None = None
    corrupt: bool = False
    hint: str | None = None  # the collective of the command before the table

    @property
    def begun(self) -> bool:
        return bool(self.devices or self.rows or self.headed or self.sizes is not None)

    def read(self, line: str) -> bool:
        """Read one line without its prefix; whether it belongs to the run."""
        if _HEAD.match(line):
            return self._head(line.strip())
        row = _ROW.fullmatch(line)
        if row and row["type"] in _TYPES:
            self._row(row)
            return True
        if self.headed and self.bounds is None and line.strip()[:1].isdigit():
            self.faults.append(f"a line of the table cannot be read: {shorten(line)}")
            return True
        return False

    def _head(self, line: str) -> bool:
        words = line.lstrip("#").split()
        if len(words) > 4 and all(word.startswith("(") for word in words):
            self.faults += [f"a column is in {shorten(word)}" for word in dict.fromkeys(words) if word not in _UNITS]
            return True
        if words[:3] in (["size", "count", "type"], ["bytes", "N", "type"]):
            self._columns(words)
        elif "nThread" in line:
            self._sizes(line)
        elif words[:1] == ["Rank"]:
            self._rank(line)
        elif "Out of bounds" in line:
            bounds = _BOUNDS.fullmatch(line)
            if bounds:
                self.bounds = max(self.bounds or 0, int(bounds["count"]))
                self.corrupt |= bounds["word"] == "FAILED" or self.bounds > 0
            else:
                self.faults.append(f"the summary of wrong values cannot be read: {shorten(line)}")
                self.corrupt |= "FAILED" in line
        elif "Avg bus" in line:
            average = _AVERAGE.fullmatch(line)
            self.average = read_float(average["value"]) if average else None
        elif words[:2] == ["nccl-tests", "version"] and len(words) > 2:
            self.version = words[2]
            library = next((word for word in words if word.startswith("nccl-library=")), "")
            self.nccl_version = library.partition("=")[2] or None
        elif words[:3] == ["Collective", "test", "starting:"] and len(words) > 3:
            self.collective = collective_of(words[3])
        elif words[:3] == ["Reducing", "maxBytes", "to"]:
            self.faults.append("the tool cut the largest size for lack of GPU memory")
        else:
            return False
        return True

    def _sizes(self, line: str) -> None:
        match = _SIZES.match(line)
        if match is None:
            self.faults.append(f"the line of parameters cannot be read: {shorten(line)}")
            return
        step, factor = int(match["step"]), match["how"] == "factor"
        self.sizes = expected_sizes(
            int(match["min"]), int(match["max"]), factor=step if factor else None, step=None if factor else step
        )
        if self.sizes is None:
            self.faults.append(f"the sizes asked for make no sense: {shorten(line)}")
        self.expected_ranks = int(match["threads"]) * int(match["gpus"])
        self.validated = match["check"] != "0" if match["check"] else None

    def _rank(self, line: str) -> None:
        match = _RANK.fullmatch(line)
        if match is None:
            self.faults.append(f"the line of a rank cannot be read: {shorten(line)}")
            return
        self.devices.append(
            Device(
                rank=int(match["rank"]),
                host=match["host"],
                device=int(match["device"]),
                bus_id=match["bus"],
                name=match["name"].strip(),
                pid=int(match["pid"]),
                group=read_int(match["group"]),
            )
        )

    def _columns(self, words: list[str]) -> None:
        names = [_COLUMNS.get(word, word) for word in words]
        starts = [i for i, name in enumerate(names) if name in ("time", "cputime")]
        self.stamped = names[-1] == "timestamp"
        ends = [*starts[1:], len(names) - self.stamped][: len(starts)]
        self.sides = tuple(tuple(names[i:j]) for i, j in zip(starts, ends, strict=True))
        self.headed = True
        if len(self.sides) not in (1, 2) or any(not {"algbw", "busbw"} <= set(side) for side in self.sides):
            self.faults.append(f"the head of the table cannot be read: {shorten(' '.join(words))}")
            self.sides = ()

    def _row(self, row: re.Match[str]) -> None:
        size, rest = int(row["size"]), _TIME_AT_END.sub("", row["rest"])
        tokens = rest.split()
        sides: tuple[tuple[str, ...], ...] = self.sides or (_DEFAULT, _DEFAULT)
        need = sum(len(side) for side in sides)
        if len(tokens) < need and len(sides) == 2 and " " * 24 in rest:
            # Trace replay prints blanks for the out-of-place half; without them the row was cut off.
            need = len(sides[-1])
            sides = (sides[-1],)
        lead, values = tokens[: max(0, len(tokens) - need)], tokens[max(0, len(tokens) - need) :]
        words = [word for word in lead if not re.fullmatch(r"-?\d{1,9}", word)]
        shaped = len(lead) <= 2 and words in ([], lead[:1]) and all(_REDOP.fullmatch(word) for word in words)
        if len(values) < need or not shaped:
            self.faults.append(f"the row of {size} bytes cannot be read: {shorten(rest)}")
            return
        made: list[Measure] = []
        for side in sides:
            made.append(self._side(size, dict(zip(side, values, strict=False))))
            values = values[len(side) :]
        numbers = [int(word) for word in lead if word not in words]
        self.rows.append(
            Row(
                size_bytes=size,
                count=int(row["count"]),
                dtype=row["type"],
                redop=words[0] if words else None,
                root=numbers[0] if numbers else None,
                out_of_place=made[0] if len(made) == 2 else None,
                in_place=made[-1],
            )
        )

    def _side(self, size: int, cells: dict[str, str]) -> Measure:
        printed = cells.get("wrong")
        wrong_values = read_float(printed)
        if printed not in (None, "N/A") and (wrong_values is None or wrong_values < 0):
            self.faults.append(f"the row of {size} bytes has {shorten(printed or '')!r} wrong values")
        self.corrupt |= bool(wrong_values)
        side, whole = measure(
            time=cells.get("time", cells.get("cputime", "")),
            algbw=cells["algbw"],
            busbw=cells["busbw"],
            wrong=None if wrong_values is None else math.ceil(wrong_values),
            delta=read_float(cells.get("delta")),
        )
        if not whole or any(read_float(cell) is None for name, cell in cells.items() if name not in ("wrong", "delta")):
            self.faults.append(f"the row of {size} bytes holds something that is no number")
        elif "time" in cells and self.collective != "hypercube" and contradicts(size, side):
            self.faults.append(f"time and bandwidth of the row of {size} bytes contradict each other")
        return side

    def end(self) -> Run:
        if self.sizes is None:
            self.faults.append("the line with the parameters of the run is missing")
        if not self.headed:
            self.faults.append("the head of the table is missing")
        if self.bounds is None:
            self.faults.append("the run ends without its summary: it was cut off or it died")
        ranks = [device.rank for device in self.devices]
        if sorted(ranks) != list(range(len(ranks))) or not ranks:
            self.faults.append(f"the ranks listed are {shorten(str(sorted(ranks)))}: some are missing or come twice")
        elif self.expected_ranks is not None and len(ranks) % max(1, self.expected_ranks):
            self.faults.append(f"{len(ranks)} ranks are listed, which are no whole processes")
        self.collective = self.collective or infer_collective(tuple(self.rows), len(self.devices), self.hint)
        lost = find_lost_sizes(self.rows, self.sizes, self.collective, len(ranks)) if self.sizes else None
        self.faults += [fault for fault in (lost, find_shared_gpu(self.devices)) if fault is not None]
        proven = proven_ranks(tuple(self.rows), self.collective)
        sizes = Counter(device.group for device in self.devices)
        if proven == (1, 0):
            self.faults.append("the bandwidths of the rows fit no number of ranks")
        elif proven and sizes and not proven[0] <= max(sizes.values()) <= (proven[1] or math.inf):
            self.faults.append(
                f"{max(sizes.values())} ranks are listed, but the bandwidths are those of {_range(proven)}"
            )
        return Run(
            collective=self.collective,
            devices=tuple(self.devices),
            rows=tuple(self.rows),
            out_of_bounds=self.bounds,
            average_busbw_gbps=self.average,
            corrupt=self.corrupt,
            validated=self.validated,
            label=self.label,
            version=self.version,
            nccl_version=self.nccl_version,
            faults=tuple(self.faults),
        )


def _is_header(line: str) -> bool:
    return line.lstrip("# \t").split()[:3] in (["size", "count", "type"], ["bytes", "N", "type"])


def _range(ranks: tuple[int, int | None]) -> str:
    low, high = ranks
    return f"{low}" if low == high else f"{low} or more" if high is None else f"{low} to {high}"


@dataclass(slots=True)
class _Reader:
    """Sorts lines by their launcher's prefix and cuts each stream into runs."""

    drafts: dict[str, _Draft] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    released: set[str | None] = field(default_factory=set)  # Slurm jobs that were given back
    command: str | None = None  # the last program that a script or shell named before a table

    def read(self, line: str) -> None:
        line = strip_colours(line)
        if _FAILURE.search(line):
            self._keep(self.errors, line)
            return
        nccl = _NCCL.search(line)
        if nccl:
            if nccl[0] == "NCCL WARN":
                self._keep(self.warnings, line)
            if not _ROW.match(line):
                return
        elif reports_death(line):
            if revoked_job(line) not in self.released:
                self._keep(self.deaths, line)
            return
        if (job := released_job(line)) is not None:
            self.released.add(job)
        label, body = split_mark(line)
        draft = self.drafts.setdefault(label, _Draft(label))
        if self._starts(draft, body):
            self.runs.append(draft.end())
            draft = self.drafts[label] = _Draft(label)
        if not draft.read(body) and (command := _COMMAND.search(line)) is not None:
            self.command = command[1]
        if draft.begun and draft.hint is None:
            draft.hint = self.command

    def _starts(self, draft: _Draft, line: str) -> bool:
        """Whether this line begins the next run of its stream."""
        if draft.bounds is not None:
            return bool(_BEGIN.match(line)) or (draft.headed and _is_header(line))
        return draft.sizes is not None and "nThread" in line

    def _keep(self, where: list[str], line: str) -> None:
        if len(where) < _MOST and shorten(line) not in where:
            where.append(shorten(line))

    def end(self) -> Output:
        self.runs += [draft.end() for draft in self.drafts.values() if draft.begun or draft.bounds is not None]
        if not self.runs and not self.errors:
            raise ParseError("no run of nccl-tests in this text")
        return Output(
            runs=tuple(self.runs), errors=tuple(self.errors), warnings=tuple(self.warnings), deaths=tuple(self.deaths)
        )
