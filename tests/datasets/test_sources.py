"""What every source promises: sample n is sample n everywhere, training and held-out samples never meet."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from trainmaster import datasets
from trainmaster.core.config.train import DataConfig
from trainmaster.core.errors import UsageError
from trainmaster.datasets import Rows, Shape, Source, load

EVERY = pytest.mark.parametrize("name", ["tales"])


def source(name: str, *, seed: int = 0, tokens: int = 40) -> Source:
    return load(DataConfig(source=name, seed=seed), Shape(sequence_tokens=tokens, batch_sequences=4))


def plain(rows: Rows) -> list[tuple[int, ...]]:
    return [tuple(row) for row in rows.tokens.tolist()]


@EVERY
def test_the_context_width_reaches_the_source(name: str) -> None:
    for tokens in (2, 33, 700):
        rows = source(name, tokens=tokens).rows([5, 6])
        assert rows.tokens.shape == rows.targets.shape == (2, tokens)
        assert rows.tokens.dtype == rows.targets.dtype == torch.int64
        assert torch.equal(rows.tokens[:, 1:], rows.targets[:, :-1]), "a target is the token that follows"
        assert 0 <= int(rows.tokens.min()) <= int(rows.tokens.max()) < source(name).vocab


@EVERY
def test_another_process_reads_the_same_sample(name: str) -> None:
    code = (
        "import sys; from trainmaster import datasets; from trainmaster.core.config.train import DataConfig\n"
        "shape = datasets.Shape(sequence_tokens=99, batch_sequences=4)\n"
        "source = datasets.load(DataConfig(source=sys.argv[1], seed=4), shape)\n"
        "print(source.rows([12345]).tokens[0].tolist())"
    )
    # A hash seed of its own: a source that leaned on hash() would differ here.
    answer = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, name], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == str(source(name, seed=4, tokens=99).rows([12345]).tokens[0].tolist())


@EVERY
def test_samples_and_seeds_differ(name: str) -> None:
    rows = [row for seed in (0, 1) for row in plain(source(name, seed=seed, tokens=64).rows(range(300)))]
    assert len(set(rows)) == len(rows)


@EVERY
def test_held_out_samples_are_never_trained_on(name: str) -> None:
    train, held_out = (set(plain(source(name).rows(range(2000), held_out=held))) for held in (False, True))
    assert not train & held_out


@EVERY
def test_rows_are_the_samples_asked_for_in_their_order(name: str) -> None:
    rows = source(name).rows([42, 7, 42])
    assert plain(rows) == [plain(source(name).row(number, held_out=False))[0] for number in (42, 7, 42)]


def test_an_unknown_source_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"'tails' is not one of .*tales"):
        load(DataConfig(source="tails"), Shape(sequence_tokens=8, batch_sequences=1))


def test_every_source_is_loaded_by_its_file_name() -> None:
    assert "tales" in datasets.names() and not any(name.startswith("_") for name in datasets.names())
