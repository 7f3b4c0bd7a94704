"""A place to run that runs nothing: attempts last a stated time, write events at a stated rate, and go wrong by seed.

    place = Place(parse("run_s=600,event_s=4,fail=0.02,vanish=0.01,hang=0.01,seed=7"))
    await reconcile.run(db, home, stop=stop, load=place.load)          # specs say `target: sim`

It fits the contract of targets/ and is not in its registry: what it "trains" must not be taken for a training. An
attempt is known by when it began; what it has written by now follows from that, so a thousand of them cost no memory
that grows and no process. Every line has the same length: the place of a line in the stream says its number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from trainmaster.core.errors import TargetError, Unreachable, UsageError
from trainmaster.core.events import Event
from trainmaster.core.plan import EVENTS_FILE, ExitRecord
from trainmaster.core.states import Reason, TargetState
from trainmaster.targets import FileSize, Handle, Placement, Poll, Submission

NAME = "sim"
LINE_BYTES = 320  # of every line, filled with spaces; the longest that is written has about 290
_HEAD = 3  # lines before the first step
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_EXAMPLE = "run_s=600,event_s=4,fail=0.02,seed=7"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How attempts go. Shares are of all attempts, from 0 to 1; who is struck, and when, follows from the seed."""

    run_s: float = 600.0
    event_s: float = 4.0  # between two lines of an attempt
    epoch_lines: int = 25  # every so many lines tell of an epoch
    eval_lines: int = 50  # and every so many of an evaluation
    fail: float = 0.0  # end with an exit record that says so
    vanish: float = 0.0  # are gone, without one
    hang: float = 0.0  # go on and write nothing more
    deaf: float = 0.0  # of the questions: not answered ("cannot ask")
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("run_s", "event_s"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise UsageError(f"{name} is {value}; it must be above 0")
        for name in ("epoch_lines", "eval_lines"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("fail", "vanish", "hang", "deaf"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it is a share between 0 and 1")
        if self.fail + self.vanish + self.hang > 1:
            raise UsageError("fail, vanish and hang are shares of the same attempts; together they are over 1")


def parse(words: str) -> Shape:
    """A shape from `name=value,…`; UsageError names what is wrong."""
    kinds: dict[str, type[Any]] = {item.name: type(item.default) for item in dataclasses.fields(Shape)}
    values: dict[str, Any] = {}
    for word in words.split(",") if words else ():
        name, _, text = word.partition("=")
        if name not in kinds:
            raise UsageError(f"{name!r}: no such word; there are {', '.join(kinds)}, as in {_EXAMPLE}")
        try:
            values[name] = kinds[name](text)
        except ValueError:
            raise UsageError(f"{name}={text!r}: not a number") from None
    return Shape(**values)


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """One attempt: when it began and what will become of it."""

    began: float
    stop_at: float  # when it goes wrong, or is done
    fate: str  # done, fail, vanish, hang
    stopped: tuple[float, Reason] | None = None  # asked to stop: when, and why
    released: float | None = None
    last_line: tuple[int, bytes] = (-1, b"")  # it is read twice: as new, and again before the next one

    def wrote_until(self, now: float) -> float:
        ends = [now, self.stop_at]
        if self.stopped is not None:
            ends.append(self.stopped[0])
        if self.released is not None:
            ends.append(self.released)
        return min(ends)


class Place:
    """Simulated attempts, all of one shape, kept in memory. `now` are seconds since 1970."""

    def __init__(self, shape: Shape, *, now: Callable[[], float] = time.time) -> None:
        self._shape, self._now = shape, now
        self._attempts: dict[str, _Attempt] = {}
        self._noise = random.Random(shape.seed)

    def load(self, word: str) -> Place:
        """For `reconcile.run` and `submit`."""
        if word != NAME:
            raise UsageError(f"target: {word!r} is not {NAME}")
        return self

    def plan(self, placement: Placement) -> Submission:
        return Submission(handle={"attempt": placement.attempt}, files={}, commands=())

    async def submit(self, submission: Submission) -> Handle:
        name = str(submission.handle["attempt"])
        if name not in self._attempts:
            self._attempts[name] = self._begin(name)
        return {**submission.handle, "submitted": True}

    async def poll(self, handle: Handle) -> Poll:
        if self._shape.deaf and self._noise.random() < self._shape.deaf:
            return Poll(state=TargetState.UNKNOWN, note="the simulated place does not answer")
        attempt, now = self._attempts.get(str(handle["attempt"])), self._now()
        if attempt is None:
            lost = bool(handle.get("submitted"))  # the memory of another life
            return Poll(state=TargetState.LOST if lost else TargetState.WAITING)
        over = attempt.wrote_until(now) < now
        if not over or (attempt.fate == "hang" and attempt.stopped is None and attempt.released is None):
            return Poll(state=TargetState.RUNNING)
        return self._over(str(handle["attempt"]), attempt, attempt.wrote_until(now))

    async def read(self, handle: Handle, stream: str, *, offset: int, limit: int) -> bytes:
        if stream != EVENTS_FILE:
            raise TargetError(f"sim: {stream!r:.200} is not a stream of an attempt")
        if self._shape.deaf and self._noise.random() < self._shape.deaf:
            raise Unreachable("the simulated place does not answer")
        attempt = self._attempts.get(str(handle["attempt"]))
        if attempt is None or limit <= 0:
            return b""
        first, skip = divmod(offset, LINE_BYTES)
        last = min(self._written(attempt), first + 1 + (skip + limit) // LINE_BYTES)
        lines = b"".join(self._line(attempt, number) for number in range(first, last))
        return lines[skip : skip + limit]

    async def list_files(self, handle: Handle) -> list[FileSize]:
        attempt = self._attempts.get(str(handle["attempt"]))
        if attempt is None:
            return []
        return [FileSize(name=EVENTS_FILE, size_bytes=self._written(attempt) * LINE_BYTES)]

    async def cancel(self, handle: Handle, *, reason: str) -> None:
        attempt = self._attempts.get(str(handle["attempt"]))
        if attempt is not None and attempt.stopped is None:
            attempt.stopped = self._now(), Reason(reason.partition(":")[0])

    async def release(self, handle: Handle) -> None:
        attempt = self._attempts.get(str(handle["attempt"]))
        if attempt is not None and attempt.released is None:
            attempt.released = self._now()

    def _begin(self, name: str) -> _Attempt:
        digest = hashlib.sha256(f"{self._shape.seed} {name}".encode()).digest()
        draw = random.Random(digest)
        lot, fate = draw.random(), "done"
        for kind in ("fail", "vanish", "hang"):
            if lot < (share := getattr(self._shape, kind)):
                fate = kind
                break
            lot -= share
        # A part of the rhythm: a thousand attempts that begin together do not write together.
        began = self._now() + draw.random() * self._shape.event_s
        lasts = self._shape.run_s * (1.0 if fate == "done" else draw.random())
        return _Attempt(began=began, stop_at=began + lasts, fate=fate)

    def _written(self, attempt: _Attempt) -> int:
        """Lines that are there by now."""
        since = attempt.wrote_until(self._now()) - attempt.began
        return 0 if since < 0 else 1 + int(since / self._shape.event_s)

    def _line(self, attempt: _Attempt, number: int) -> bytes:
        if attempt.last_line[0] != number:
            attempt.last_line = number, self._make_line(attempt, number)
        return attempt.last_line[1]

    def _make_line(self, attempt: _Attempt, number: int) -> bytes:
        ts = datetime.fromtimestamp(attempt.began + number * self._shape.event_s, UTC)
        text = _render(_event(self._shape, number, ts)).encode()
        assert len(text) < LINE_BYTES, "a simulated line is longer than all lines are"
        return text.ljust(LINE_BYTES - 1) + b"\n"

    def _over(self, name: str, attempt: _Attempt, at: float) -> Poll:
        reason: Reason | None = None
        if attempt.stopped is not None and at == attempt.stopped[0]:
            reason = attempt.stopped[1]
        elif attempt.fate == "vanish" or attempt.released == at:
            return Poll(state=TargetState.LOST, note="the simulated attempt is gone")
        elif attempt.fate == "fail":
            reason = Reason.SCRIPT_FAILED
        record = ExitRecord(
            attempt=name, ok=reason is None, ended_at=datetime.fromtimestamp(at, UTC).isoformat(), reason=reason,
            message="" if reason is None else "the simulated attempt failed",
        )  # fmt: skip
        return Poll(state=TargetState.SUCCEEDED if record.ok else TargetState.FAILED, exit=record, note=record.message)


def _render(event: Event) -> str:
    """As core.events does, without its look at every value: what is simulated must not cost what is measured."""
    assert event.ts is not None
    line = {"v": 1, "ts": event.ts.isoformat(timespec="microseconds"), "seq": event.seq, "phase": event.phase,
            "event": event.event}  # fmt: skip
    if event.epoch is not None:
        line["epoch"] = event.epoch
    return _to_json({**line, "data": event.data})


def _event(shape: Shape, number: int, ts: datetime) -> Event:
    """Line `number` of every attempt."""
    step, seq = max(0, number - _HEAD + 1), number + 1
    loss = round(1.5 + 8 / (1 + step), 4)
    if number == 0:
        return Event(phase="PROJECT", event="start", ts=ts, seq=seq, data={"host": "sim", "version": "sim"})
    if number == 1:
        return Event(phase="PREFLIGHT", event="end", ts=ts, seq=seq, data={"overall": "PASS"})
    if number == _HEAD - 1:
        return Event(phase="TRAINING", event="start", ts=ts, seq=seq, data={"ranks": 8, "device": "sim"})
    if step % shape.epoch_lines == 0:
        epoch = step // shape.epoch_lines
        data = {"step": step, "avg_loss": loss, "model_path": f"checkpoints/step-{step}", "optimizer_path": None}
        return Event(phase="TRAINING", event="epoch_complete", ts=ts, seq=seq, epoch=epoch, data=data)
    if step % shape.eval_lines == 1:
        data = {"step": step, "loss": loss, "perplexity": round(math.exp(loss), 3)}
        return Event(phase="EVAL_MODEL", event="metrics", ts=ts, seq=seq, data=data)
    data = {
        "step": step, "loss": loss, "lr": 0.0003, "grad_norm": 0.71, "tokens_per_s": 64_447.0, "step_s": 1.016,
        "mfu": 0.463, "memory_gib": 38.0,
    }  # fmt: skip
    return Event(phase="STEP", event="metrics", ts=ts, seq=seq, data=data)
