"""`trainmaster queue` on narrow and wide terminals: no time is broken over two lines."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from trainmaster.api.queue import QueueLine, QueuePage
from trainmaster.cli import _console
from trainmaster.cli.jobs.queue import _print

NOW = datetime(2026, 11, 20, 3, tzinfo=UTC)


@pytest.mark.parametrize("width", [*range(60, 100), 140, 160, 200])
def test_an_expected_start_stands_in_one_line(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_console.out, "_width", width)
    monkeypatch.setattr(_console.out, "_file", None)
    line = QueueLine(
        job_id="6f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a11", name="a-name-of-a-run", project="lab", target="local",
        priority="normal", nodes=1, processes_per_node=1, since=NOW, position=1,
        reason="all 8 GPUs of the machine are taken; the first is free when the job before it ends",
        before=("6f1c1f0e-95b8-4d6b-8a43-0d6b1b0f7a12",), expected_at=NOW, expected_latest=True,
    )  # fmt: skip
    _print(QueuePage(jobs=(line,), total=1, limit=50, offset=0, shares=(), made_at=NOW))
    assert "11-20 03:00 UTC at the latest" in capsys.readouterr().out
