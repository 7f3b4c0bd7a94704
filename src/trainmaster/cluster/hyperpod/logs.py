"""Measurements from the logs of pods: losses, rates, NCCL, checkpoints. Pure: lines in, measurements out.

Lines of trainmaster's agent carry files of the pod (remote/framed_lines.py); other lines are taken as they are, so
that a manifest with another trainer is judged too.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime

from trainmaster.core import events, heartbeat
from trainmaster.core.plan import EVENTS_FILE
from trainmaster.remote.framed_lines import decode

_LOSS = re.compile(r"\bLoss:\s*(-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|nan|inf))", re.IGNORECASE)
_EVAL = re.compile(r"\beval\b", re.IGNORECASE)
_NCCL_TIMEOUT = re.compile(
    r"Watchdog caught collective operation timeout|watchdog got stuck|"
    # A line that states the limit ("Setting NCCL timeout to 1800 s", "NCCL timeout: 1800") is none.
    r"\bNCCL (?:operation |watchdog |collective )?(?:timed out|timeout\b(?!\s*(?:to|of|is|set|[:=])\s*\d))",
    re.IGNORECASE,
)
# What ends or will end a collective without a time-out of its own. The words are NCCL's (with `status=12` and, since
# 2.28, `status=IBV_WC_RETRY_EXC_ERR(12)`), PyTorch's (ProcessGroupNCCL), the OFI plugin's and the kernel driver's own.
# A warning of the OFI plugin alone is no fault: healthy nodes print that GDRCopy or a symbol of NCCL was not found.
_FAULTS = (
    (
        "NCCL heartbeat monitor",
        r"heartbeat monitor(?:ing)?\b.*\b(?:timed? ?out|terminat|stuck|no heartbeat)|no heartbeat of its watchdog",
    ),
    ("NCCL remote error", r"\bncclRemoteError\b|remote process exited or there was a network error"),
    ("NCCL system error", r"\bncclSystemError\b|unhandled system error"),
    (
        "NCCL internal or CUDA error",
        r"\bncclInternalError\b|\bncclUnhandledCudaError\b|unhandled cuda error|please report this issue to the NCCL",
    ),
    (
        "InfiniBand completion with error",
        r"\bcompletion\b.*\bwith (?:error|status=(?:[1-9]|IBV_WC_(?!SUCCESS)))|completion with error|CQE with error",
    ),
    (
        "OFI error",
        r"\bNET/OFI\b.*(?:\bcompleted with error\b|\bRC: ?-?[1-9]|\bUnable to (?:read|retrieve|register|post)\b"
        r"|\bCould not register\b|\binitiali[sz]ation failed\b|\bFatal:|\bunrecoverable\b)",
    ),
    ("uncorrectable ECC", r"uncorrectable ECC error|\bXid\b.*:\s*(?:48|94|95)\b"),
)
_FAULT = {what: re.compile(shape, re.IGNORECASE) for what, shape in _FAULTS}
_NO_FAULT = re.compile(r"\bno error|heartbeat monitor(?:ing)? (?:is )?(?:en|dis)abled", re.IGNORECASE)
_NCCL_READY = re.compile(r"\bNCCL INFO\b.*\bInit COMPLETE\b")
_BANDWIDTH = ('{"row":', '{"report":')
_NCCL_TESTS = re.compile(r"^# Avg bus bandwidth\s*:\s*(\d+(?:\.\d+)?)\s*$")  # last line of NVIDIA's nccl-tests, in GB/s
# A row of nccl-tests: size, count, type, redop, root, then time, algbw, busbw and #wrong, out of place and in place.
_TABLE_ROW = re.compile(
    r"^\s*\d+\s+\d+\s+[a-z]\w*\s+\w+\s+-?\d+\s+[\d.]+\s+[\d.]+\s+[\d.]+\s+(\d+|N/A)(?:\s+[\d.]+\s+[\d.]+\s+[\d.]+\s+(\d+|N/A))?\s*$"
)
_OUT_OF_BOUNDS = re.compile(r"^# Out of bounds values\s*:\s*(\d+)")
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,6})?)\d*(Z|[+-]\d\d:\d\d) ")
_RANK_MARK = re.compile(r"^\[[^\]]*\d\]:")


@dataclass(kw_only=True)
class PodLog:
    """Measurements of one pod."""

    lines: int = 0
    whole: bool = True  # the newest reading came to the end of the log
    losses: list[float] = field(default_factory=list)
    beat_losses: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    samples_per_s: list[float] = field(default_factory=list)
    memory_gib: float | None = None
    nccl_timeouts: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # other errors of collectives and GPUs, each with its kind
    wrong_rows: list[str] = field(default_factory=list)  # of a table of collectives whose values are wrong
    nccl_ready_at: datetime | None = None
    first_loss_at: datetime | None = None
    busbw_gb_s: list[float] = field(default_factory=list)  # of all-reduces between the pods, in GB/s
    bandwidth_over: bool = False  # its report was printed
    checkpoints: list[str] = field(default_factory=list)  # paths that the trainer has committed
    checkpoint_faults: list[str] = field(default_factory=list)

    def put(self, raw: bytes) -> None:
        """Take one line, with the time that the cluster put before it."""
        stamp = _STAMP.match(raw)
        at = datetime.fromisoformat((stamp[1] + stamp[2]).decode()) if stamp else None
        body = raw[stamp.end() :] if stamp else raw
        self.lines += 1
        if (frame := decode(body)) is None:
            self._put_text(body.decode(errors="replace"), at)
        elif frame.stream.startswith(EVENTS_FILE.partition(".")[0]) and frame.stream.endswith(".jsonl"):
            self._put_event(frame.data.decode(errors="replace"))
        else:
            self._put_text(frame.data.decode(errors="replace").rstrip("\n"), at)

    def _put_text(self, text: str, at: datetime | None) -> None:
        text = _RANK_MARK.sub("", text).lstrip()
        if _NCCL_TIMEOUT.search(text):
            self.nccl_timeouts.append(text[:300])
        elif (what := _find_fault(text)) is not None:
            self.faults.append(f"{what}: {text[:300]}")
        if text.startswith(_BANDWIDTH):
            self._put_bandwidth(text)
        elif match := _NCCL_TESTS.search(text):
            _append(self.busbw_gb_s, float(match[1]))
        elif wrong := _count_wrong(text):
            self.wrong_rows.append(f"{wrong} wrong values: {' '.join(text.split())[:200]}")
        if _NCCL_READY.search(text) and self.nccl_ready_at is None:
            self.nccl_ready_at = at
        if (beat := heartbeat.parse(text)) is not None:
            if beat.at == "train":
                self.beat_losses.append(beat.loss)
                self.tokens_per_s.append(beat.tokens_per_s)
        elif (match := _LOSS.search(text)) and not _EVAL.search(text):
            self.losses.append(float(match[1]))
        else:
            return
        self.first_loss_at = self.first_loss_at or at

    def _put_bandwidth(self, text: str) -> None:
        """A line of trainmaster.bench.collectives. A size that a rank did not finish, or got wrong, gives no speed."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            document = json.loads(text)
            self.bandwidth_over |= "report" in document
            row = document["row"]
            if row["wrong"]:
                self.wrong_rows.append(f"{row.get('size_bytes', '?')} bytes: {json.dumps(row['wrong'])[:200]}")
            elif len(row["heard"]) == row["ranks"]:
                _append(self.busbw_gb_s, row["busbw_gbps"])

    def _put_event(self, text: str) -> None:
        for line in events.split(text.encode(), offset=0, zone=UTC, last=True):
            if line.event is None:
                continue
            data, phase, word = line.event.data, line.event.phase, line.event.event
            if (phase, word) == ("CHECKPOINT", "saved") and data.get("tier") != "memory":
                self.checkpoints.append(str(data.get("path")))
            elif (phase, word) == ("CHECKPOINT", "failed"):
                self.checkpoint_faults.append(str(data.get("why")))
            elif (phase, word) == ("STEP", "metrics"):
                _append(self.samples_per_s, data.get("samples_per_s"))
                used = data.get("memory_gib")
                if isinstance(used, (int, float)) and not isinstance(used, bool) and used > 0:
                    self.memory_gib = max(self.memory_gib or 0.0, float(used))

    @property
    def loss_curve(self) -> list[float]:
        return self.losses or self.beat_losses


def _count_wrong(text: str) -> int:
    """Wrong values that a row or the summary of nccl-tests states."""
    match = _TABLE_ROW.match(text) or _OUT_OF_BOUNDS.match(text)
    return sum(int(count) for count in match.groups() if count not in (None, "N/A")) if match else 0


def _find_fault(text: str) -> str | None:
    """The kind of error in a line; None where there is none, or the line only says what would happen."""
    found = next((what for what, shape in _FAULT.items() if shape.search(text)), None)
    return None if found is None or _NO_FAULT.search(text) else found


def _append(values: list[float], value: object) -> None:
    if isinstance(value, (int, float)) and math.isfinite(value):
        values.append(float(value))
