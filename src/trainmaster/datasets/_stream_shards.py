"""Stream sharding: a stream that can only be read forwards, shared by any number of ranks, resumed on any other.

The stream is read in a fixed number of lanes. A lane has its own files and makes its own rows from them, one after
another; row j of every batch belongs to one lane. The rows depend on the lane alone, not on the rank that reads it, so
each rank reads the lanes of its rows. The position of a lane is four numbers (pass, file, document, token), whatever
was read ahead; the positions of all lanes are the state of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from trainmaster.core.config.data import DataConfig
from trainmaster.core.errors import DataError, Fault, SpecError
from trainmaster.datasets import Rows, Shape, Source, stack, whole
from trainmaster.datasets._packing import fill_row
from trainmaster.datasets._shuffle import shuffled
from trainmaster.datasets.corpus.prepare import is_held_out
from trainmaster.datasets.corpus.retry import Retry
from trainmaster.datasets.corpus.tokenizer import Tokenizer

_LANES = 32  # at most, unless stated: each keeps a connection and a piece of a file in memory
_AT_ONCE = 8  # documents a lane tokenises together

Position = tuple[int, int, int, int]  # pass, place among the lane's files of that pass, document, token
_BEGINNING: Position = (0, 0, 0, 0)


class Documents(Protocol):
    """Files of documents that can be read from a given document on."""

    files: int
    fingerprint: str  # which content, exactly

    def read(self, file: int, skip: int) -> Iterator[str]:
        """The texts of a file from document number `skip` on."""

    def at(self, fingerprint: str) -> Documents:
        """The same documents as they were under that fingerprint."""


class Stream(Source):
    """Rows of all lanes, and the position of each lane."""

    is_stream = True

    def __init__(
        self,
        documents: Documents,
        tokenizer: Tokenizer,
        config: DataConfig,
        shape: Shape,
        *,
        name: str,
        held_out: Documents | None = None,
    ) -> None:
        """`held_out`: separate documents for evaluation; None: a share of all documents is held out."""
        self.retry = Retry(name)
        self.vocab, self.tokenizer = tokenizer.vocab, tokenizer.sha256
        self._documents, self._held_out = documents, held_out
        self._encoder, self._config, self._shape = tokenizer, config, shape
        self._count = count_lanes(config.lanes, shape.batch_sequences, documents.files)
        # Evaluations read lanes of their own; a small held-out split has few files.
        self._held_out_count = min(self._count, (held_out or documents).files)
        self._each = shape.batch_sequences // self._count  # rows of a batch that come from one lane
        self._begun: dict[int, tuple[int, Position]] = {}  # lane → where a restored run begins
        self._lanes: dict[int, _Lane] = {}
        self._held_out_lanes: dict[int, _Lane] = {}
        self._pool = ThreadPoolExecutor(config.readers, thread_name_prefix="lane")
        self.held_out_rows = None if held_out is not None or config.held_out_share else 0
        self.summary = f"{name}: a stream of {documents.files:,} files in {self._count} lanes"

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return self._documents.fingerprint

    @property
    def trouble(self) -> str | None:  # type: ignore[override]
        return self.retry.trouble

    def row(self, number: int, *, held_out: bool) -> Rows:
        return self.rows([number], held_out=held_out)

    def rows(self, numbers: Sequence[int], *, held_out: bool = False) -> Rows:
        wanted = [self._held_out_place(number) if held_out else self._place(number) for number in numbers]
        turns: dict[int, list[int]] = {}
        for lane, turn in wanted:
            turns.setdefault(lane, []).append(turn)
        # Each lane by one thread at a time, in the order of its rows.
        jobs = {lane: self._pool.submit(self._lane(lane, held_out).rows, sorted(turns[lane])) for lane in turns}
        made = {lane: job.result() for lane, job in jobs.items()}
        return stack(made[lane][turn] for lane, turn in wanted)

    def state(self, upcoming: Sequence[int]) -> Mapping[str, Any]:
        lanes = {}
        for lane, turn in self._lowest(upcoming).items():
            known = self._begun.get(lane)
            position = self._lanes[lane].position(turn) if lane in self._lanes else None
            if position is None and known is not None and known[0] == turn:
                position = known[1]
            if position is None and turn == 0:
                position = _BEGINNING
            if position is not None:
                lanes[str(lane)] = [turn, *position]
        return {"documents": self.fingerprint, "files": self._documents.files, "count": self._count, "lanes": lanes}

    def join(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        lanes: dict[str, Any] = {}
        for state in states:
            lanes.update(state["lanes"])
        missing = [lane for lane in range(self._count) if str(lane) not in lanes]
        assert not missing, f"no rank knows where lanes {missing} stand"
        return {**states[0], "lanes": {name: lanes[name] for name in sorted(lanes, key=int)}}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["count"] != self._count:
            raise SpecError([_other_lanes(state["count"], self._count)])
        if state["documents"] != self.fingerprint:
            self._documents = self._documents.at(state["documents"])
        if state["files"] != self._documents.files:
            raise DataError(
                f"{self.summary}: it had {state['files']} files when this was saved, and has {self._documents.files} "
                "now; what comes next cannot be known"
            )
        self._lanes = {}
        self._begun = {int(lane): (turn, tuple(place)) for lane, (turn, *place) in state["lanes"].items()}

    def forget(self, upcoming: Sequence[int]) -> None:
        for lane, turn in self._lowest(upcoming).items():
            if lane in self._lanes:
                self._lanes[lane].forget(turn)

    def close(self) -> None:
        self.retry.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _place(self, number: int) -> tuple[int, int]:
        """Lane of a sample, and the number of its row in that lane."""
        step, row = divmod(number, self._shape.batch_sequences)
        return row // self._each, step * self._each + row % self._each

    def _held_out_place(self, number: int) -> tuple[int, int]:
        return number % self._held_out_count, number // self._held_out_count

    def _lowest(self, upcoming: Sequence[int]) -> dict[int, int]:
        """First row of each lane that is still needed."""
        lowest: dict[int, int] = {}
        for number in upcoming:
            lane, turn = self._place(number)
            lowest[lane] = min(turn, lowest.get(lane, turn))
        return lowest

    def _lane(self, lane: int, held_out: bool) -> _Lane:
        lanes = self._held_out_lanes if held_out else self._lanes
        if lane not in lanes:
            documents = self._held_out if held_out and self._held_out is not None else self._documents
            share = self._config.held_out_share if self._held_out is None else None
            reader = _Reader(
                documents=documents,
                files=(
                    lane,
                    self._held_out_count if held_out else self._count,
                    self._config.seed if self._config.shuffle else None,
                ),
                keep=None if share is None else (share, held_out),
                encoder=self._encoder,
                pack=self._config.rows == "pack",
                length=self._shape.sequence_tokens,
                retry=self.retry,
            )
            turn, begin = (0, _BEGINNING) if held_out else self._begun.get(lane, (0, _BEGINNING))
            lanes[lane] = _Lane(reader, turn, begin)
        return lanes[lane]


def count_lanes(stated: int | None, batch_sequences: int, files: int) -> int:
    """Number of lanes: a divisor of the batch, with at least one file for each."""
    if stated is not None and (batch_sequences % stated or stated > files):
        near = max(n for n in range(1, min(stated, files) + 1) if batch_sequences % n == 0)
        message = f"{stated} must divide batch_sequences {batch_sequences} and be at most the {files} files; use {near}"
        raise SpecError([Fault(path="data.lanes", message=message)])
    most = stated or min(_LANES, files)
    return max(n for n in range(1, min(most, batch_sequences) + 1) if batch_sequences % n == 0)


def _other_lanes(before: int, now: int) -> Fault:
    message = f"the run began with {before} lanes and would now have {now}; set data.lanes: {before} and the old batch"
    return Fault(path="data.lanes", message=message)


class _Lane:
    """Rows of one lane that are still needed, with the position of each."""

    def __init__(self, reader: _Reader, turn: int, begin: Position) -> None:
        self._reader = reader
        self._next = turn  # the row the reader makes next
        self._marks: dict[int, Position] = {turn: begin}
        self._kept: dict[int, Rows] = {}
        reader.seek(begin)

    def rows(self, turns: Sequence[int]) -> dict[int, Rows]:
        return {turn: self._row(turn) for turn in turns}

    def position(self, turn: int) -> Position | None:
        # Asked by the main thread while a reader adds to it; one look-up in a dict needs no lock.
        return self._marks.get(turn)

    def forget(self, turn: int) -> None:
        for kept in [known for known in self._kept if known < turn]:
            del self._kept[kept]
        for mark in [known for known in self._marks if known < turn]:
            del self._marks[mark]

    def _row(self, turn: int) -> Rows:
        if turn not in self._kept and turn < self._next:
            back = max((mark for mark in self._marks if mark <= turn), default=None)
            self._next, begin = (0, _BEGINNING) if back is None else (back, self._marks[back])
            self._reader.seek(begin)
        while turn not in self._kept:
            # Rows between are made too, because there is no other way to know where this one begins.
            self._kept[self._next] = self._reader.row()
            self._next += 1
            self._marks[self._next] = self._reader.position
        return self._kept[turn]


class _Reader:
    """Reader of a lane: its rows one after another, from any position on."""

    def __init__(
        self,
        *,
        documents: Documents,
        files: tuple[int, int, int | None],
        keep: tuple[float, bool] | None,
        encoder: Tokenizer,
        pack: bool,
        length: int,
        retry: Retry,
    ) -> None:
        """`files`: lane, lanes, seed of the order; `keep`: the share held out, and whether to read that share."""
        self._documents, self._files, self._keep, self._encoder = documents, files, keep, encoder
        self._pack, self._length, self._retry = pack, length, retry
        self.position = _BEGINNING

    def seek(self, position: Position) -> None:
        self.position = position
        turn, place, document, _ = position
        self._ahead: list[tuple[Position, list[int]]] = []  # documents tokenised: where each is, and its tokens
        self._tail = (turn, place, document)  # what is read after them
        self._texts: Iterator[str] | None = None
        self._gave_any = True  # whether the pass has given any document; assumed of a pass entered in the middle

    def row(self) -> Rows:
        return self._packed() if self._pack else self._concat()

    def _concat(self) -> Rows:
        row: list[int] = []
        while True:
            (turn, place, document, _), tokens = self._current()
            offset = self.position[3]
            taken = tokens[offset : offset + self._length + 1 - len(row)]
            row += taken
            if len(row) > self._length:
                # The next row begins with this one's last token, which has been a target only.
                self.position = (turn, place, document, offset + len(taken) - 1)
                return whole(torch.tensor(row, dtype=torch.int64))
            self._drop()

    def _packed(self) -> Rows:
        pieces: list[Tensor] = []
        space = self._length
        while True:
            (turn, place, document, _), tokens = self._current()
            offset = self.position[3]
            pairs = len(tokens) - 1 - offset
            if pairs > space and pieces:
                break
            taken = min(pairs, space)
            if taken:
                pieces.append(torch.tensor(tokens[offset : offset + taken + 1], dtype=torch.int64))
                space -= taken
            if taken == pairs:
                self._drop()
            else:
                self.position = (turn, place, document, offset + taken)
            if not space:
                break
        return fill_row(pieces, self._length)

    def _current(self) -> tuple[Position, list[int]]:
        """The document that `position` is in; documents that are not for this reader are stepped over."""
        while not self._ahead:
            self._retry.call(self._read_ahead)
        where, tokens = self._ahead[0]
        if self.position[:3] != where[:3]:
            self.position = where
        return where, tokens

    def _drop(self) -> None:
        where, _ = self._ahead.pop(0)
        self.position = self._ahead[0][0] if self._ahead else (where[0], where[1], where[2] + 1, 0)

    def _read_ahead(self) -> None:
        """Read and encode the next documents; a failure leaves the place to read from as it was, for the next try."""
        turn, place, document = self._tail
        lane, lanes, seed = self._files
        count = self._documents.files
        gave_any = self._gave_any
        if lane + place * lanes >= count:
            if not gave_any:
                raise DataError(f"a whole pass over lane {lane} gave no document; is the field the right one?")
            turn, place, document, gave_any = turn + 1, 0, 0, False
        file = lane + place * lanes
        if seed is not None:
            file = shuffled(file, count, seed=seed, turn=turn)
        try:
            if self._texts is None:
                self._texts = self._documents.read(file, document)
            texts = list(islice(self._texts, _AT_ONCE))
            mine = [(document + number, text) for number, text in enumerate(texts) if self._is_mine(text)]
            encoded = self._encoder.encode_many([text for _, text in mine])
        except BaseException:
            self._texts = None  # opened anew, from this very document
            raise
        ended = len(texts) < _AT_ONCE
        if ended:
            self._texts = None
        self._tail = (turn, place + 1, 0) if ended else (turn, place, document + len(texts))
        self._gave_any = gave_any or bool(mine)
        for (number, _), tokens in zip(mine, encoded, strict=True):
            self._ahead.append(((turn, place, number, 0), [*tokens, self._encoder.end]))

    def _is_mine(self, text: str) -> bool:
        if not text.strip():
            return False
        return self._keep is None or is_held_out(text, self._keep[0]) is self._keep[1]
