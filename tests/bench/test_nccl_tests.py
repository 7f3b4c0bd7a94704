"""nccl-tests: what they printed is judged by what it proves, and a tool that is absent, hangs or fails is no pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainmaster.bench import nccl_tests
from trainmaster.cli.main import build
from trainmaster.core.results import CheckResult, Overall, Verdict, judge_overall
from trainmaster.node.host import Host

SAMPLES = Path(__file__).parents[1] / "node" / "parse" / "samples"


def text(name: str) -> str:
    return (SAMPLES / f"nccl-tests-{name}").read_text()


def one_node() -> str:
    """One of the two runs that never met: a healthy 8×H100."""
    return "\n".join(line[3:] for line in text("two-single-nodes.txt").splitlines() if line.startswith("0: "))


def overall(result: CheckResult) -> Overall:
    return judge_overall([result], planned=[nccl_tests.CHECK])


def reasons(result: CheckResult) -> str:
    return "\n".join(f"{finding.verdict} {finding.reason}" for finding in result.findings)


def test_a_healthy_node_passes_at_the_named_size_with_the_source() -> None:
    result = nccl_tests.judge(one_node(), ranks=8)
    assert overall(result) is Overall.PASS, reasons(result)
    assert "at 128 MiB" in reasons(result) and "awsome-distributed-ai" in reasons(result)


def test_two_runs_that_never_met_fail_and_are_counted() -> None:
    result = nccl_tests.judge(text("two-single-nodes.txt"), ranks=16)
    assert overall(result) is Overall.FAIL
    assert "these were 2 separate runs of 8 ranks" in reasons(result)


def test_bandwidths_of_8_ranks_under_a_head_of_16_fail() -> None:
    # The head lists 16 devices; the factor of the rows is 1.75, which is 8 ranks and not 16.
    listed = [line for line in one_node().splitlines() if line.startswith("#  Rank")]
    more = [line.replace(f"Rank {n:2}", f"Rank {n + 8:2}").replace("node1", "node2") for n, line in enumerate(listed)]
    result = nccl_tests.judge(one_node().replace(listed[-1], "\n".join([listed[-1], *more])))
    assert overall(result) is Overall.FAIL
    assert "these were 2 separate runs of 8 ranks" in reasons(result)


def test_fewer_ranks_than_were_wanted_fail() -> None:
    result = nccl_tests.judge(one_node(), ranks=16)
    assert overall(result) is Overall.FAIL
    assert "16 ranks should have met" in reasons(result)


@pytest.mark.parametrize("name", ["wrong.txt", "wrong.json"])
def test_corrupt_data_fails_however_fast_it_was(name: str) -> None:
    result = nccl_tests.judge(text(name))
    assert overall(result) is Overall.FAIL
    assert "wrong data arrived" in reasons(result)


def test_data_that_was_not_checked_is_no_pass() -> None:
    result = nccl_tests.judge(one_node().replace("validation: 1", "validation: 0"), ranks=8)
    assert overall(result) is not Overall.PASS


@pytest.mark.parametrize(
    "damage", [lambda t: t[: len(t) // 2], lambda t: t.replace("Out of bounds", "0ut 0f"), str.upper]
)
def test_damaged_output_is_no_pass(damage: object) -> None:
    assert overall(nccl_tests.judge(damage(one_node()), ranks=8)) is not Overall.PASS  # type: ignore[operator]


@pytest.mark.parametrize("raw", ["", "mpirun: command not found", b"\xff\xfe"])
def test_what_is_no_output_is_incomplete(raw: str | bytes) -> None:
    assert overall(nccl_tests.judge(raw, ranks=8)) is Overall.INCOMPLETE


def test_between_nodes_the_fabric_must_be_proven_before_a_baseline_fits() -> None:
    unproven = nccl_tests.judge(text("2-nodes.txt"), ranks=16)
    assert overall(unproven) is Overall.INCOMPLETE
    assert overall(nccl_tests.judge(text("2-nodes.txt"), ranks=16, least_gbps=100)) is Overall.PASS
    assert overall(nccl_tests.judge(text("2-nodes.txt"), ranks=16, least_gbps=9999)) is Overall.FAIL
    expected = nccl_tests.judge(text("2-nodes.txt"), ranks=16, least_gbps=100, expected="EFA")
    assert overall(expected) is Overall.INCOMPLETE, "EFA was expected, and no log of NCCL shows it"


def install(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with a stand-in for nvidia-smi that lists 8 GPUs."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    install(
        tmp_path, "nvidia-smi", 'for n in 0 1 2 3 4 5 6 7; do echo "GPU $n: NVIDIA H100 80GB HBM3 (UUID: GPU-$n)"; done'
    )
    return tmp_path


@pytest.mark.spawns
def test_installed_tests_are_run_with_every_gpu_and_judged(tools: Path) -> None:
    (tools / "output").write_text(one_node())
    install(tools, "all_reduce_perf", f'echo "$@" > {tools}/words; cat {tools}/output')
    result = nccl_tests.run(Host(), ["all_reduce"], max_size="128M")
    assert overall(result) is Overall.PASS, reasons(result)
    assert (tools / "words").read_text().split() == "-b 8K -e 128M -f 2 -g 8 -c 1".split()


@pytest.mark.spawns
def test_tests_that_fail_hang_or_are_absent_are_no_pass(tools: Path) -> None:
    absent = nccl_tests.run(Host(), ["all_reduce"])
    assert overall(absent) is Overall.INCOMPLETE
    assert "not installed" in reasons(absent)
    install(tools, "all_reduce_perf", "echo 'Test NCCL failure common.cu:1005'; exit 3")
    assert overall(nccl_tests.run(Host(), ["all_reduce"])) is Overall.FAIL
    install(tools, "all_reduce_perf", "sleep 60")
    hung = nccl_tests.run(Host(), ["all_reduce"], timeout_s=0.5)
    assert [finding.verdict for finding in hung.findings] == [Verdict.ERROR]


@pytest.mark.spawns
@pytest.mark.parametrize(("line", "verdict"), [
    ("n1:1:2 [3] NCCL WARN NET/IB : Got completion from peer with status=12", Overall.WARN),
    ("[n1:77] *** Process received signal ***", Overall.FAIL),
    ("some library says hello", Overall.PASS),
])  # fmt: skip
def test_standard_error_is_evidence(tools: Path, line: str, verdict: Overall) -> None:
    (tools / "output").write_text(one_node())
    install(tools, "all_reduce_perf", f"echo '{line}' >&2; cat {tools}/output")
    result = nccl_tests.run(Host(), ["all_reduce"], max_size="128M")
    assert overall(result) is verdict, reasons(result)


@pytest.mark.spawns
@pytest.mark.parametrize("script", [
    "exit 127", "exit 126",
    "echo 'error while loading shared libraries: libmpi.so.40: cannot open shared object file' >&2; exit 1",
    "echo 'slurmstepd: error: execve(): all_reduce_perf: No such file or directory' >&2; exit 2",
])  # fmt: skip
def test_a_program_that_never_started_measured_nothing(tools: Path, script: str) -> None:
    install(tools, "all_reduce_perf", script)
    result = nccl_tests.run(Host(), ["all_reduce"])
    assert overall(result) is Overall.INCOMPLETE, reasons(result)
    assert "could not be started" in reasons(result)


@pytest.mark.spawns
def test_a_program_that_started_and_ended_with_127_fails(tools: Path) -> None:
    (tools / "output").write_text(one_node())
    install(tools, "all_reduce_perf", f"cat {tools}/output; exit 127")
    assert overall(nccl_tests.run(Host(), ["all_reduce"])) is Overall.FAIL


def test_the_command_judges_a_file_with_the_right_exit_code(tmp_path: Path) -> None:
    (tmp_path / "good.log").write_text(one_node())
    runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"})
    words = ["bandwidth", "--nccl-tests", str(tmp_path / "good.log")]
    assert runner.invoke(build(), [*words, "--ranks", "8"]).exit_code == 0
    assert runner.invoke(build(), [*words, "--ranks", "16", "--json"]).exit_code == 1
    assert runner.invoke(build(), [*words, "--ranks", "8", "--expect-transport", "NVLS"]).exit_code == 3
