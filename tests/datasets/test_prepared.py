"""Prepared tokens: each token once a pass, whole documents when packed, and damage told before a run begins."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from corpus import END, make, pairs, row_texts, source, texts, write_jsonl

from trainmaster.core.errors import DataError, SpecError


def all_pairs(documents: list[str]) -> Counter[tuple[int, int]]:
    """What packing promises: every pair of neighbours of every document, its end included."""
    found: Counter[tuple[int, int]] = Counter()
    for text in documents:
        tokens = [*text.encode(), END]
        found.update(itertools.pairwise(tokens))
    return found


def test_a_pass_over_concatenated_rows_holds_the_whole_stream_once(tmp_path: Path) -> None:
    make(tmp_path / "set", texts(40), files=3)
    data = source(source="prepared", path=str(tmp_path / "set"), shuffle=False, sequence_tokens=32)
    stream = "".join(f"{text}\xff" for n in range(3) for text in texts(40)[n::3])
    count = (len(stream) - 1) // 32
    assert "".join(row_texts(data.rows(range(count)))) == stream[: count * 32], "across shard borders too"
    shuffled = source(source="prepared", path=str(tmp_path / "set"), seed=5, sequence_tokens=32)
    for turn in (0, 1):
        rows = row_texts(shuffled.rows(range(turn * count, (turn + 1) * count)))
        assert sorted(rows) == sorted(row_texts(data.rows(range(count))))
    assert row_texts(shuffled.rows(range(count))) != row_texts(shuffled.rows(range(count, 2 * count)))


@pytest.mark.parametrize("tokens", [8, 32, 500])
def test_packed_rows_hold_every_pair_of_every_document_once(tmp_path: Path, tokens: int) -> None:
    documents = texts(60)  # some longer than a row of 8 or 32, some shorter; 500 holds several
    make(tmp_path / "set", documents, files=2)
    data = source(source="prepared", path=str(tmp_path / "set"), rows="pack", sequence_tokens=tokens)
    count = len(data._train)  # type: ignore[attr-defined]
    rows = data.rows(range(count))
    assert Counter(pairs(rows)) == all_pairs(documents)
    assert rows.documents is not None and rows.documents.dtype == torch.int32
    for row, targets, numbers in zip(rows.tokens, rows.targets, rows.documents, strict=True):
        padding = targets == -100
        changes = (numbers[1:] != numbers[:-1]).nonzero().flatten().tolist()
        for at in changes:
            # A border lies behind a document's end, and nothing is predicted across it.
            assert targets[at] in (END, -100) or tokens < 40
        inside = [at for at in range(tokens - 1) if not padding[at] and at not in changes]
        assert all(targets[at] == row[at + 1] for at in inside)
        assert not padding.any() or len(set(numbers[padding].tolist())) == 1, "padding is a document of its own"
    assert 0.5 < data._train.fill <= 1  # type: ignore[attr-defined]


def test_held_out_documents_are_chosen_by_content_so_copies_stay_together(tmp_path: Path) -> None:
    make(tmp_path / "set", [*texts(200), *texts(200)], held_out_share=0.2)
    data = source(source="prepared", path=str(tmp_path / "set"), rows="pack", sequence_tokens=200)
    assert data.held_out_rows
    kept = {name for row in row_texts(data.rows(range(data.held_out_rows), held_out=True)) for name in names(row)}
    trained = {name for row in row_texts(data.rows(range(500))) for name in names(row)}
    assert not kept & trained and kept | trained == {f"<{n}>" for n in range(200)}
    assert 15 < len(kept) < 70


def names(row: str) -> list[str]:
    return [f"<{part.split('>')[0]}>" for part in row.split("<")[1:] if ">" in part]


def test_two_ranks_never_get_the_same_rows(tmp_path: Path) -> None:
    make(tmp_path / "set", texts(300))
    data = source(source="prepared", path=str(tmp_path / "set"), sequence_tokens=16)
    first, second = (set(row_texts(data.rows(range(start, start + 6)))) for start in (0, 6))
    assert len(first) == len(second) == 6 and not first & second


def test_damage_is_told_before_training_with_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "set"

    def opened(**changes: object) -> str:
        with pytest.raises(DataError) as told:
            source(source="prepared", path=str(folder), **changes)
        return str(told.value)

    assert "make it with `trainmaster data prepare`" in opened()
    make(folder, texts(20), files=2)
    assert "not enough for one row of 90000" in opened(sequence_tokens=90_000)
    shard = folder / "train-00001.tokens"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-2])
    assert f"train-00001.tokens has {len(whole) - 2} bytes instead of {len(whole)}" in opened()
    shard.unlink()
    assert "train-00001.tokens is missing" in opened()
    shard.write_bytes(whole)
    index = folder / "index.json"
    good = json.loads(index.read_text())
    index.write_text(json.dumps({**good, "empty": 7}))
    assert "does not match its own digest" in opened()
    index.write_text("{")
    assert "is damaged" in opened()


def test_held_out_data_of_its_own_must_be_other_data(tmp_path: Path) -> None:
    make(tmp_path / "a", texts(50))
    make(tmp_path / "b", texts(50, start=100))
    make(tmp_path / "copy", texts(50))
    data = source(source="prepared", path=str(tmp_path / "a"), held_out_path=str(tmp_path / "b"), rows="pack")
    kept = "".join(row_texts(data.rows(range(data.held_out_rows or 0), held_out=True)))
    assert "<100>" in kept and "<1>" not in kept
    with pytest.raises(DataError, match="is also in"):
        source(source="prepared", path=str(tmp_path / "a"), held_out_path=str(tmp_path / "copy"))


@pytest.mark.parametrize(("shared", "width"), [(1, 32), (40, 32), (3, 5000)])
def test_one_held_out_document_that_is_trained_on_is_refused(tmp_path: Path, shared: int, width: int) -> None:
    ours, theirs = texts(120), texts(60, start=1000)
    theirs[10 : 10 + shared] = [text + "x" * width for text in ours[50 : 50 + shared]]
    ours[50 : 50 + shared] = [text + "x" * width for text in ours[50 : 50 + shared]]
    make(tmp_path / "a", ours, files=3)
    make(tmp_path / "b", theirs)
    with pytest.raises(DataError, match=r"b: document \d+ is also in .*a; held-out documents must not be trained on"):
        source(source="prepared", path=str(tmp_path / "a"), held_out_path=str(tmp_path / "b"), sequence_tokens=16)


def test_held_out_raw_files_with_a_document_that_is_trained_on_are_refused(tmp_path: Path) -> None:
    ours, theirs = texts(60), texts(30, start=1000)
    theirs[7] = ours[40]
    train, apart = write_jsonl(tmp_path / "a.jsonl", ours), write_jsonl(tmp_path / "b.jsonl", theirs)
    data = {"source": "jsonl", "path": str(train), "cache": str(tmp_path / "cache"), "sequence_tokens": 16}
    with pytest.raises(DataError, match=r"b\.jsonl: document 7 is also in .*a\.jsonl; held-out documents must not be"):
        source(**data, held_out_path=str(apart))
    with pytest.raises(SpecError, match="held_out_path: is the path itself"):
        source(**data, held_out_path=str(train))
    write_jsonl(apart, texts(30, start=1000))
    source(**data, held_out_path=str(apart)).close()


def test_the_fingerprint_follows_the_content_not_the_place(tmp_path: Path) -> None:
    prints = []
    for name, documents in (("a", texts(30)), ("moved", texts(30)), ("other", texts(31))):
        make(tmp_path / name, documents)
        prints.append(source(source="prepared", path=str(tmp_path / name)).fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_a_token_that_the_index_does_not_know_is_an_error_of_the_data(tmp_path: Path) -> None:
    make(tmp_path / "a", texts(60))
    path = next((tmp_path / "a").glob("train-*.tokens"))
    damaged = bytearray(path.read_bytes())
    damaged[1::2] = b"\xff" * (len(damaged) // 2)
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"tokens is damaged: token \d+, and its index knows none above \d+"):
        source(source="prepared", path=str(tmp_path / "a")).rows([0])


@pytest.mark.parametrize("length", [0, 1000, 0xFFFFFFFF])
def test_lengths_that_are_not_those_of_the_tokens_are_an_error_of_the_data(tmp_path: Path, length: int) -> None:
    make(tmp_path / "a", texts(60), files=2)
    path = tmp_path / "a" / "train-00001.lengths"
    damaged = bytearray(path.read_bytes())
    damaged[-4:] = length.to_bytes(4, "little")
    path.write_bytes(damaged)
    told = r"train-00001\.lengths is damaged: its documents have \d+ tokens, and the shard \d+; prepare the data again"
    with pytest.raises(DataError, match=told):
        source(source="prepared", path=str(tmp_path / "a"), rows="pack")
    make(tmp_path / "b", texts(60, start=100))
    with pytest.raises(DataError, match=told):
        source(source="prepared", path=str(tmp_path / "b"), held_out_path=str(tmp_path / "a"))


def test_errors_of_raw_files_name_the_files_and_not_the_cache(tmp_path: Path) -> None:
    raw = write_jsonl(tmp_path / "a.jsonl", ["ab"])
    with pytest.raises(DataError) as refused:
        source(source="jsonl", path=str(raw), cache=str(tmp_path / "cache"), held_out_share=0)
    assert str(refused.value).startswith(f"{raw} holds 3 tokens to train on")
    assert "cache" not in str(refused.value)
