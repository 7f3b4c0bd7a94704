"""Acceptance suites: order of the parts, interruption and resumption, verdict."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from trainmaster.bench.accept.options import Options
from trainmaster.cluster.acceptance import suite
from trainmaster.cluster.acceptance.suite import Part, find_reason, judge, run
from trainmaster.cluster.acceptance.suite_plan import FORCED_NETWORK, Machine, ask_nodes, plan
from trainmaster.core.errors import UsageError
from trainmaster.core.results import Overall
from trainmaster.targets import Node, Result

# A part as a program: it notes that it began, waits for as long as a file is there, and prints its verdict.
PROGRAM = """
import json, pathlib, sys, time
name, verdict, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
with (folder / "log").open("a") as log:
    log.write(name + "\\n")
while (folder / f"hold-{name}").exists():
    time.sleep(0.01)
said, _, code = verdict.partition(":")
print("not JSON" if said == "crash" else json.dumps({"overall": said}))
sys.exit(int(code or {"FAIL": 1, "INCOMPLETE": 3}.get(said, 0)))
"""
NAMES = ("one", "two", "three")


def parts(folder: Path, verdicts: tuple[str, ...] = ("PASS", "WARN", "PASS")) -> list[Part]:
    kinds: tuple[Any, ...] = ("check", "bandwidth", "training")
    return [
        Part(name=name, title=name.title(), kind=kind, words=[name, verdict, str(folder)])
        for name, kind, verdict in zip(NAMES, kinds, verdicts, strict=True)
    ]


def take(
    folder: Path, *, verdicts: tuple[str, ...] = ("PASS", "WARN", "PASS"), machine: str = "here with 8 GPUs"
) -> dict[str, Any]:
    program = (sys.executable, "-IS", "-c", PROGRAM)
    return run(
        "quick", parts(folder, verdicts), folder / "out", on=None, show=lambda _: None, machine=machine, program=program
    )


def began(folder: Path) -> list[str]:
    return (folder / "log").read_text().split() if (folder / "log").exists() else []


@pytest.mark.spawns
def test_a_part_that_runs_for_long_shows_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "_LOOK_S", 0.02)
    monkeypatch.setattr(suite, "_EVERY_S", 0.05)
    (tmp_path / "hold-one").touch()
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        if text.endswith(" s, waiting"):
            (tmp_path / "hold-one").unlink(missing_ok=True)

    program = (sys.executable, "-IS", "-c", f"import sys; print('waiting', file=sys.stderr, flush=True)\n{PROGRAM}")
    run("quick", parts(tmp_path)[:1], tmp_path / "out", on=None, show=show, program=program)
    assert shown[0] == "one: begin" and shown[-1].startswith("one: PASS, ")
    assert any(text.endswith(" s, waiting") for text in shown[1:-1])


@pytest.mark.matrix(one_in=3)
@pytest.mark.spawns
@pytest.mark.parametrize("at", NAMES)
def test_a_suite_that_was_killed_goes_on_where_it_was(tmp_path: Path, at: str) -> None:
    (tmp_path / f"hold-{at}").touch()
    script = f"import sys; sys.path[:0] = {sys.path!r}; from cluster.test_suite import take; import pathlib; " \
             f"take(pathlib.Path({str(tmp_path)!r}))"  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", script])
    while at not in began(tmp_path):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (tmp_path / f"hold-{at}").unlink()
    before = NAMES[: NAMES.index(at)]
    document = take(tmp_path)
    assert began(tmp_path) == [*before, at, *NAMES[NAMES.index(at) :]]  # the interrupted one again, finished ones not
    assert document["resumed"] == list(before)
    assert len(document["runs"]) == 2
    assert document["overall"] == "WARN"
    again = take(tmp_path)
    assert again["resumed"] == list(NAMES)
    assert len(began(tmp_path)) == len(NAMES) + 1


@pytest.mark.spawns
def test_a_part_that_crashed_is_incomplete_and_measured_again(tmp_path: Path) -> None:
    document = take(tmp_path, verdicts=("PASS", "crash", "PASS"))
    assert (document["overall"], document["exit_code"]) == ("INCOMPLETE", 3)
    take(tmp_path, verdicts=("PASS", "crash", "PASS"))
    assert began(tmp_path).count("two") == 2
    assert began(tmp_path).count("one") == 1


@pytest.mark.spawns
def test_another_suite_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    take(tmp_path)
    with pytest.raises(UsageError, match="another suite"):
        take(tmp_path, verdicts=("PASS", "PASS", "PASS"))


@pytest.mark.matrix(one_in=3)
@pytest.mark.spawns
@pytest.mark.parametrize("code", ["1", "3", "139"])
def test_a_part_that_ends_otherwise_than_it_says_is_no_pass(tmp_path: Path, code: str) -> None:
    document = take(tmp_path, verdicts=("PASS", f"PASS:{code}", "PASS"))
    assert document["overall"] == "INCOMPLETE"
    assert document["parts"][1]["reason"] == f"it printed PASS, and then ended with {code}"


@pytest.mark.matrix(one_in=3)
@pytest.mark.spawns
@pytest.mark.parametrize(
    "damage",
    [
        lambda one: {},
        lambda one: {**one, "overall": "PASS"},
        lambda one: {**one, "overall": "PASS", "exit_code": 0},
        lambda one: {**one, "document": {"overall": "PASS"}},
        lambda one: {**one, "document": None},
        lambda one: {**one, "document": {"overall": "GREAT"}},
        lambda one: {**one, "words": ["two", "PASS"]},
        lambda one: {**one, "name": "one"},
        lambda one: {**one, "run": None},
        lambda one: [one],
        lambda one: "[" * 100_000,
        lambda one: json.dumps(one)[:-30],
    ],
)
def test_a_damaged_result_is_not_taken_over(tmp_path: Path, damage: Any) -> None:
    verdicts = ("PASS", "FAIL", "PASS")
    take(tmp_path, verdicts=verdicts)
    path = tmp_path / "out" / "parts" / "two.json"
    made = damage(json.loads(path.read_text()))
    path.write_text(made if isinstance(made, str) else json.dumps(made))
    with pytest.raises(UsageError, match=r"two\.json: .*remove it to measure again"):
        take(tmp_path, verdicts=verdicts)
    path.unlink()
    assert take(tmp_path, verdicts=verdicts)["overall"] == "FAIL"


@pytest.mark.matrix(one_in=3)
@pytest.mark.spawns
@pytest.mark.parametrize("state", ["{}", '{"runs": 3}', "[]", "", None])
def test_a_damaged_state_is_no_new_suite(tmp_path: Path, state: str | None) -> None:
    take(tmp_path)
    path = tmp_path / "out" / "suite.json"
    path.unlink() if state is None else path.write_text(state)
    with pytest.raises(UsageError, match="suite"):
        take(tmp_path)


@pytest.mark.spawns
def test_results_of_another_machine_are_not_taken_over(tmp_path: Path) -> None:
    take(tmp_path)
    with pytest.raises(UsageError, match=r"here with 8 GPUs.*here with 7 GPUs"):
        take(tmp_path, machine="here with 7 GPUs")


def test_another_list_of_hosts_is_another_machine(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text("hosts: [a, b]")
    before = Machine(on=f"ssh:{hosts}", gpus=0).name("here")
    hosts.write_text("hosts: [a, c]")
    assert Machine(on=f"ssh:{hosts}", gpus=0).name("here") != before
    assert Machine(on="slurm", gpus=0).name("here") == "slurm"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(UsageError, match=r"--out .*/out: no folder can be made there"):
        take(tmp_path)


def test_the_worst_part_is_the_verdict() -> None:
    def verdict(*words: str | None) -> Overall:
        return judge([{"overall": word} for word in words])

    assert verdict("PASS", None) is Overall.PASS
    assert verdict("PASS", "WARN") is Overall.WARN
    assert verdict("WARN", "INCOMPLETE") is Overall.INCOMPLETE
    assert verdict("INCOMPLETE", "FAIL") is Overall.FAIL
    assert verdict(None) is Overall.INCOMPLETE


def test_the_full_suite_has_all_measurements(tmp_path: Path) -> None:
    found = {one.name: one for one in plan("full", Options(), Machine(on=None, gpus=8), tmp_path)}
    assert list(found) == [
        "check", "bandwidth", "bandwidth-network", "latency", "train-resnet18", "train-resnet50", "train-transformer",
        "isolate",
    ]  # fmt: skip
    assert found["bandwidth-network"].env == FORCED_NETWORK
    assert FORCED_NETWORK == {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_ALGO": "Ring"}
    assert list(found["train-resnet18"].words[1:5]) == ["--model", "resnet18", "--batch-size", "128"]
    assert list(found["train-resnet50"].words[1:3]) == ["--batch-size", "64"]
    assert found["isolate"].skip is not None
    assert all(one.skip is None for one in found.values() if one.name != "isolate")


def test_one_gpu_has_no_bandwidth_and_says_so(tmp_path: Path) -> None:
    found = plan("quick", Options(), Machine(on=None, gpus=1), tmp_path)
    skips = {one.name: one.skip for one in found}
    assert "no peer" in str(skips["bandwidth"])
    assert skips["train-resnet18"] is None


def test_nodes_are_isolated_only_if_something_is_slow(tmp_path: Path) -> None:
    found = plan("full", Options(), Machine(on="ssh:hosts.yaml", gpus=0), tmp_path)
    assert [one.name for one in found] == [
        "check", "bandwidth", "bandwidth-network", "latency", "train-resnet18", "train-resnet50", "train-transformer",
        "isolate",
    ]  # fmt: skip
    assert found[2].env == FORCED_NETWORK
    assert found[-1].if_slow
    assert found[-1].skip is None
    assert all("--on" in one.words for one in found)


@pytest.mark.parametrize("on", ["ssh:hosts.yaml", "slurm"])
def test_collectives_of_a_cluster_run_between_its_nodes(tmp_path: Path, on: str) -> None:
    found = {one.name: one for one in plan("quick", Options(backend="gloo"), Machine(on=on, gpus=0), tmp_path)}
    assert list(found["bandwidth"].words[:5]) == ["bandwidth", "--on", on, "--backend", "gloo"]
    assert all(one.skip is None for one in found.values())
    full = {one.name: one for one in plan("full", Options(backend="gloo"), Machine(on=on, gpus=0), tmp_path)}
    assert "NCCL" in str(full["bandwidth-network"].skip)


@pytest.mark.spawns
@pytest.mark.parametrize(("verdicts", "runs"), [(("PASS", "PASS", "FAIL"), True), (("FAIL", "PASS", "PASS"), False)])
def test_isolation_follows_a_slow_measurement(tmp_path: Path, verdicts: tuple[str, ...], runs: bool) -> None:
    last = Part(
        name="isolate", title="Isolate", kind="isolation", words=["isolate", "PASS", str(tmp_path)], if_slow=True
    )
    document = run(
        "full", [*parts(tmp_path, verdicts), last], tmp_path / "out", on="ssh:x", show=lambda _: None,
        program=(sys.executable, "-IS", "-c", PROGRAM),
    )  # fmt: skip
    assert ("isolate" in began(tmp_path)) == runs
    assert document["overall"] == "FAIL"
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == document


@pytest.mark.parametrize(
    ("backend", "gpus", "used"), [(None, 0, "gloo"), (None, 16, "nccl"), (None, None, "nccl"), ("nccl", 0, "nccl"),
                                  ("gloo", 16, "gloo")],
)  # fmt: skip
def test_the_nodes_decide_the_backend(tmp_path: Path, backend: Any, gpus: int | None, used: str) -> None:
    machine = Machine(on="ssh:hosts.yaml", gpus=gpus, nodes=3)
    found = {one.name: one for one in plan("quick", Options(backend=backend), machine, tmp_path)}
    assert list(found["bandwidth"].words[3:5]) == ["--backend", used]
    assert found["isolate"].skip is None


@pytest.mark.parametrize("gpus", [(8, 8), (0, 8), (0, 0)])
def test_gpus_that_torch_does_not_see_count_as_there(gpus: tuple[int, int]) -> None:
    seen, devices = gpus

    class Access:
        async def nodes(self) -> list[Node]:
            return [Node(name="gpu-01"), Node(name="gpu-02")]

        async def run(self, *_: Any) -> list[Result]:
            gpus = {"gpus": seen, "devices": devices}
            offer = {"host": "vm", "address": None, "ports": [1], "torch": "2", "why": "", **gpus}
            return [Result(code=0, state=None, out=json.dumps(offer), err="")]

        async def close(self) -> None:
            pass

    class Target:
        def open_nodes(self, **_: Any) -> Access:
            return Access()

    target: Any = Target()
    machine = ask_nodes(target, "ssh:x", home=Path("/nowhere"))
    assert (machine.nodes, machine.gpus) == (2, 2 * max(gpus))
    assert ask_nodes(target, "ssh:x", home=Path("/nowhere"), expects_gpus=True).gpus == (2 * max(gpus) or None)
    isolate = plan("quick", Options(), machine, Path("/x"))[-1]
    assert "three nodes" in str(isolate.skip) and "--expect GB/S" in str(isolate.skip)


PASS, ERROR = {"verdict": "pass", "reason": "a"}, {"verdict": "error", "reason": "it hung"}


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"results": [{"findings": [PASS, {"verdict": "error", "reason": "bad", "device": "n1"}]}]}, "n1: bad"),
        ({"nodes": [{"node": "n2", "results": [{"findings": [PASS, ERROR]}]}]}, "n2: it hung"),
        ({"diagnosis": {"notes": ["too few pairs"], "action": "more"}, "silent": {}}, "too few pairs"),
        ({"diagnosis": None, "silent": {"n3": "nothing listens"}}, "n3: nothing listens"),
        ({}, "something that was planned has no result"),
    ],
)  # fmt: skip
def test_a_part_without_a_verdict_says_why(document: dict[str, Any], reason: str) -> None:
    assert find_reason(document, Overall.INCOMPLETE) == reason
    assert find_reason(document, Overall.WARN) is None
