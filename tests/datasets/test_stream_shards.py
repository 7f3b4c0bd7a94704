"""A stream on any number of ranks: every document once a pass, the same rows for ever, also where it fails."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from corpus import pairs, row_texts, texts

from trainmaster.core.config.data import DataConfig
from trainmaster.core.errors import DataError, SpecError
from trainmaster.core.schema import build
from trainmaster.datasets import Shape
from trainmaster.datasets._stream_shards import Documents, Stream, count_lanes
from trainmaster.datasets.corpus import retry
from trainmaster.datasets.corpus.tokenizer import Bytes

BATCH = 12


class Files:
    """Documents in memory; every `fails`-th reading breaks off."""

    def __init__(self, files: list[list[str]], *, fails: int | None = None, fingerprint: str = "v1") -> None:
        self._files, self._fails, self.fingerprint = files, fails, fingerprint
        self.files, self.count = len(files), 0

    def read(self, file: int, skip: int) -> Iterator[str]:
        for text in self._files[file][skip:]:
            self.count += 1
            if self._fails is not None and self.count % self._fails == 0:
                raise ConnectionResetError("cut")
            yield text

    def at(self, fingerprint: str) -> Documents:
        return Files([[f"{fingerprint}:{text}" for text in file] for file in self._files], fingerprint=fingerprint)


def files(count: int = 6, each: int = 40) -> list[list[str]]:
    return [texts(each, start=1000 * number) for number in range(count)]


def stream(documents: Documents | None = None, *, batch: int = BATCH, **data: Any) -> Stream:
    config = build(DataConfig, {"source": "hub", "dataset": "a/b", "held_out_share": 0.0, "readers": 2, **data})
    shape = Shape(sequence_tokens=48, batch_sequences=batch)
    return Stream(documents or Files(files()), Bytes(), config, shape, name="test")


def share(step: int, rank: int, ranks: int) -> range:
    each = BATCH // ranks
    return range(step * BATCH + rank * each, step * BATCH + (rank + 1) * each)


def run(ranks: int, steps: range, *, state: Any = None, documents: Any = None, **data: Any) -> tuple[list[str], Any]:
    """As so many ranks do it: each its share of every step, two steps ahead of the one it consumes."""
    streams = [stream(documents() if documents else None, **data) for _ in range(ranks)]
    if state is not None:
        for one in streams:
            one.restore(json.loads(json.dumps(state)))
    consumed = []
    for step in steps:
        for rank, one in enumerate(streams):
            consumed += row_texts(one.rows(share(step, rank, ranks)))
            one.rows(share(step + 2, rank, ranks))  # read ahead, and not part of any state
            one.forget(range(step * BATCH, (step + 1) * BATCH))
    end = range(steps.stop * BATCH, (steps.stop + 1) * BATCH)
    joined = streams[0].join([one.state(end) for one in streams])
    for one in streams:
        one.close()
    return consumed, joined


@pytest.mark.parametrize("rows", ["concat", "pack"])
def test_four_ranks_then_two_then_three_read_what_one_reads(rows: str) -> None:
    alone, _ = run(1, range(14), rows=rows)
    state, moved = None, []
    for ranks, steps in ((4, range(5)), (2, range(5, 9)), (3, range(9, 14))):
        consumed, state = run(ranks, steps, state=state, rows=rows)
        moved += consumed
    assert moved == alone
    assert len(set(alone)) == len(alone), "no row came twice, on whatever rank"


def test_a_source_that_breaks_off_again_and_again_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_FIRST_S", 0.0)
    whole, _ = run(2, range(6))
    broken, _ = run(2, range(6), documents=lambda: Files(files(), fails=23))
    assert broken == whole


class Stutters(Files):
    """Every opening fails once before it works; that of a new pass too."""

    def __init__(self) -> None:
        super().__init__(files(count=12, each=3))
        self._failed: set[tuple[int, int]] = set()

    def read(self, file: int, skip: int) -> Iterator[str]:
        if (file, skip) not in self._failed:
            self._failed.add((file, skip))
            raise ConnectionResetError("refused")
        self._failed.clear()
        return super().read(file, skip)


def test_a_cut_at_the_beginning_of_a_pass_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_FIRST_S", 0.0)
    whole, state = run(1, range(12), documents=lambda: Files(files(count=12, each=3)))
    assert all(turn > 0 for _, turn, *_ in state["lanes"].values()), "long enough for a second pass"
    assert run(1, range(12), documents=Stutters)[0] == whole


class Falters(Bytes):
    """Every third call of the tokenizer fails."""

    calls = 0

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        self.calls += 1
        if self.calls % 3 == 0:
            raise OSError("tokenizer away")
        return super().encode_many(texts)


def test_no_document_is_skipped_where_the_tokenizer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_FIRST_S", 0.0)
    whole, _ = run(1, range(6))
    monkeypatch.setattr(f"{__name__}.Bytes", Falters)
    assert run(1, range(6))[0] == whole


def test_a_pass_holds_every_document_once_and_nothing_else() -> None:
    one = stream(rows="pack", shuffle=True, seed=3, batch=6)
    wanted: Counter[tuple[int, int]] = Counter()
    for file in files():
        for text in file:
            tokens = [*text.encode(), 255]
            wanted.update(itertools.pairwise(tokens))
    found: Counter[tuple[int, int]] = Counter()
    for number in range(6 * 80):
        row = one.rows([number])
        # Lanes end their passes at different times; each row tells where its lane stands behind it.
        position = one._lanes[number % 6].position(number // 6 + 1)
        assert position is not None
        if position[0] == 0:
            found.update(pairs(row))
    assert position[0] >= 1, "long enough for a whole pass"
    assert not found - wanted and sum((wanted - found).values()) < 6 * 48, "but for rows that cross into the next pass"


def test_a_share_is_held_out_by_content_and_never_trained_on() -> None:
    one = stream(held_out_share=0.2, rows="pack")
    trained = {name for row in row_texts(one.rows(range(BATCH * 8))) for name in names(row)}
    kept = {name for row in row_texts(one.rows(range(12), held_out=True)) for name in names(row)}
    assert kept and trained and not kept & trained
    assert row_texts(one.rows(range(12), held_out=True)) == row_texts(one.rows(range(12), held_out=True))


def names(row: str) -> list[str]:
    return [part.split(">")[0] for part in row.split("<")[1:] if ">" in part]


def test_a_run_keeps_the_version_it_began_with() -> None:
    _, state = run(1, range(3))
    newer = stream(Files(files(), fingerprint="v2"))
    newer.restore(state)
    assert newer.fingerprint == "v1" and "v1:<" in "".join(row_texts(newer.rows(range(36, 48))))


def test_other_lanes_or_files_are_refused() -> None:
    _, state = run(1, range(2))
    with pytest.raises(SpecError, match="began with 6 lanes and would now have 4"):
        stream(batch=8).restore(state)
    with pytest.raises(DataError, match="had 6 files when this was saved, and has 7 now"):
        stream(Files(files(7)), lanes=6).restore(state)


def test_the_number_of_lanes_divides_the_batch() -> None:
    assert [count_lanes(None, 512, files) for files in (1, 7, 1000)] == [1, 4, 32]
    assert count_lanes(None, 12, 9) == 6 and count_lanes(64, 512, 1000) == 64
    with pytest.raises(SpecError, match="use 4"):
        count_lanes(5, 12, 100)


def test_a_dataset_without_any_text_is_told_not_searched_for_ever() -> None:
    with pytest.raises(DataError, match="gave no document"):
        stream(Files([[" ", ""]] * 6)).rows(range(BATCH))
