"""`trainmaster top`: one table off a terminal, the same against a server, and keys on a real terminal."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from client.served import serve
from pages import samples
from trainmaster.api.jobs import JobLine
from trainmaster.cli import _console
from trainmaster.cli._views import keyboard, top_table
from trainmaster.cli.main import build
from trainmaster.pages import jobs
from trainmaster.store import attempts, costs
from trainmaster.store.migrate import open_database


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home with a completed job and one that runs on two machines."""
    folder = tmp_path_factory.mktemp("top")
    db = open_database(folder / "trainmaster.db")
    samples.completed(db, name="was-done")
    running = samples.resumed(db)
    with db.write() as conn:
        attempts.set_handle(conn, running.attempt, {"nodes": ["gpu-01", "gpu-02"]})
        costs.set_price(conn, running.attempt, 0.0)
    db.close()
    yield folder


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ((), ""),
        ((1.0,), "▁"),
        ((8.0, 1.0), "█▁"),
        ((3.0, None, 1.0), "█ ▁"),
        ((None, None), ""),
        (tuple(float(n) for n in range(32)), "▁▁▂▂▃▃▄▄▅▅▆▆▇▇██"),
    ],
)
def test_a_sparkline(values: tuple[float | None, ...], line: str) -> None:
    assert top_table.sparkline(values) == line


def test_keys_have_names_also_where_several_come_at_once() -> None:
    sent = keyboard.split_keys("\x1b[A\x1bOBj\rq\x03l\x1b[6~")
    assert [keyboard.name_key(text) for text in sent] == ["up", "down", "down", "enter", "q", "q", "l", "page-down"]


def test_one_table_without_a_terminal(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_console.out, "_width", 160)
    result = CliRunner().invoke(build(), ["top", "--home", str(home)])
    assert result.exit_code == 0, result.output
    first, second = (line for line in result.stdout.splitlines() if "llama-trial" in line or "was-done" in line)
    assert "running" in first and "140/200" in first and "gpu-01 +1" in first, "what is under way stands first"
    assert "completed" in second and "█" in second and "200/200" in second
    plain = json.loads(CliRunner().invoke(build(), ["top", "--json", "--home", str(home)]).stdout)
    assert [(row["job"]["name"], row["job"]["machines"], len(row["curve"]) > 8) for row in plain["jobs"]] == [
        ("llama-trial", ["gpu-01", "gpu-02"], True), ("was-done", [], True),
    ]  # fmt: skip
    limited = CliRunner().invoke(build(), ["top", "--json", "--home", str(home), "--limit", "1"])
    assert len(json.loads(limited.stdout)["jobs"]) == 1


def test_an_empty_home_says_what_to_type(tmp_path: Path) -> None:
    result = CliRunner().invoke(build(), ["top", "--once", "--home", str(tmp_path)])
    assert "trainmaster submit" in result.stdout


@pytest.mark.spawns
def test_a_server_gives_the_same_table(home: Path) -> None:
    db = open_database(home / "trainmaster.db")
    with serve(db, home) as url:
        there = CliRunner().invoke(build(), ["top", "--json", "--server", url])
    db.close()
    here = CliRunner().invoke(build(), ["top", "--json", "--home", str(home)])
    assert there.exit_code == 0, there.output
    assert json.loads(there.stdout) == json.loads(here.stdout)


def test_only_what_fits_and_the_chosen_one_among_it(home: Path) -> None:
    db = open_database(home / "trainmaster.db")
    line = jobs.read(db).jobs[0]
    db.close()
    lines = [dataclasses.replace(line, id=f"job-{number:05}", name=f"name-{number}") for number in range(50)]
    rows = [top_table.Row(job=line, curve=()) for line in lines]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(top_table.render(rows, width=100, chosen="job-00040", height=12, trouble="no answer"))
    text = console.export_text()
    assert "name-40" in text and "name-10" not in text and len(text.splitlines()) <= 12
    assert "no answer" in text and "q end" in text


@pytest.mark.parametrize("height", [None, 12])
@pytest.mark.parametrize(
    ("width", "columns"),
    [
        (40, "job state step"),
        (80, "job name state step loss tokens/s cost"),
        (100, "job name state step loss tokens/s cost age"),
        (140, "job name state step loss tokens/s cost machines age"),
    ],
)
def test_no_figure_is_cut(home: Path, width: int, columns: str, height: int | None) -> None:
    """Long figures in every column; and of a job without them the columns are left out."""
    db = open_database(home / "trainmaster.db")
    line = dataclasses.replace(
        jobs.read(db).jobs[0], name="llama-8b-pretrain-long", step=123456, steps=500000, loss=2.3456,
        cost_cents=1234567, tokens_per_s=123456.0, machines=("ip-10-0-12-34.ec2.internal", "b"),
    )  # fmt: skip
    db.close()
    text = draw([line], width, height)
    assert text[0].split() == columns.split() and len(text[0]) <= width
    figures = {
        "step": "123,456/500,000",
        "loss": "2.3456",
        "tokens/s": "123,456",
        "cost": "$12,345.67",
        "machines": " +1",
    }
    assert [column for column, figure in figures.items() if column in columns and figure not in text[1]] == []
    bare = dataclasses.replace(line, cost_cents=None, tokens_per_s=None, machines=())
    assert not {"cost", "tokens/s", "machines"} & set(draw([bare], width, height)[0].split())
    assert draw([], width, height)


def draw(lines: list[JobLine], width: int, height: int | None) -> list[str]:
    rows = [top_table.Row(job=line, curve=tuple(map(float, range(32)))) for line in lines]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(top_table.render(rows, width=width, height=height))
    return console.export_text().splitlines()


@pytest.mark.spawns
def test_keys_on_a_terminal(home: Path) -> None:
    """Down, Enter (the page of the second job), any key, q; the terminal is left as it was."""
    main, side = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30"}
    words = [sys.executable, "-m", "trainmaster", "top", "--home", str(home), "--every", "60"]
    process = subprocess.Popen(words, stdin=side, stdout=side, stderr=side, env=env)
    try:
        read_until(main, b"q end")
        os.write(main, b"\x1b[B")
        os.write(main, b"\r")
        assert b"was-done" in read_until(main, b"any key goes back")
        os.write(main, b" ")
        read_until(main, b"q end")
        os.write(main, b"q")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)
        os.close(side)


def read_until(fd: int, word: bytes) -> bytes:
    data, end = b"", time.monotonic() + 60
    while word not in data:
        assert time.monotonic() < end, data[-2000:]
        if select.select([fd], [], [], 1.0)[0]:
            data += os.read(fd, 65536)
    return data
