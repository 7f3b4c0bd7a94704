"""`trainmaster train`: YAML in, ranks through the agent, rank 0's lines out, the agent's exit code back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import typer

from trainmaster.cli.training import train as verb

from .runs import TINY


def train(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    process = begin(folder, *words, **env)
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def begin(folder: Path, *words: str, **env: str) -> subprocess.Popen[str]:
    config = folder / "tiny.yaml"
    config.write_text(json.dumps(TINY))  # JSON is YAML
    command = [sys.executable, "-m", "trainmaster", "train", str(config), *words]
    environment = {**os.environ, "TRAINMASTER_CHECKPOINTS": str(folder / "checkpoints"), **env}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_two_ranks_train_and_the_same_command_goes_on(tmp_path: Path) -> None:
    first = train(tmp_path, "steps=3", "eval_sequences=0", "--processes", "2")
    assert first.returncode == 0, first.stderr
    assert "[rank 0 node 0] step 3/3 Loss: " in first.stdout
    again = train(tmp_path, "steps=4", "eval_sequences=0")
    assert again.returncode == 0, again.stderr
    assert "resumed from step 3" in again.stdout
    folder = tmp_path / "checkpoints"
    assert (folder / "step-00000004" / "manifest.json").exists()
    attempts = sorted((folder / "attempts").iterdir())
    assert len(attempts) == 2
    assert all((attempt / "events.jsonl").exists() and (attempt / "exit.json").exists() for attempt in attempts)


def test_a_bad_config_exits_2_and_creates_nothing(tmp_path: Path) -> None:
    ended = train(tmp_path, "batch_sequences=9", "optimizer.warmup_steps=1", "-n", "2")
    assert ended.returncode == 2
    assert "batch_sequences: 9 does not divide by 2 ranks; use 8" in " ".join(ended.stderr.split())
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_ranks_end_with_a_killed_command_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """They trained on for ever, and the next start failed with "in use" after its lease."""
    training = begin(tmp_path, "steps=1000000", "epoch_steps=1000000", "eval_sequences=0")
    assert training.stdout is not None
    for line in training.stdout:
        if "step 5/" in line:  # one is saved
            break
    second = train(tmp_path, "steps=6")
    assert second.returncode == 2 and "--stop-other lets it save and end first" in " ".join(second.stderr.split())
    training.kill()
    training.communicate()
    (attempt,) = (tmp_path / "checkpoints" / "attempts").iterdir()
    while not (attempt / "exit.json").exists():
        time.sleep(0.05)
    again = train(tmp_path, "steps=6", "eval_sequences=0")
    assert again.returncode == 0, again.stderr
    assert "resumed from step " in again.stdout


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_a_run_that_has_saved_goes_on_by_itself_and_is_given_up_without_progress(tmp_path: Path) -> None:
    """Killed before step 7 of each start: the first has saved, the two after it have not."""
    environment = {"TRAINMASTER_KILL_AT": "step:start @6", "TRAINMASTER_KILL_RANK": "0"}
    ended = train(tmp_path, "steps=12", "epoch_steps=12", "eval_sequences=0", "recovery.in_place=false", **environment)
    folders = sorted((tmp_path / "checkpoints" / "attempts").iterdir())
    assert [json.loads((folder / "exit.json").read_text())["reason"] for folder in folders] == ["crashed"] * 3
    assert ended.returncode == 1 and "start 2 of 3 goes on from the newest checkpoint" in " ".join(ended.stderr.split())
    assert [json.loads((folder / "exit.json").read_text())["saved_since"] for folder in folders] == [True, False, False]


@pytest.mark.matrix(one_in=12, of="long proofs of the trainer")
def test_a_terminal_that_is_closed_saves_and_stops(tmp_path: Path) -> None:
    """The agent is in a session of its own: it would go on with nobody to see it."""
    training = begin(tmp_path, "steps=1000000", "epoch_steps=1000000", "eval_sequences=0")
    assert training.stdout is not None
    for line in training.stdout:
        if "step 3/" in line:
            break
    training.send_signal(signal.SIGHUP)
    out, err = training.communicate(timeout=60)
    assert training.returncode != 0, out + err
    (attempt,) = (tmp_path / "checkpoints" / "attempts").iterdir()
    assert json.loads((attempt / "exit.json").read_text())["reason"] == "user_cancelled"
    events = [json.loads(line) for line in (attempt / "events.jsonl").read_text().splitlines()]
    (end,) = [item["data"] for item in events if (item["phase"], item["event"]) == ("TRAINING", "end")]
    assert end["stopped"] and (tmp_path / "checkpoints" / f"step-{end['step']:08d}" / "manifest.json").exists()


@pytest.mark.matrix(one_in=2)
@pytest.mark.parametrize("package", ["typer", "torch"])
def test_ctrl_c_during_an_import_ends_it_with_one_word(tmp_path: Path, package: str) -> None:
    """The import goes on in spite of the exception, and then fails, as torch's does."""
    stand_in = tmp_path / "first" / f"{package}.py"
    stand_in.parent.mkdir()
    stand_in.write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    [None for _ in range(1000)]\n"
        "except BaseException:\n    pass\nraise ImportError('partially initialized')\n"
    )
    (tmp_path / "tiny.yaml").write_text(json.dumps({**TINY, "device": "auto"}))
    ended = subprocess.run(
        [sys.executable, "-m", "trainmaster", "train", "tiny.yaml"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(stand_in.parent)},
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "interrupted\n", "")


def test_ctrl_c_before_the_agent_listens_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.yaml").write_text(json.dumps(TINY))
    monkeypatch.chdir(tmp_path)
    begin = subprocess.Popen

    def interrupted(*words: object, **options: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return begin(*words, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(verb.subprocess, "Popen", interrupted)
    with pytest.raises(typer.Exit) as end:
        verb.train(Path("tiny.yaml"))
    assert end.value.exit_code == 130 and "interrupted before anything was saved" in capsys.readouterr().err
    (attempt,) = (tmp_path / "checkpoints" / "attempts").iterdir()
    record = json.loads((attempt / "exit.json").read_text())
    assert record["reason"] == "user_cancelled" and "before the start" in record["message"]


@pytest.mark.matrix(one_in=2)
@pytest.mark.spawns
@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM])
def test_only_a_second_ctrl_c_ends_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], again: signal.Signals
) -> None:
    begin = subprocess.Popen

    def saving(*_: object, **__: object) -> object:  # stands for an agent whose ranks are saving
        return begin(["sleep", "2"], start_new_session=True)

    monkeypatch.setattr(verb.subprocess, "Popen", saving)
    asked = [signal.SIGINT, signal.SIGINT]  # before anything was said: a key that was held for too long
    more = threading.Timer(0.7, asked.append, [again])
    more.start()
    code = verb._run(tmp_path, asked, mark="verb.1")
    more.join()
    assert code == (-signal.SIGKILL if again is signal.SIGINT else 0)
    assert capsys.readouterr().err.count("Ctrl-C again ends it at once") == 1
