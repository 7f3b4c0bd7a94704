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
