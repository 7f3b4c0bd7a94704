"""Mix of sources by weight. Each batch has their shares as nearly as its size allows.

A wheel of slots names the source of each; row j of the batch begins at a place of its own on the wheel and moves on by
one slot a step. Which sample of a source that is follows by counting slots, so a mix is a function of the number too,
and a row keeps to its own samples of each source: a rank need not read what is another's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from trainmaster.core.config.data import MIX_SLOTS, DataConfig
from trainmaster.core.errors import DataError
from trainmaster.datasets import Rows, Shape, Source, load, stack

_SLOTS = MIX_SLOTS
_STRIDE = 631  # near _SLOTS over the golden ratio: steps of it fall evenly into any stretch of the circle


class Wheel:
    """A circle cut in proportion to the weights. Slot after slot it is walked in golden strides: both the slots of any
    stretch and slots at equal distances on the circle then have the shares as nearly as their number allows."""

    def __init__(self, weights: Sequence[float]) -> None:
        assert 0 < len(weights) <= _SLOTS
        exact = [weight / sum(weights) * _SLOTS for weight in weights]
        shares = [max(1, int(share)) for share in exact]
        while sum(shares) != _SLOTS:  # the one furthest from its due gives or takes
            step = 1 if sum(shares) < _SLOTS else -1
            part = max(range(len(shares)), key=lambda part: (exact[part] - shares[part]) * step)
            shares[part] += step
        circle = [part for part, share in enumerate(shares) for _ in range(share)]
        self._shares = shares
        self._slots = [circle[slot * _STRIDE % _SLOTS] for slot in range(_SLOTS)]
        self._before = [[0] for _ in shares]  # how many slots of a source lie before each slot
        for slot in self._slots:
            for part, counts in enumerate(self._before):
                counts.append(counts[-1] + (slot == part))

    def start(self, row: int, rows: int) -> int:
        """The slot that a row begins at: rows lie at equal distances on the circle."""
        return row * _SLOTS // rows * pow(_STRIDE, -1, _SLOTS) % _SLOTS

    def at(self, slot: int) -> int:
        return self._slots[slot % _SLOTS]

    def count(self, part: int, slot: int) -> int:
        """Number of this source's slots among the first `slot`, over all turns."""
        turns, rest = divmod(slot, _SLOTS)
        return turns * self._shares[part] + self._before[part][rest]


class Mix(Source):
    """Rows of several sources."""

    is_stream = True  # the wheel turns with the batch, which must therefore stay as it was

    def __init__(self, parts: Sequence[Source], weights: Sequence[float], shape: Shape) -> None:
        self._parts, self._batch = parts, shape.batch_sequences
        self._wheel = Wheel(weights)
        self._evaluated = [part for part, source in enumerate(parts) if source.held_out_rows != 0]
        self._held_out_wheel = Wheel([weights[part] for part in self._evaluated] or [1])
        _must_share_a_tokenizer(parts)
        self.vocab, self.tokenizer = max(part.vocab for part in parts), parts[0].tokenizer
        self.held_out_rows = self._count_held_out()
        self.summary = "; ".join(
            f"{weight / sum(weights):.1%} {part.summary or part.fingerprint}"
            for part, weight in zip(parts, weights, strict=True)
        )

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        return " + ".join(part.fingerprint for part in self._parts)

    @property
    def trouble(self) -> str | None:  # type: ignore[override]
        return next((part.trouble for part in self._parts if part.trouble), None)

    def row(self, number: int, *, held_out: bool) -> Rows:
        return self.rows([number], held_out=held_out)

    def rows(self, numbers: Sequence[int], *, held_out: bool = False) -> Rows:
        places = [self._held_out_place(number) if held_out else self._place(number) for number in numbers]
        by_place: dict[tuple[int, int], Rows] = {}
        for part in {part for part, _ in places}:
            wanted = [local for which, local in places if which == part]
            rows = self._parts[part].rows(wanted, held_out=held_out)
            by_place.update(((part, local), _only(rows, place)) for place, local in enumerate(wanted))
        return stack(by_place[place] for place in places)

    def state(self, upcoming: Sequence[int]) -> Mapping[str, Any]:
        states = [part.state(self._upcoming(number, upcoming)) for number, part in enumerate(self._parts)]
        return {"batch_sequences": self._batch, "parts": states}

    def join(self, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        joined = [part.join([state["parts"][number] for state in states]) for number, part in enumerate(self._parts)]
        return {"batch_sequences": self._batch, "parts": joined}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["batch_sequences"] != self._batch:
            raise DataError(
                f"a mix cannot change its batch: it began with batch_sequences {state['batch_sequences']}, "
                f"and {self._batch} would read some samples twice; set it back"
            )
        for part, inner in zip(self._parts, state["parts"], strict=True):
            part.restore(inner)

    def forget(self, upcoming: Sequence[int]) -> None:
        for number, part in enumerate(self._parts):
            part.forget(self._upcoming(number, upcoming))

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _place(self, number: int) -> tuple[int, int]:
        """Source of a sample, and its number in that source."""
        step, row = divmod(number, self._batch)
        part = self._wheel.at(self._wheel.start(row, self._batch) + step)
        return part, self._local(part, step, row)

    def _local(self, part: int, step: int, row: int) -> int:
        start = self._wheel.start(row, self._batch)
        turn = self._wheel.count(part, start + step) - self._wheel.count(part, start)
        return turn * self._batch + row

    def _upcoming(self, part: int, upcoming: Sequence[int]) -> list[int]:
        return [self._local(part, *divmod(number, self._batch)) for number in upcoming]

    def _held_out_place(self, number: int) -> tuple[int, int]:
        part = self._held_out_wheel.at(number)
        return self._evaluated[part], self._held_out_wheel.count(part, number)

    def _count_held_out(self) -> int | None:
        """Number of held-out rows for which every source has its share."""
        ends = [self._parts[part].held_out_rows for part in self._evaluated]
        if not ends:
            return 0
        if all(end is None for end in ends):
            return None
        wheel, number = self._held_out_wheel, 0
        while True:
            end = ends[wheel.at(number)]
            if end is not None and wheel.count(wheel.at(number), number) >= end:
                return number
            number += 1


def create(config: DataConfig, shape: Shape) -> Mix:
    parts = [load(config.of_part(part), shape) for part in config.parts]
    _must_hold_out(parts)
    return Mix(parts, [part.weight for part in config.parts], shape)


def _must_hold_out(parts: Sequence[Source]) -> None:
    """Held-out documents of one part may not be trained on in another; each part compares its own."""
    from trainmaster.datasets.prepared import Prepared

    for (first, source), (second, other) in itertools.permutations(enumerate(parts), 2):
        if isinstance(source, Prepared) and isinstance(other, Prepared):
            document = source.find_trained_on(other)
            if document is not None:
                raise DataError(
                    f"data.parts[{first}]: its held-out document {document} is trained on in data.parts[{second}]; "
                    "remove it from one of the two"
                )


def _only(rows: Rows, place: int) -> Rows:
    here = slice(place, place + 1)
    documents = None if rows.documents is None else rows.documents[here]
    return Rows(tokens=rows.tokens[here], targets=rows.targets[here], documents=documents)


def _must_share_a_tokenizer(parts: Sequence[Source]) -> None:
    for part in parts[1:]:
        if part.tokenizer != parts[0].tokenizer:
            raise DataError(
                "data.parts: they were made with different tokenizers, so one number means two words: "
                f"{parts[0].summary or parts[0].fingerprint}; {part.summary or part.fingerprint}"
            )
