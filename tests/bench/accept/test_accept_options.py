"""One table of options: the verb and the program on a node take the same words, with the same meaning."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import typer

from trainmaster.bench.accept import __main__ as node
from trainmaster.bench.accept.options import Fault, Options, option, read, table, words
from trainmaster.cli.main import build

# Every option with another value than its default.
CHANGED = Options(
    model="transformer", data_mode="cifar10", data_dir="/d", batch_size=3, num_classes=4, learning_rate=0.25,
    warmup_iterations=5, active_iterations=6, duration_s=7.5, repeats=8, accumulate=9, image_size=10, workers=11,
    precision="tf32", channels_last="on", compile="off", graph="on", bucket_mb=12.5, layers=13, width=14, heads=15,
    sequence=16, backend="gloo", processes=17, timeout_s=18.5, log_dir="/logs", baselines="/b.toml",
    min_throughput=19.5, fault=Fault(kind="slow", rank=2, share=0.4),
)  # fmt: skip


def verb_options() -> Any:
    verbs: Any = typer.main.get_command(build())
    return verbs.get_command(None, "accept")


def by_verb(given: list[str]) -> Options:
    values = verb_options().make_context("accept", given).params
    return read(values, {})


def by_node(given: list[str], monkeypatch: pytest.MonkeyPatch) -> Options:
    monkeypatch.setattr(sys, "argv", ["accept", *given])
    return node._options()[0]


def test_every_field_is_changed_by_the_case() -> None:
    plain = Options()
    same = [
        each.name for each in dataclasses.fields(Options) if getattr(CHANGED, each.name) == getattr(plain, each.name)
    ]
    assert same == []


@pytest.mark.parametrize("options", [Options(), CHANGED], ids=["defaults", "all changed"])
def test_both_command_lines_read_the_words_of_any_options(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BACKEND", raising=False)
    monkeypatch.delenv("NCCL_TIMEOUT_MS", raising=False)
    assert by_verb(words(options)) == options
    assert by_node(words(options), monkeypatch) == options


def test_the_environment_decides_what_is_not_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKEND", "gloo")
    monkeypatch.setenv("NCCL_TIMEOUT_MS", "9000")
    found = by_node([], monkeypatch)
    assert (found.backend, found.timeout_s) == ("gloo", 9.0)
    assert by_verb([]).backend == "gloo"


def test_both_show_the_help_of_the_table() -> None:
    stated: dict[str, Any] = {each.opts[0]: each for each in verb_options().params}
    for row in table():
        assert stated[option(row.field)].help == row.texts["help"]
