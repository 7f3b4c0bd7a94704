"""The bars of `trainmaster goodput`: nothing is drawn for nothing, and a narrow terminal has shorter ones."""

from __future__ import annotations

import pytest

from trainmaster.api.goodput import BinLine, Goodput
from trainmaster.cli import _console
from trainmaster.cli.jobs.goodput import _print_bins
from trainmaster.core.money.goodput.bins import Bin

SHARES = {Bin.TRAINING: 0.9, Bin.STARTING: 0.0996, Bin.LOADING: 0.0004}


def draw(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    bins = tuple(
        BinLine(bin=name, gpu_us=int(share * 1e9), gpu_hours=share, share=share, cents=None)
        for name, share in SHARES.items()
    )
    whole = Goodput(
        bins=bins, gpu_us=10**9, gpu_hours=1.0, ettr=None, ettr_most=None, scheduling=None, runtime=None, program=None,
        mpg=None, cents=None, unpriced_jobs=1,
    )  # fmt: skip
    monkeypatch.setattr(_console.out, "_width", width)
    _print_bins(whole)
    return {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}


@pytest.mark.parametrize(("width", "longest"), [(80, 28), (60, 8)])
def test_bars_are_as_long_as_their_share_and_fit(
    width: int, longest: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = draw(width, monkeypatch, capsys)
    assert lines["training"].count("█") == longest and "90.0%" in lines["training"]
    assert "█" in lines["starting"] and "█" not in lines["loading"]


def test_time_in_the_queue_is_no_gpu_hours_that_were_held(capsys: pytest.CaptureFixture[str]) -> None:
    hours = {Bin.QUEUED: 0.5, Bin.TRAINING: 0.25, Bin.UNKNOWN: 0.25}
    bins = tuple(
        BinLine(bin=name, gpu_us=int(each * 3.6e9), gpu_hours=each, share=each, cents=None)
        for name, each in hours.items()
    )
    _print_bins(
        Goodput(
            bins=bins, gpu_us=3_600_000_000, gpu_hours=1.0, ettr=0.0, ettr_most=0.5, scheduling=0.5, runtime=0.0,
            program=None, mpg=None, cents=None, unpriced_jobs=1,
        )
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert "queued, none held" in printed and " 0.500" in next(x for x in printed.splitlines() if "held in all" in x)
    assert "goodput unknown (scheduling 50.0%, runtime at least 0.0%, program unknown)" in printed
