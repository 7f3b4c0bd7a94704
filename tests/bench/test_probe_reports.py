"""Every probe, run whole as a process on the CPU: it prints one JSON object, and its check understands it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fork_server import ForkServer
from trainmaster import checks
from trainmaster.bench import probe
from trainmaster.checks import nvidia
from trainmaster.checks.active import _probe, p2p
from trainmaster.core.expect import Expect
from trainmaster.core.results import Verdict
from trainmaster.node.host import CommandResult
from trainmaster.node.parse.nvidia_smi import parse

SRC = Path(__file__).parents[2] / "src"
SMI = Path(__file__).parents[1] / "hosts" / "h200" / "commands" / "nvidia-smi_-q_-x.out"
EXTRA = {"p2p": ("--gpu", "0,1,2"), "burn": ("--seconds", "0.5")}
CHECKS = sorted({*probe.names()} - {"p2p"})


def start(name: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainmaster.bench.probe", name, *options]
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.fixture(scope="module")
def printed(programs: ForkServer) -> dict[str, CommandResult]:
    """What each probe prints, and corruption a second time."""
    found = {}
    for name in [*probe.names(), "again"]:
        real = "corruption" if name == "again" else name
        words = (real, "--device", "cpu", *EXTRA.get(real, ()))
        ran = programs.run("trainmaster.bench.probe", *words, env=dict(os.environ), timeout=120)
        found[name] = CommandResult(argv=(), exit_code=ran.returncode, stdout=ran.stdout, stderr=ran.stderr, took_s=1.0)
    return found


@pytest.mark.matrix(one_in=3)
@pytest.mark.parametrize("name", probe.names())
def test_a_probe_prints_one_object_and_ends_well(printed: dict[str, CommandResult], name: str) -> None:
    ran = printed[name]
    assert ran.exit_code == 0, ran.stderr
    document = _probe.parse(ran.stdout, name)
    assert document["error"] is None
    assert document["device"]["type"] == "cpu"
    assert ran.stdout.count("\n") == 1


def as_of_a_gpu(ran: CommandResult, uuid: str) -> CommandResult:
    """The same report, had it come from a GPU that nobody has a baseline for."""
    document = json.loads(ran.stdout)
    gpu = {"type": "cuda", "uuid": uuid, "name": "NVIDIA Mystery 9000"}
    document["device"].update(gpu)
    for entry in document["results"].get("gpus", []):
        entry.update(gpu)
    return CommandResult(argv=(), exit_code=0, stdout=json.dumps(document), stderr="", took_s=1.0)


def one_gpu() -> tuple[nvidia.Gpus, str]:
    smi = parse(SMI.read_text())
    gpus = nvidia.Gpus(bus=(smi.gpus[0].bus,), devices=("nvidia0",), granted=None, smi=smi, trouble=None)
    return gpus, str(smi.gpus[0].uuid)


def probed(ran: CommandResult) -> _probe.Probed:
    gpus, uuid = one_gpu()
    return _probe.Probed(gpus=gpus, visible=None, hidden=frozenset(), answers={uuid: ran})


@pytest.mark.parametrize("name", CHECKS)
def test_its_check_understands_what_it_really_prints(printed: dict[str, CommandResult], name: str) -> None:
    _, uuid = one_gpu()
    (finding,) = checks.load(name).judge(probed(as_of_a_gpu(printed[name], uuid)), Expect())
    # A rate of an unknown GPU is compared with nothing; everything else is judged, and well.
    rate = name in ("gemm", "hbm", "pcie_copy")
    assert finding.verdict is (Verdict.WARN if rate else Verdict.PASS) or "unsteady" in finding.reason or name == "burn"
    assert finding.verdict is not Verdict.ERROR, finding.reason
    json.dumps(dict(finding.values), allow_nan=False)


def test_the_exchange_check_understands_what_the_probe_really_prints(printed: dict[str, CommandResult]) -> None:
    results = json.loads(as_of_a_gpu(printed["p2p"], "GPU-1").stdout)["results"]
    ways = p2p._transfers(results, ("GPU-1",) * 3, ["gpu0", "gpu1", "gpu2"])
    assert len(ways) == 6
    assert all(way.wrong_words == 0 for way in ways)


@pytest.mark.parametrize("name", CHECKS)
def test_a_run_on_the_cpu_is_not_taken_for_one_on_the_gpu(printed: dict[str, CommandResult], name: str) -> None:
    (finding,) = checks.load(name).judge(probed(printed[name]), Expect())
    assert finding.verdict is Verdict.ERROR


def test_digests_are_the_same_in_another_process(printed: dict[str, CommandResult]) -> None:
    def digests(ran: CommandResult) -> dict[str, Any]:
        return {name: told["digest"] for name, told in json.loads(ran.stdout)["results"]["work"].items()}

    assert digests(printed["corruption"]) == digests(printed["again"])
    assert len(set(digests(printed["corruption"]).values())) == 4


HANG = """
import os, time
from types import SimpleNamespace
from trainmaster.bench.probe.__main__ import _Report
report = _Report("gemm", os.dup(1))
report._run = SimpleNamespace(at="timing", results={"size": 8192})
report._watch(0.2)
time.sleep(60)
"""


def test_a_probe_that_hangs_says_where_and_keeps_what_it_has() -> None:
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    ran = subprocess.run([sys.executable, "-c", HANG], capture_output=True, text=True, env=env, timeout=50, check=False)
    assert ran.returncode == 4
    document = _probe.parse(ran.stdout, "gemm")
    assert (document["error"]["kind"], document["error"]["step"]) == ("Hung", "timing")
    assert document["results"] == {"size": 8192}


def test_without_a_gpu_it_tells_the_error_and_the_step() -> None:
    process = start("cuda_init", "--gpu", "GPU-nobody")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    document = _probe.parse(out, "cuda_init")
    assert document["error"]["step"] == "start CUDA"
    assert "Traceback" in err


def test_who_kills_a_probe_leaves_it_time_to_say_where_it_hangs() -> None:
    for name in probe.names():
        deadline = importlib.import_module(f"trainmaster.bench.probe.{name}").DEADLINE_S
        outer = checks.load("burn").PROBE_S if name == "burn" else _probe.TIMEOUT_S  # type: ignore[attr-defined]
        assert deadline < outer - 5
