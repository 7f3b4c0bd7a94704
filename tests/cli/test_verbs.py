"""Every verb explains itself with examples; a bad spec creates nothing; errors become one line and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cli.conftest import Run
from trainmaster.cli.main import _ORDER, build, summary, verbs
from trainmaster.core.errors import TrainmasterError

FIVE_MISTAKES = """\
nam: trial
name: trial
target: local
resources: { nodes: 0 }
train:
  steps: many
  optimizer: { lr: 7 }
limits: { grace_s: -1 }
"""


@pytest.mark.parametrize("verb", verbs())
def test_help_has_examples(verb: str) -> None:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(build(), [verb, "--help"])
    assert result.exit_code == 0
    assert f"trainmaster {verb}" in result.output, "no example in its help"


def test_every_verb_of_a_group_has_its_help() -> None:
    group = typer.main.get_command(build())
    parts = [group.get_command(None, verb) for verb in verbs()]  # type: ignore[attr-defined,arg-type]
    words = [(part.name, name) for part in parts for name in getattr(part, "commands", {})]
    assert ("target", "grant") in words
    for pair in words:  # markup that does not close is found only where a page is drawn
        result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(build(), [*pair, "--help"])
        assert result.exit_code == 0, f"{pair}: {result.exception!r}"


def test_the_help_page_has_the_summary_of_every_verb() -> None:
    page = CliRunner(env={"COLUMNS": "300", "TERM": "dumb"}).invoke(build(), ["--help"]).output
    group = typer.main.get_command(build())
    for verb in verbs():
        command = group.get_command(None, verb)  # type: ignore[attr-defined,arg-type]
        assert command is not None and command.help is not None
        assert summary(verb) == " ".join(command.help.partition("\n\n")[0].split()), "read from the source and imported"
        assert f" {verb} " in page and summary(verb)[:60] in page


def test_the_order_of_the_help_page_names_every_verb() -> None:
    assert sorted(_ORDER) == sorted(verbs()), "a verb without a place in _ORDER stands at the end of the help page"


@pytest.mark.parametrize(
    ("words", "without"),
    [
        (["--help"], ["sqlalchemy", "fastapi", "httpx", "torch", "yaml", "asyncio"]),
        (["check", "--help"], ["sqlalchemy", "fastapi", "httpx", "torch", "yaml", "asyncssh"]),
        (["jobs", "--help"], ["sqlalchemy", "fastapi", "httpx", "torch", "yaml"]),
        (["jobs"], ["fastapi", "httpx", "torch", "yaml", "asyncssh", "starlette"]),
    ],
    ids=" ".join,
)
def test_a_verb_imports_only_what_it_uses(words: list[str], without: list[str], tmp_path: Path) -> None:
    code = (
        "import sys, contextlib\nfrom trainmaster.cli.main import run\n"
        "with contextlib.suppress(SystemExit):\n    run()\n"
        "print('IMPORTED', *sorted(name for name in sys.modules if '.' not in name))"
    )
    env = {**os.environ, "TRAINMASTER_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, check=True, env=env, capture_output=True, text=True, timeout=120)
    imported = done.stdout.rpartition("IMPORTED ")[2].split()
    assert not set(without) & set(imported)


def test_five_mistakes_five_messages_and_nothing_created(run: Run, tmp_path: Path) -> None:
    spec, home = tmp_path / "job.yaml", tmp_path / "home"
    spec.write_text(FIVE_MISTAKES)
    done = run("submit", str(spec), home=home)
    assert done.returncode == 2
    for place in ("1: nam", "4: resources.nodes", "6: train.steps", "7: train.optimizer.lr", "8: limits.grace_s"):
        assert f"job.yaml:{place}:" in done.stderr
    assert "5 faults; nothing was created" in done.stderr
    assert not home.exists()


def test_dry_run_prints_the_plan_and_touches_nothing(run: Run, tmp_path: Path) -> None:
    spec, home = tmp_path / "job.yaml", tmp_path / "home"
    spec.write_text("name: a\ncommand: [hello]\n")
    done = run("submit", str(spec), "--dry-run", home=home)
    assert done.returncode == 0, done.stderr
    assert "plan.json" in done.stdout and "trainmaster.agent" in done.stdout and "hello" in done.stdout
    assert "null" not in done.stdout and '"grace_s": 30.0' in done.stdout, "what is stated or decided, no more"
    assert not home.exists()


def test_a_dry_run_names_what_looks_like_a_secret_until_it_is_allowed(run: Run, tmp_path: Path) -> None:
    spec, home = tmp_path / "job.yaml", tmp_path / "home"
    spec.write_text(f"name: a\ncommand: [git, checkout, {'0a' * 20}, --password, hunter2]\n")
    refused = run("submit", str(spec), "--dry-run", home=home)
    assert refused.returncode == 2 and "job.yaml:2: command[4]: a secret" in refused.stderr, refused.stderr
    assert "allow:" in refused.stderr and "hunter2" not in refused.stderr and "command[2]" not in refused.stderr
    done = run("submit", str(spec), "--dry-run", "--allow", "command[4]=of a throw-away database", home=home)
    assert done.returncode == 0, done.stderr
    without = run("submit", str(spec), "--dry-run", "--allow", "command[4]", home=home)
    assert without.returncode == 2 and "why it is no secret" in without.stderr


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["show", "nothing"], 2, "no job 'nothing'"),
        (["cancel", "nothing"], 2, "no job 'nothing'"),
        (["submit", "no-such-file.yaml"], 2, "cannot be read"),
        (["serve", "--host", "0.0.0.0"], 2, "there is no token to keep them out"),
        (["check", "--expect", "gpu=8"], 2, "did you mean `gpus`"),
        (["check", "--only", "gpu_cout"], 2, "gpu_count"),
        (["frobnicate"], 2, "No such command"),
    ],
)
def test_wrong_usage_says_what_to_do(run: Run, words: list[str], code: int, says: str, tmp_path: Path) -> None:
    done = run(*words, home=tmp_path / "home")
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_an_empty_home_lists_no_jobs(run: Run, tmp_path: Path) -> None:
    done = run("jobs", "--json", home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert '"total": 0' in done.stdout


def test_version() -> None:
    from trainmaster import __version__

    result = CliRunner().invoke(build(), ["--version"])
    assert result.output.strip() == f"trainmaster {__version__}"


def test_a_guarded_command_line_leaves_the_plain_one_as_it_is(tmp_path: Path) -> None:
    """The verbs of a group were put behind the error boundary for the rest of the process."""
    missing = str(tmp_path / "missing.yaml")
    guarded = CliRunner().invoke(build(guarded=True), ["cluster", "lint", missing])
    plain = CliRunner().invoke(build(), ["cluster", "lint", missing])
    assert isinstance(guarded.exception, SystemExit)
    assert isinstance(plain.exception, TrainmasterError)
