"""HyperPod's own log monitor, with the rules that the command prints, over the output of real training runs."""

from __future__ import annotations

import importlib.util
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from fork_server import ForkServer
from train.runs import ALONE, Ranks, tiny
from trainmaster.cli.main import build
from trainmaster.core import heartbeat
from trainmaster.train.run_log import RunLog

pytestmark = pytest.mark.spawns


@pytest.fixture(scope="module")
def monitor() -> ModuleType:
    """HyperPod's own file, without its package, which requires another torch."""
    found = importlib.util.find_spec("hyperpod_elastic_agent")
    if found is None or not found.submodule_search_locations:
        pytest.skip("hyperpod-elastic-agent is not installed (pip install --no-deps hyperpod-elastic-agent)")
    path = Path(found.submodule_search_locations[0]) / "logagent" / "log_agent.py"
    spec = importlib.util.spec_from_file_location("log_agent", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.LogAgent.READ_INTERVAL = 0.02
    return module


@pytest.fixture(scope="module")
def output(programs: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What each of two nodes printed in a healthy run."""
    ran = Ranks(programs, tmp_path_factory.mktemp("healthy"), tiny(), ranks=2, nodes=2)
    assert [process.wait(120) for process in ran.processes] == [0, 0]
    return [(ran.folder / f"rank-{rank}.log").read_text() for rank in range(2)]


def rules(*options: str) -> list[dict[str, Any]]:
    """Rules as the command prints them and the operator hands them on: through YAML and JSON."""
    done = CliRunner().invoke(build(), ["cluster", "hyperpod-rules", *options])
    assert done.exit_code == 0, done.output
    printed = yaml.safe_load(done.output)["logMonitoringConfiguration"]
    found: list[dict[str, Any]] = json.loads(json.dumps(printed))
    return found


@contextmanager
def watching(monitor: ModuleType, folder: Path, text: str, wanted: list[dict[str, Any]]) -> Iterator[Any]:
    place = folder / "0" / "stdout.log"
    place.parent.mkdir(parents=True)
    place.write_text(text)
    agent = monitor.LogAgent(local_world_size=1)
    agent.start(str(folder), {0}, wanted)
    try:
        yield agent
    finally:
        agent.stop()


def until(agent: Any, state: str) -> dict[str, str | None]:
    """Wait until the monitor's verdict is this; the rules that gave it."""
    end = time.monotonic() + 60
    while (found := agent.log_eval_results[0]).log_state.name != state:
        assert time.monotonic() < end, f"{found.log_state}, not {state}"
        time.sleep(0.01)
    return dict(found.rule_name_log_line)


def settled(agent: Any, text: str) -> None:
    """Wait until the monitor has read the last line and judged once more."""
    last = text.rstrip("\n").rpartition("\n")[2]
    end = time.monotonic() + 60
    rule = agent._evaluators[0][0]
    while rule._active:
        assert time.monotonic() < end, f"the end of the run was not seen: {last}"
        time.sleep(0.01)


@pytest.mark.matrix(one_in=2, of="runs that HyperPod's log agent judges")
def test_a_healthy_run_is_healthy_on_every_node(monitor: ModuleType, output: list[str], tmp_path: Path) -> None:
    wanted = rules("--silent-s", "1", "--slow-tokens-per-s", "1", "--fault-not-finite")
    for node, text in enumerate(output):
        assert [beat for line in text.splitlines() if (beat := heartbeat.parse(line)) and beat.node == node]
        with watching(monitor, tmp_path / str(node), text, wanted) as agent:
            settled(agent, text)
            time.sleep(1.2)  # longer than a silence is allowed to be: the run has ended, it does not hang
            assert agent.log_state[0].name == "HEALTHY"


@pytest.mark.matrix(one_in=2, of="runs that HyperPod's log agent judges")
def test_a_run_that_falls_silent_hangs(monitor: ModuleType, output: list[str], tmp_path: Path) -> None:
    lines = output[1].splitlines(keepends=True)
    beats = [number for number, line in enumerate(lines) if heartbeat.parse(line.rstrip("\n"))]
    with watching(monitor, tmp_path, "".join(lines[: beats[-1] + 1]), rules("--silent-s", "1")) as agent:
        assert set(until(agent, "HANGING")) == {"TrainmasterAlive"}


@pytest.mark.matrix(one_in=2, of="runs that HyperPod's log agent judges")
def test_a_run_that_never_begins_hangs(monitor: ModuleType, tmp_path: Path) -> None:
    with watching(monitor, tmp_path, "loading\n", rules("--start-s", "1")) as agent:
        assert set(until(agent, "HANGING")) == {"TrainmasterAlive"}


@pytest.mark.matrix(one_in=2, of="runs that HyperPod's log agent judges")
def test_a_slow_node_is_slow(monitor: ModuleType, output: list[str], tmp_path: Path) -> None:
    beats = "".join(line + "\n" for line in output[0].splitlines() if heartbeat.parse(line))
    options = ("--slow-tokens-per-s", "1000000000", "--slow-points", "1")
    with watching(monitor, tmp_path, beats, rules(*options)) as agent:
        assert set(until(agent, "SLOW")) == {"TrainmasterSlow"}


@pytest.mark.matrix(one_in=2, of="runs that HyperPod's log agent judges")
def test_a_loss_that_is_not_finite_is_a_fault(
    monitor: ModuleType, output: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures: dict[str, Any] = {"grad_norm": math.nan, "tokens_per_s": 5000.0, "step_s": 0.1, "at": "train"}
    RunLog(ALONE, None).beat(step=9, steps=20, loss=math.nan, **figures)
    text = "".join(line + "\n" for line in output[0].splitlines() if heartbeat.parse(line)) + capsys.readouterr().out
    for options, verdict in ((("--fault-not-finite",), "FAULTED"), ((), "HEALTHY")):
        with watching(monitor, tmp_path / verdict, text, rules(*options)) as agent:
            assert set(until(agent, verdict)) == {"TrainmasterNotFinite" if options else "TrainmasterAlive"}


@pytest.mark.matrix(one_in=2, of="runs that HyperPod's log agent judges")
def test_a_threshold_with_a_point_would_drop_all_rules(monitor: ModuleType, output: list[str], tmp_path: Path) -> None:
    """The trap that the lint refuses, shown at the real monitor."""
    wanted = rules("--slow-tokens-per-s", "5", "--silent-s", "1")
    wanted[1]["metricThreshold"] = "2.5"
    with watching(monitor, tmp_path, output[0], wanted) as agent:
        assert not agent.is_running()
