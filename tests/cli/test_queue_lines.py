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


@pytest.mark.parametrize("width", [90, 200])
def test_who_submitted_is_a_column_where_more_than_one_did(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_console.out, "_width", width)
    monkeypatch.setattr(_console.out, "_file", None)

    def show(*people: str | None) -> str:
        lines = tuple(
            QueueLine(
                job_id=f"{place}f1c1f0e", name="trial", project="lab", target="local", priority="normal", nodes=1,
                processes_per_node=1, since=NOW, position=place, reason="none is free", before=(), expected_at=None,
                submitted_by=who,
            )
            for place, who in enumerate(people, 1)
        )  # fmt: skip
        _print(QueuePage(jobs=lines, total=len(lines), limit=50, offset=0, shares=(), made_at=NOW))
        return capsys.readouterr().out

    both = show("alice", None)
    assert " by " in both and "alice" in both and " local " in both
    assert "alice" not in show("alice", "alice")
