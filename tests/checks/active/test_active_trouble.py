"""A probe that crashes, hangs, lies or is missing is a finding of its GPU; the other GPUs keep their results."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_answers import PROBE, answer, line, only, report, uuid

from machines import H200, Machine
from trainmaster import checks
from trainmaster.checks.active import _probe, gemm
from trainmaster.core.expect import Expect
from trainmaster.core.results import Verdict
from trainmaster.node.host import CommandResult, Host
from trainmaster.node.recorded import CapturingHost, RecordedHost

ACTIVE = ("cuda_init", "gemm", "hbm", "pcie_copy", "memory_pattern", "memory_whole", "corruption", "burn")


def told(kind: str, message: str, step: str = "timing", **more: Any) -> Any:
    error = {"kind": kind, "message": message, "step": step, **more}
    return lambda document: document.update(error=error, results={})


@pytest.mark.parametrize("check", ACTIVE)
def test_a_crash_is_told_with_its_signal_and_last_words(machine: Machine, check: str) -> None:
    answer(machine, check, 3)
    machine.command(line(check, 1), "", exit_code=-11, stderr="Fatal Python error: Segmentation fault\n")
    good, bad, other = machine.judge(check)
    assert (good.verdict, other.verdict) == (Verdict.PASS, Verdict.PASS)
    assert (bad.device, bad.verdict) == ("gpu1", Verdict.ERROR)
    assert "SIGSEGV" in bad.reason
    assert "Segmentation fault" in bad.reason
    assert bad.action


@pytest.mark.parametrize("check", ACTIVE)
def test_a_killed_probe_is_an_error_of_its_gpu_alone(machine: Machine, check: str) -> None:
    answer(machine, check, 3)
    machine.refuses(line(check, 2), "CommandTimedOut", "python … gave no answer in 130 s and was killed")
    assert machine.verdicts(check) == {"gpu0": "pass", "gpu1": "pass", "gpu2": "error"}
    assert "hung" in machine.judge(check)[2].reason


class HangsOnOne(Host):
    """This machine, except that the probe of one GPU is a process that never ends."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._recorded = machine.host

    def run(self, *argv: str, timeout_s: float = 30.0) -> CommandResult:
        if uuid(1) in argv:
            return super().run("sleep", "600", timeout_s=timeout_s)
        return self._recorded.run(*argv)

    def read(self, path: str) -> str:
        return self._recorded.read(path)

    def list(self, path: str) -> tuple[str, ...]:
        return self._recorded.list(path)

    def env(self, name: str) -> str | None:
        return self._recorded.env(name)


@pytest.mark.spawns
def test_a_real_hang_is_killed_in_time_and_the_capture_replays(machine: Machine, tmp_path: Path) -> None:
    answer(machine, "gemm", 3)
    host = CapturingHost(HangsOnOne(machine), tmp_path / "captured")
    found = gemm.judge(_probe.read(host, "gemm", timeout_s=0.3), Expect())
    assert [finding.verdict for finding in found] == [Verdict.PASS, Verdict.ERROR, Verdict.PASS]
    assert "0.3 s and was killed" in found[1].reason
    again = gemm.judge(gemm.read(RecordedHost(tmp_path / "captured")), Expect())
    assert again == found


@pytest.mark.parametrize(
    ("message", "more", "verdict", "words"),
    [
        ("CUDA error: uncorrectable ECC error encountered", {}, "fail", "uncorrectable"),
        ("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might…", {}, "fail", "700"),
        ("Unexpected error from cudaGetDeviceCount(). … Error 802: system not yet initialized", {}, "fail", "fabric"),
        ("anything", {"code": 719}, "fail", "unspecified launch failure"),
        ("CUDA out of memory. Tried to allocate 4.00 GiB", {}, "error", "taken"),
        ("CUDA driver version is insufficient for CUDA runtime version", {}, "error", "too old"),
        ("Torch not compiled with CUDA enabled", {}, "error", "not compiled"),
        ("CUDA shows 0 of the 1 GPUs named GPU-1", {}, "error", "0 of the 1"),
        ("cudaErrorNobodyKnows", {}, "error", "NobodyKnows"),
    ],
)
def test_an_error_that_the_probe_tells_is_explained(
    machine: Machine, message: str, more: dict[str, int], verdict: str, words: str
) -> None:
    answer(machine, "cuda_init", 2, only(1, told("RuntimeError", message, **more)))
    good, bad = machine.judge("cuda_init")
    assert good.verdict is Verdict.PASS
    assert str(bad.verdict) == verdict
    assert words in bad.reason
    assert bad.action
    assert bad.values["step"] == "timing"


def test_error_802_says_what_to_start(machine: Machine) -> None:
    answer(
        machine, "cuda_init", 1, only(0, told("RuntimeError", "Error 802: system not yet initialized", "start CUDA"))
    )
    assert "fabricmanager" in (machine.judge("cuda_init")[0].action or "")


def test_a_node_without_torch_says_how_to_install_it(machine: Machine) -> None:
    answer(machine, "gemm", 2, lambda _, r: told("ModuleNotFoundError", "No module named 'torch'", "import torch")(r))
    for finding in machine.judge("gemm"):
        assert finding.verdict is Verdict.ERROR
        assert "pip install" in (finding.action or "")


@pytest.mark.parametrize(("step", "verdict"), [("timing", "fail"), ("import torch", "error"), ("waiting for", "error")])
def test_where_a_probe_hung_decides_whom_to_blame(machine: Machine, step: str, verdict: str) -> None:
    answer(machine, "pcie_copy", 2, only(0, told("Hung", "no end in 20 s", step)))
    bad, good = machine.judge("pcie_copy")
    assert (str(bad.verdict), good.verdict) == (verdict, Verdict.PASS)
    assert step in bad.reason


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "Killed",
        '{"v": 1}',
        '{"v": 2, "probe": "gemm", "device": {}, "results": {}, "error": null}',
        json.dumps(report("hbm", 0)),
        json.dumps(report("gemm", 0)) * 2,
        json.dumps(report("gemm", 0))[:-40],
        json.dumps({**report("gemm", 0), "device": None}),
        json.dumps({**report("gemm", 0), "results": []}),
        json.dumps(report("gemm", 0)).replace("786.0", "NaN"),
        json.dumps(report("gemm", 0)).replace("786.0", "Infinity"),
    ],
)
def test_rubbish_is_an_error(machine: Machine, text: str) -> None:
    answer(machine, "gemm", 1)
    machine.command(line("gemm", 0), text)
    assert machine.verdicts("gemm") == {"gpu0": "error"}


@pytest.mark.parametrize("device", [{"uuid": uuid(5)}, {"type": "cpu", "uuid": None}])
def test_a_report_of_another_device_is_an_error(machine: Machine, device: dict[str, Any]) -> None:
    answer(machine, "hbm", 2, only(1, lambda document: document["device"].update(device)))
    assert machine.verdicts("hbm") == {"gpu0": "pass", "gpu1": "error"}


def test_a_whole_report_with_a_bad_exit_is_no_pass(machine: Machine) -> None:
    answer(machine, "hbm", 1)
    machine.command(line("hbm", 0), json.dumps(report("hbm", 0)), exit_code=134, stderr="terminate called")
    assert machine.verdicts("hbm") == {"gpu0": "error"}


@pytest.mark.parametrize("check", ACTIVE)
def test_a_gpu_that_is_not_listed_is_an_error(machine: Machine, check: str) -> None:
    answer(machine, check, 4)
    machine.gpus(4, drop=2)
    assert machine.verdicts(check)["gpu2"] == "error"
    assert len(machine.judge(check)) == 4


@pytest.mark.parametrize("check", [*ACTIVE, "p2p"])
def test_without_gpus_it_skips(machine: Machine, check: str) -> None:
    machine.no_gpus()
    assert machine.verdicts(check) == {None: "skip"}


def test_gpus_kept_from_this_process_are_left_alone(machine: Machine) -> None:
    answer(machine, "gemm", 4)
    machine.answer("env", "CUDA_VISIBLE_DEVICES", f"1,{uuid(3)}")
    assert machine.verdicts("gemm") == {"gpu0": "skip", "gpu1": "pass", "gpu2": "skip", "gpu3": "pass"}
    # Four were promised: then two that may not be tried are not measured.
    assert machine.verdicts("gemm", gpus=4)["gpu0"] == "error"


@pytest.mark.parametrize(
    ("text", "shown"), [("", 0), ("-1", 0), ("0,9,1", 1), ("NoDevFiles", 0), ("0, 2", 2), ("GPU-0000", 4)]
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(text: str, shown: int) -> None:
    uuids = [uuid(number) for number in range(4)]
    assert len(uuids) - len(_probe.hidden_from(uuids, text)) == shown


def test_what_a_capture_does_not_hold_is_an_error(machine: Machine) -> None:
    answer(machine, "gemm", 2)
    machine.gpus(3)
    assert machine.verdicts("gemm") == {"gpu0": "pass", "gpu1": "pass", "gpu2": "error"}


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.just([]), st.just({})
)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, _probe.Probed]:
    """What the checks read on a healthy node of three GPUs."""
    folder = tmp_path_factory.mktemp("healthy") / "h200"
    shutil.copytree(H200, folder)
    for check in ACTIVE:
        answer(Machine(folder), check, 3)
    return {check: checks.load(check).read(RecordedHost(folder)) for check in ACTIVE}


@pytest.mark.matrix(one_in=3)
@pytest.mark.slow
@pytest.mark.parametrize("check", ACTIVE)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_damage_never_raises_and_never_touches_the_others(
    healthy: dict[str, _probe.Probed], check: str, data: st.DataObject
) -> None:
    """One leaf or branch of one report replaced by junk: one finding per GPU, and the healthy ones still pass."""
    document = copy.deepcopy(report(PROBE.get(check, (check,))[0], 1))  # its parts may be shared
    place: Any = document["results"]
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.booleans()):
            place[key] = data.draw(JUNK)
            break
        place = inner
    ran = CommandResult(argv=(), exit_code=0, stdout=json.dumps(document), stderr="", took_s=1.0)
    probed = replace(healthy[check], answers={**healthy[check].answers, uuid(1): ran})
    found = {finding.device: finding for finding in checks.load(check).judge(probed, Expect())}
    assert list(found) == ["gpu0", "gpu1", "gpu2"]
    for healthy_one in (found["gpu0"], found["gpu2"]):
        # A readable higher rate of the damaged report is evidence that the GPUs differ.
        differs = healthy_one.verdict is Verdict.WARN and "they differ" in healthy_one.reason
        assert differs or healthy_one.verdict is Verdict.PASS, healthy_one
    json.dumps([dict(finding.values) for finding in found.values()], allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(st.integers(min_value=0, max_value=len(json.dumps(report("corruption", 0))) - 2))
def test_half_a_report_is_none(cut: int) -> None:
    text = json.dumps(report("corruption", 0))[:cut]
    with pytest.raises(ValueError):
        _probe.parse(text, "corruption")


def test_every_active_check_is_level_2_or_3() -> None:
    assert {checks.load(name).LEVEL for name in (*ACTIVE, "p2p")} == {2, 3}
