"""A mix: every batch has the shares asked for, and each source is read once and in full."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from corpus import make, row_texts, source, texts
from test_stream_shards import stream

from trainmaster.core.config.data import DataConfig
from trainmaster.core.errors import DataError, SpecError
from trainmaster.core.schema import build
from trainmaster.datasets import Shape
from trainmaster.datasets.mix import Mix, Wheel


@pytest.mark.parametrize("weights", [[1], [3, 1], [0.7, 0.2, 0.1], [1, 1e-9], [5.5, 2.25, 1, 1, 0.25]])
def test_the_wheel_has_the_shares_in_any_stretch(weights: list[float]) -> None:
    wheel = Wheel(weights)
    for start in (0, 100, 5000):
        drawn = Counter(wheel.at(slot) for slot in range(start, start + 200))
        for part, weight in enumerate(weights):
            assert abs(drawn[part] - 200 * weight / sum(weights)) <= 3
            assert wheel.count(part, start + 200) - wheel.count(part, start) == drawn[part]


def test_each_batch_has_the_shares_and_each_source_is_read_once(tmp_path: Path) -> None:
    for name, start in (("a", 0), ("b", 5000)):
        make(tmp_path / name, [f"{name}{text}" for text in texts(400, start=start)])
    parts = [
        {"source": "prepared", "path": str(tmp_path / "a"), "weight": 3},
        {"source": "prepared", "path": str(tmp_path / "b"), "weight": 1},
    ]
    data = source(source="mix", parts=parts, sequence_tokens=16, batch_sequences=16)
    places = [data._place(number) for number in range(16 * 60)]  # type: ignore[attr-defined]
    for step in range(60):
        counts = Counter(part for part, _ in places[step * 16 : (step + 1) * 16])
        assert abs(counts[0] - 12) <= 1
    for part in (0, 1):
        numbers = [number for which, number in places if which == part]
        assert len(set(numbers)) == len(numbers), "nothing twice"
        # Rows are a slot or two apart on the wheel, so no number is left behind by more than that.
        assert set(range(min(len(numbers), max(numbers)) - 4 * 16)) <= set(numbers), "nothing left out"
    assert len(set(row_texts(data.rows(range(16 * 20))))) == 16 * 20


def test_a_mix_with_a_stream_goes_on_where_it_was(tmp_path: Path) -> None:
    make(tmp_path / "a", texts(400))

    def build() -> Mix:
        prepared = source(source="prepared", path=str(tmp_path / "a"), sequence_tokens=48)
        return Mix([prepared, stream()], [2, 1], Shape(sequence_tokens=48, batch_sequences=12))

    whole = row_texts(build().rows(range(12 * 8)))
    first, second = build(), build()
    assert row_texts(first.rows(range(12 * 5))) == whole[: 12 * 5]
    upcoming = range(12 * 5, 12 * 6)
    second.restore(first.join([first.state(upcoming)]))
    assert row_texts(second.rows(range(12 * 5, 12 * 8))) == whole[12 * 5 :]
    with pytest.raises(DataError, match="began with batch_sequences 12"):
        Mix([build()], [1], Shape(sequence_tokens=48, batch_sequences=6)).restore(first.join([first.state(upcoming)]))


def test_sources_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    one, other = stream(), stream()
    other.tokenizer = "another"
    with pytest.raises(DataError, match="different tokenizers"):
        Mix([one, other], [1, 1], Shape(sequence_tokens=48, batch_sequences=12))


def test_a_weight_too_small_to_be_drawn_is_refused() -> None:
    parts = [{"source": "tales", "weight": 1000.0}, {"source": "tales", "weight": 0.9}]
    with pytest.raises(SpecError, match=r"parts\[1\]\.weight: 0\.9 is 0\.0009 of all weights; .* use 0\.98 or more"):
        build(DataConfig, {"source": "mix", "parts": parts})
    parts[1]["weight"] = 1.0
    assert build(DataConfig, {"source": "mix", "parts": parts}).parts[1].weight == 1.0


@pytest.mark.parametrize("how", ["path", "share"])
def test_a_held_out_document_of_one_part_that_another_part_trains_on_is_refused(tmp_path: Path, how: str) -> None:
    mine, apart = texts(200), texts(60, start=1000)
    make(tmp_path / "a", mine, held_out_share=0.2 if how == "share" else 0)
    make(tmp_path / "apart", apart, held_out_share=0)
    # Prepared without a share: documents that part a holds out are among them.
    shared = mine if how == "share" else apart[7:8]
    make(tmp_path / "b", [*texts(100, start=5000), *shared], held_out_share=0)
    first = {"source": "prepared", "path": str(tmp_path / "a")}
    first |= {"held_out_path": str(tmp_path / "apart")} if how == "path" else {}
    second = {"source": "prepared", "path": str(tmp_path / "b")}
    with pytest.raises(
        DataError, match=r"data\.parts\[0\]: its held-out document \d+ is trained on in data\.parts\[1\]"
    ):
        source(source="mix", parts=[first, second], sequence_tokens=16)
    make(tmp_path / "c", texts(100, start=9000), held_out_share=0)
    source(source="mix", parts=[first, {**second, "path": str(tmp_path / "c")}], sequence_tokens=16).close()
