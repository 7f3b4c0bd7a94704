"""The entry refuses what it cannot run, with the right exit code and a line that says why."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fork_server import ForkServer
from trainmaster.core.schema import to_plain
from trainmaster.node.ranks import detect
from trainmaster.train.__main__ import main, read_config
from trainmaster.train.parallel.rank_info import find_rank_info
from trainmaster.train.watch.stop import SIGNALS

from .runs import tiny


@pytest.fixture(autouse=True)
def give_back_signals() -> Iterator[None]:
    """The entry takes SIGTERM and SIGUSR1 of its process, which here is pytest's."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_bad_config_exits_2_with_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"stepz": 3, "model": {"heads": 0}}))
    assert main([str(path)], {}) == 2
    said = capsys.readouterr().err
    assert "stepz: unknown field; did you mean `steps`?" in said
    assert "model.heads: 0 is out of range" in said


@pytest.mark.parametrize("words", [[], ["a", "b"], ["/nowhere/config.json"]])
def test_a_config_that_is_not_there_exits_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words, {}) == 2
    assert capsys.readouterr().err


def test_a_config_may_be_yaml_as_for_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("steps: 7\nmodel: {preset: tiny-llama}  # a comment\n")
    assert (read_config([str(path)]).steps, read_config([str(path)]).model.width) == (7, 64)
    path.write_text("steps: [")
    assert main([str(path)], {}) == 2
    assert "config.yaml:1: not YAML: expected the node content" in capsys.readouterr().err


def test_a_pod_is_not_a_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    pod = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456"}
    assert main([str(path)], pod) == 2
    assert "launcher kubeflow: this process is a node, not yet a rank" in capsys.readouterr().err


def test_a_lone_process_is_the_whole_run(tmp_path: Path) -> None:
    rank_info = find_rank_info(detect({}))
    assert (rank_info.rank, rank_info.world_size, rank_info.master) == (0, 1, None)
    (tmp_path / "config.json").write_text("{}")
    assert read_config([str(tmp_path / "config.json")]).steps == 200


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("config.json", "[" * 100_000, "config.json: nested too deep"),
        ("config.yaml", "a: " + "[" * 3000, "config.yaml:1: not YAML: nested deeper than 50 levels"),
    ],
)
def test_a_config_that_is_nested_without_end_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, error: str
) -> None:
    (tmp_path / name).write_text(text)
    assert main([str(tmp_path / name)], {}) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("text", ["abc", "nan", "-1", "0", "1e300"])
def test_a_time_limit_of_the_environment_that_is_none_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main([str(tmp_path / "config.json")], {"TRAINMASTER_COLLECTIVE_TIMEOUT_S": text}) == 2
    assert f"TRAINMASTER_COLLECTIVE_TIMEOUT_S={text!r}: write seconds" in capsys.readouterr().out


def test_an_event_file_that_cannot_be_opened_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main([str(tmp_path / "config.json")], {"TRAINMASTER_EVENTS": str(tmp_path)}) == 1
    said = capsys.readouterr()
    assert f"error: the event file {tmp_path} (TRAINMASTER_EVENTS) cannot be opened: " in said.out
    assert "Traceback" not in said.err


def test_output_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, programs: ForkServer) -> None:
    """The log often lies on the disk that the checkpoints have filled; a run is worth more than its lines."""
    (tmp_path / "config.json").write_text(json.dumps(to_plain(tiny(steps=4, epoch_steps=2))))
    env = {**os.environ, "TRAINMASTER_CHECKPOINTS": str(tmp_path / "checkpoints")}
    with Path("/dev/full").open("wb") as full:
        words = ("trainmaster.train", str(tmp_path / "config.json"))
        assert programs.start(*words, env=env, out=full.fileno(), err=full.fileno()).wait(120) == 0
    assert (tmp_path / "checkpoints" / "step-00000004" / "manifest.json").exists()
