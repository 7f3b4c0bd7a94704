"""Text of a job is never markup and never control: on the terminal, in a log that follows, on the page, in reports."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from fork_server import ForkServer
from trainmaster.cli import _console
from trainmaster.core.clean_text import clean

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

ODD = "Error: [/INST] [bold]loud[/bold] [5 items] :x: \x1b[31mred \x9b2J \u202egnirts \\"
SHOWN = "[/INST] [bold]loud[/bold] [5 items] :x: \ufffd[31mred \ufffd2J \ufffdgnirts \\"
SCRIPT = f"import sys; sys.stdout.reconfigure(encoding='utf-8'); print({ODD!a}); sys.exit(3)"
SPEC = f"name: odd\npreflight: {{ level: 0 }}\ncommand: [{sys.executable}, job.py]\n"


Verb = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def trainmaster(programs: ForkServer) -> Verb:
    """A verb on a home, forked."""
    return lambda home, *words: programs.run("trainmaster", *words, env=environment(home))


@pytest.fixture(scope="module")
def home(trainmaster: Verb, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with one job that failed and said why in odd words."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "job.py").write_text(SCRIPT)
    (folder / "job.yaml").write_text(SPEC.replace("job.py", str(folder / "job.py")))
    done = trainmaster(folder / "home", "submit", str(folder / "job.yaml"), "--follow")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert SHOWN in done.stdout
    return folder / "home"


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("words", ["show odd", "events odd", "jobs", "report odd --format md --out -"])
def test_no_verb_prints_control_characters_of_a_job(trainmaster: Verb, home: Path, words: str) -> None:
    done = trainmaster(home, *words.split())
    assert done.returncode == 0, done.stderr
    assert not unsafe(done.stdout)
    if words.startswith("show"):
        assert SHOWN in done.stdout, "what the job wrote is there, as it wrote it"


def test_a_log_is_cleaned_for_a_terminal_and_byte_for_byte_for_a_pipe(trainmaster: Verb, home: Path) -> None:
    piped = trainmaster(home, "logs", "odd")
    assert ODD in piped.stdout
    assert trainmaster(home, "logs", "odd", "--tail", "9" * 30).stdout == piped.stdout
    assert not unsafe(on_terminal(home, "logs", "odd").replace("\r\n", "\n"))


def test_the_page_and_the_report_show_no_control_characters(trainmaster: Verb, home: Path) -> None:
    from trainmaster.store.migrate import open_database
    from trainmaster.web.app import create_app

    page = trainmaster(home, "report", "odd", "--out", "-").stdout
    assert "gnirts" in page and not unsafe(page)
    db = open_database(home / "trainmaster.db")
    app = create_app(db, home, reconcile=False)
    with TestClient(app, base_url="http://127.0.0.1:8470", client=("127.0.0.1", 50_000)) as client:
        (job,) = client.get("/v1/training/jobs").json()["jobs"]
        for address in ("/", f"/jobs/{job['id']}", f"/jobs/{job['id']}/part", f"/jobs/{job['id']}/report"):
            answer = client.get(address)
            assert answer.status_code == 200 and not unsafe(answer.text), address
    db.close()


@pytest.mark.parametrize("text", [ODD, "[/]", "[", "\\[red]", "a [b", ":smile:", "[link=file:///etc]x[/link]"])
def test_escaped_text_is_shown_as_it_is(text: str) -> None:
    console = _console.CleanConsole(file=io.StringIO(), width=200, emoji=False, highlight=False)
    console.print(f"[bold]{_console.plain(text)}[/]", end="")
    assert console.file.getvalue() == clean(text)  # type: ignore[attr-defined]


def test_each_unsafe_character_is_replaced_and_a_carriage_return_ends_a_line() -> None:
    ranges = (
        (0, 9),
        (0x0B, 0x20),
        (0x7F, 0xA0),
        (0x200E, 0x2010),
        (0x2028, 0x202F),
        (0x2066, 0x206A),
        (0xD800, 0xE000),
    )
    letters = [chr(code) for ends in ranges for code in range(*ends)] + ["\u061c", "\ufffe", "\uffff"]
    assert {letter: clean(f"a{letter}b") for letter in letters} == {
        letter: "a\nb" if letter == "\r" else "a\ufffdb" for letter in letters
    }
    assert clean("a\tb\nc \u00e9\u4e2d") == "a\tb\nc \u00e9\u4e2d"


def test_broken_markup_is_printed_and_does_not_end_the_verb() -> None:
    console = _console.CleanConsole(file=io.StringIO(), width=200, emoji=False)
    console.print("before [/INST] after", end="")
    assert console.file.getvalue() == "before [/INST] after"  # type: ignore[attr-defined]


def unsafe(text: str) -> list[str]:
    """Control and format characters but line end and tab; formatting (Cf) that turns text around is among them."""
    return re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text) + [
        letter for letter in text if unicodedata.category(letter) == "Cs"
    ]


def on_terminal(home: Path, *words: str) -> str:
    """What the verb prints on a terminal of its own."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "trainmaster", *words]
    with subprocess.Popen(command, env=environment(home), stdout=theirs, stderr=subprocess.PIPE) as process:
        os.close(theirs)
        printed = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not piece:
                break
            printed += piece
        process.communicate()
    os.close(ours)
    assert process.returncode == 0 and printed
    return printed.decode()


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "TRAINMASTER_HOME": str(home), "NO_COLOR": "1", "COLUMNS": "400", "PYTHONUTF8": "1"}
