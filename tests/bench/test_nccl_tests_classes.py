"""Classes of nccl-tests files that must not pass, and healthy ones that must: each made from a healthy sample."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from nccl_tables import SAMPLES, averaged, healthy, text

from trainmaster.bench import nccl_tests
from trainmaster.core.results import CheckResult, Overall, Verdict, judge_overall


def unnamed(table: str) -> str:
    return "\n".join(line for line in table.splitlines() if "Collective test" not in line)


def overall(result: CheckResult) -> Overall:
    return judge_overall([result], planned=[nccl_tests.CHECK])


def reasons(result: CheckResult) -> str:
    return "\n".join(f"{finding.verdict} {finding.reason}" for finding in result.findings)


def with_factor(table: str, factor: float, *, redop: str = "sum") -> str:
    """The same table with another bus bandwidth, as another collective prints it."""

    def row(match: re.Match[str]) -> str:
        cells = match[0].split()
        cells[3] = redop
        for index in (7, 11):
            cells[index] = f"{float(cells[index - 1]) * factor:.2f}"
        return "  ".join(cells)

    return averaged(re.sub(r"^ +\d{4,} +\d+ +float .*$", row, table, flags=re.MULTILINE))


# --- a table that does not name its collective -----------------------------------------------------------------------


def test_a_table_without_a_name_is_known_by_its_bandwidths() -> None:
    result = nccl_tests.judge(unnamed(healthy()), ranks=8)
    assert overall(result) is Overall.PASS, reasons(result)
    assert "all_reduce: " in reasons(result)


@pytest.mark.parametrize(("redop", "factor"), [("none", 0.875), ("none", 1.0), ("sum", 1.0)])
def test_a_table_that_could_be_of_several_collectives_is_incomplete(redop: str, factor: float) -> None:
    table = with_factor(unnamed(healthy()), factor, redop=redop)
    result = nccl_tests.judge(table, ranks=8)
    assert overall(result) is Overall.INCOMPLETE, reasons(result)
    assert "does not name its collective" in reasons(result)


def test_the_users_word_names_the_collective() -> None:
    table = with_factor(unnamed(healthy()), 0.875, redop="none")
    result = nccl_tests.judge(table, ranks=8, collective="all_gather", least_gbps=10)
    assert overall(result) is Overall.PASS, reasons(result)
    assert "all_gather: " in reasons(result)


def test_a_word_that_the_table_contradicts_is_no_verdict() -> None:
    assert overall(nccl_tests.judge(healthy(), ranks=8, collective="all_gather")) is Overall.INCOMPLETE


def test_the_command_before_the_table_names_it() -> None:
    table = "+ srun -N1 /opt/nccl-tests/build/all_gather_perf -b 8 -e 1G\n"
    table += with_factor(unnamed(healthy()), 0.875, redop="none")
    result = nccl_tests.judge(table, ranks=8, least_gbps=10)
    assert overall(result) is Overall.PASS, reasons(result)
    assert "all_gather: " in reasons(result)


# --- data that was not verified --------------------------------------------------------------------------------------


def not_applicable(table: str, columns: tuple[int, ...], only: str = "") -> str:
    def row(match: re.Match[str]) -> str:
        cells = match[0].split()
        if only and cells[0] != only:
            return match[0]
        for column in columns:
            cells[column] = "N/A"
        return "  ".join(cells)

    return re.sub(r"^ +\d{4,} +\d+ +float .*$", row, table, flags=re.MULTILINE)


@pytest.mark.parametrize("only", ["", "134217728"])
def test_validation_that_is_claimed_and_not_shown_is_incomplete(only: str) -> None:
    result = nccl_tests.judge(not_applicable(healthy(), (8, 12), only), ranks=8)
    assert overall(result) is Overall.INCOMPLETE, reasons(result)
    assert "was not verified" in reasons(result)


def test_one_verified_side_is_enough() -> None:
    assert overall(nccl_tests.judge(not_applicable(healthy(), (12,)), ranks=8)) is Overall.PASS


# --- the worst of what was measured ----------------------------------------------------------------------------------


def slow(line: str, *, sides: tuple[int, ...]) -> str:
    """A row whose side (5: out of place, 9: in place) took ten times as long."""
    cells = line.split()
    for side in sides:
        cells[side] = f"{float(cells[side]) * 10:.1f}"
        cells[side + 1] = f"{float(cells[side + 1]) / 10:.2f}"
        cells[side + 2] = f"{float(cells[side + 1]) * 1.75:.2f}"
    return "  ".join(cells)


def judged_row(table: str) -> str:
    """The row of 128 MiB, the size of the baseline."""
    (row,) = [line for line in table.splitlines() if line.split()[:1] == ["134217728"]]
    return row


@pytest.mark.parametrize("side", [5, 9])
def test_each_side_is_judged(side: int) -> None:
    table = healthy()
    result = nccl_tests.judge(table.replace(judged_row(table), slow(judged_row(table), sides=(side,))), ranks=8)
    assert overall(result) is Overall.FAIL, reasons(result)


@pytest.mark.parametrize("first", [True, False])
def test_of_a_size_that_comes_twice_the_worst_counts(first: bool) -> None:
    table, row = healthy(), judged_row(healthy())
    bad = slow(row, sides=(5, 9))
    both = f"{bad}\n{row}" if first else f"{row}\n{bad}"
    assert overall(nccl_tests.judge(table.replace(row, both), ranks=8)) is Overall.FAIL


# --- launchers -------------------------------------------------------------------------------------------------------

PREFIXES = {
    "Open MPI 5": "[prterun-node1-70312@1,0]<stdout>: ",
    "torch": "[rank0]:",
    "torchrun": "[default0]:",
    "SkyPilot head": "(head, rank=0, pid=17894) ",
    "SkyPilot worker": "(worker1, rank=1, pid=3210, ip=10.0.0.2) ",
    "SkyPilot with colours": "\x1b[36m(head, rank=0, pid=17894)\x1b[0m ",
    "Ray": "(NcclTask pid=1876, ip=10.52.2.7) ",
    "docker compose": "nccl-test-1  | ",
    "kubectl logs --prefix": "[pod/nccl-launcher-x7/main] ",
    "pod": "[nccl-test-launcher] ",
    "srun -l": " 0: ",
    "Open MPI": "[1,0]<stdout>: ",
    "Open MPI in a pod": "[pod/nccl-launcher-x7/main] [1,0]<stdout>:",
    "CRI": "2026-01-05T10:00:00.123456789Z stdout F ",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_the_prefix_of_a_launcher_is_no_part_of_the_table(prefix: str) -> None:
    marked = "\n".join(prefix + line for line in healthy().splitlines())
    result = nccl_tests.judge(marked, ranks=8)
    assert overall(result) is Overall.PASS, reasons(result)


def test_colours_are_no_part_of_the_table() -> None:
    table = "\n".join(f"\x1b[1;32m{line}\x1b[0m" for line in healthy().splitlines())
    assert overall(nccl_tests.judge(table, ranks=8)) is Overall.PASS


def test_a_table_whose_hashes_were_stripped_is_read() -> None:
    table = re.sub(r"^#", "", healthy(), flags=re.MULTILINE)
    result = nccl_tests.judge(table, ranks=8)
    assert overall(result) is Overall.PASS, reasons(result)
    assert overall(nccl_tests.judge(table.replace("0 OK", "3 FAILED"), ranks=8)) is Overall.FAIL


def test_rccl_tests_are_read() -> None:
    table = healthy().replace("NVIDIA H100 80GB HBM3", "AMD Instinct MI300X")
    table = re.sub(r"(?m)^# Using devices$", "rccl-tests: Version develop:33cc4df\n# Using devices", table)
    versions = "RCCL version : 2.27.7-develop:29e1567\nHIP version  : 7.0.51831\nHostname     : node1\n"
    table = re.sub(r"(?m)^(#  Rank  7.*)$", rf"\1\n{versions}", table)
    result = nccl_tests.judge(table, ranks=8, least_gbps=100)
    assert overall(result) is Overall.PASS, reasons(result)
    assert overall(nccl_tests.judge(table, ranks=8)) is Overall.INCOMPLETE, "there is no baseline for it"


DEATHS = [
    "srun: error: node2: task 9: Segmentation fault (core dumped)",
    "slurmstepd: error: *** STEP 1234.0 ON node1 CANCELLED AT 2026-03-01T12:00:00 DUE TO TIME LIMIT ***",
    "mpirun noticed that process rank 9 with PID 4251 on node node2 exited on signal 11 (Segmentation fault).",
    "[node2:04251] *** Process received signal ***",
    "srun: error: node2: tasks 8-15: Killed",
    "command terminated with exit code 137",
    "Killed",
    "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "CUDA error: an illegal memory access was encountered",
    "terminate called after throwing an instance of 'std::runtime_error'",
    "Fatal error in MPI_Init: Other MPI error, error stack:",
    "Fatal error in PMPI_Init_thread: Other MPI error, error stack:",
    "Abort(1090831) on node 0 (rank 0 in comm 0): Fatal error in internal_Init",
    "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
    "[node2:04251] PMIX ERROR: UNREACHABLE in file ptl_tcp_component.c at line 1849",
    "[node1:00077] [[1,0],0] ORTE_ERROR_LOG: Data unpack would read past end of buffer",
    "[1762899999.123456] [node1:77:0]  ib_device.c:801  UCX  ERROR ibv_create_qp() failed: Cannot allocate memory",
    "srun: Force Terminated StepId=12.0",
    "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
    "srun: error: node2: task 3: Out Of Memory",
    "srun: error: Timed out waiting for job step to complete",
    "srun: error: Node failure on node2",
    "srun: error: task 3 launch failed: Communication connection failure",
    "mpirun has exited due to process rank 3 with PID 12 on node node2 exiting improperly.",
    "Primary job  terminated normally, but 1 process returned a non-zero",
    "An ORTE daemon has unexpectedly failed after launch and before communicating back",
    "Connection to node2 closed by remote host.",
    "client_loop: send disconnect: Broken pipe",
    "ssh: connect to host node2 port 22: Connection refused",
    "Traceback (most recent call last):",
    "[ 1234.5] NVRM: Xid (PCI:0000:13:00): 79, GPU has fallen off the bus.",
    "salloc: Job allocation 5 has been revoked.",
    "Primary job  terminated normally, but 1 process returned\na non-zero exit code. Per user-direction, the job",
    "double free or corruption (!prev)",
    "step 5.0 TIMEOUT",
    "[12345.6] Out of memory: Killed process 4251 (all_reduce_perf)",
]


@pytest.mark.parametrize("line", DEATHS)
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_dead_process_beside_a_whole_table_fails(line: str, where: str) -> None:
    table = f"{line}\n{healthy()}" if where == "before" else f"{healthy()}\n{line}\n"
    result = nccl_tests.judge(table, ranks=8)
    assert overall(result) is Overall.FAIL, reasons(result)
    assert "died" in reasons(result)


HARMLESS = [
    "srun: job 77 queued and waiting",
    "Job finished (exit code 0)",
    "node1: Killing 0",
    "[node1:00077] PMIX ERROR: ERROR in file ../../src/mca/gds/ds12/gds_ds12_lock_pthread.c at line 168",
    "[1762899999.1] [node1:77:0] ucp_context.c:969 UCX  WARN  network device 'mlx5_9:1' is not available",
    "salloc: Relinquishing job allocation 5\nsalloc: Job allocation 5 has been revoked.",
    "NCCL_IB_TIMEOUT set by environment to 22",
]


@pytest.mark.parametrize("line", HARMLESS)
def test_harmless_words_of_a_launcher_do_no_harm(line: str) -> None:
    assert overall(nccl_tests.judge(f"{line}\n{healthy()}\n{line}\n", ranks=8)) is Overall.PASS


def test_a_warning_of_nccl_is_evidence() -> None:
    line = "node1:1:2 [0] ibvwrap.cc:94 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out"
    result = nccl_tests.judge(f"{healthy()}\n{line}\n", ranks=8)
    assert overall(result) is Overall.WARN
    assert "ibv_modify_qp" in reasons(result)


# --- healthy files that were accused ---------------------------------------------------------------------------------


def later(table: str) -> str:
    """The same run, started by other processes afterwards."""
    return re.sub(r"Pid +(\d+)", lambda match: f"Pid {int(match[1]) + 700}", table)


@pytest.mark.parametrize("stated", [None, 8])
def test_two_healthy_runs_one_after_the_other_pass(stated: int | None) -> None:
    result = nccl_tests.judge(f"{healthy()}\n{later(healthy())}\n", ranks=stated)
    assert overall(result) is Overall.PASS, reasons(result)


def test_the_second_of_two_runs_is_judged_too() -> None:
    second = later(healthy())
    second = second.replace(judged_row(second), slow(judged_row(second), sides=(5, 9)))
    assert overall(nccl_tests.judge(f"{healthy()}\n{second}\n", ranks=8)) is Overall.FAIL


def test_two_tables_of_two_collectives_are_two_runs() -> None:
    gather = with_factor(healthy().replace("all_reduce_perf", "all_gather_perf"), 0.875, redop="none")
    result = nccl_tests.judge(f"{healthy()}\n{later(gather)}\n", ranks=8, least_gbps=10)
    assert overall(result) is Overall.PASS, reasons(result)
    assert "all_gather: " in reasons(result) and "all_reduce: " in reasons(result)


@pytest.mark.parametrize(
    "second",
    [lambda table: re.sub(r"Pid +(\d+)", lambda m: f"Pid {int(m[1]) + 8}", table)],
    ids=["neighbouring processes"],
)
def test_copies_that_never_met_still_fail(second: Callable[[str], str]) -> None:
    result = nccl_tests.judge(f"{healthy()}\n{second(healthy())}\n")
    assert overall(result) is Overall.FAIL, reasons(result)


def test_runs_on_other_nodes_without_a_stated_number_are_no_verdict() -> None:
    other = later(healthy()).replace("node1", "node2")
    assert overall(nccl_tests.judge(f"{healthy()}\n{other}\n")) is Overall.INCOMPLETE
    assert overall(nccl_tests.judge(f"{healthy()}\n{other}\n", ranks=16)) is Overall.FAIL


def test_an_excerpt_of_the_rank_list_is_incomplete() -> None:
    table = "\n".join(
        line for line in text("2-nodes.txt").splitlines() if not re.search(r"Rank +([2-9]|1[0-4]) ", line)
    )
    for stated in (None, 16):
        result = nccl_tests.judge(table, ranks=stated, least_gbps=100)
        assert overall(result) is Overall.INCOMPLETE, reasons(result)
    assert overall(nccl_tests.judge(table, ranks=8, least_gbps=100)) is Overall.FAIL


# --- several runs in one file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_a_judged_run_does_not_hide_one_without_a_baseline(first: bool) -> None:
    """all_gather of a GPU without a baseline or a known link would pass beside a healthy all_reduce."""
    table = healthy().replace("NVIDIA H100 80GB HBM3", "NVIDIA X900")
    other = with_factor(table.replace("all_reduce_perf", "all_gather_perf"), 0.875, redop="none")
    runs = [healthy(), later(other)] if first else [other, later(healthy())]
    result = nccl_tests.judge("\n".join(runs), ranks=8)
    assert overall(result) is Overall.INCOMPLETE, reasons(result)
    assert "there is no baseline for all_gather" in reasons(result)


# --- sizes that are missing ------------------------------------------------------------------------------------------


def rows_of(table: str) -> list[str]:
    return [line for line in table.splitlines() if re.match(r" +\d{4,} +\d+ +float ", line)]


def test_a_lost_size_is_incomplete_although_the_number_of_rows_is_right() -> None:
    table = healthy()
    first, last = rows_of(table)[0], rows_of(table)[-1]
    result = nccl_tests.judge(table.replace(last, first), ranks=8, least_gbps=1)
    assert overall(result) is Overall.INCOMPLETE, reasons(result)
    assert f"the size of {last.split()[0]} bytes was not measured" in reasons(result)


def test_whole_sweeps_one_after_the_other_pass() -> None:
    table, rows = healthy(), rows_of(healthy())
    twice = table.replace(rows[-1], "\n".join([rows[-1], *rows]))
    assert overall(nccl_tests.judge(twice, ranks=8)) is Overall.PASS
    assert overall(nccl_tests.judge(twice.replace(rows[2], "", 1), ranks=8)) is Overall.INCOMPLETE


@pytest.mark.parametrize("floor", [0.0, -1.0, float("nan"), float("inf")])
def test_a_floor_that_cannot_be_missed_is_no_verdict(floor: float) -> None:
    assert overall(nccl_tests.judge(healthy(), ranks=8, least_gbps=floor)) is Overall.INCOMPLETE


def test_two_ranks_on_one_gpu_are_no_measurement() -> None:
    lines = healthy().splitlines()
    first, second = (next(line for line in lines if re.search(rf"Rank +{rank} ", line)) for rank in (0, 1))
    device = re.search(r"device .*?\]", first)
    assert device is not None
    shared = re.sub(r"device .*?\]", device[0], second)
    result = nccl_tests.judge(healthy().replace(second, shared), ranks=8)
    assert overall(result) is Overall.INCOMPLETE, reasons(result)
    assert "same GPU" in reasons(result)


def test_a_table_without_the_column_of_wrong_values_is_incomplete() -> None:
    table = healthy().replace("#wrong", "")
    table = re.sub(r"^( +\d{4,} +\d+ +float .*)$", _without_wrong, table, flags=re.MULTILINE)
    result = nccl_tests.judge(table, ranks=8)
    assert overall(result) is Overall.INCOMPLETE, reasons(result)
    assert "was not verified" in reasons(result)


def _without_wrong(match: re.Match[str]) -> str:
    cells = match[0].split()
    return "  ".join(cells[:8] + cells[9:12])


@pytest.mark.parametrize(("unit", "other"), [("(GB/s)", "(Gb/s)"), ("(us)", "(ms)"), ("(GB/s)", "(GiB/s)")])
def test_a_column_in_another_unit_is_no_pass(unit: str, other: str) -> None:
    assert unit in healthy()
    result = nccl_tests.judge(healthy().replace(unit, other), ranks=8)
    assert overall(result) is Overall.INCOMPLETE and f"a column is in {other}" in reasons(result)


def test_a_row_that_was_cut_off_accuses_no_rank() -> None:
    """The last cell of the last row lost its end: the rows then fit no number of ranks."""
    rows = [line for line in healthy().splitlines() if re.match(r" +\d{4,} ", line)]
    cells = rows[-1].split()
    cells[6], cells[7] = cells[6], cells[7][:-4] or "1"
    result = nccl_tests.judge(healthy().replace(rows[-1], "  ".join(cells)), ranks=8)
    assert overall(result) is Overall.INCOMPLETE, reasons(result)


def test_a_run_over_unequal_nodes_warns() -> None:
    text = (SAMPLES / "nccl-tests-2-nodes.txt").read_text()

    def verdict(of: str, ranks: int | None = 16) -> tuple[str, str]:
        result = nccl_tests.judge(of, ranks=ranks, least_gbps=100.0)
        reasons = " ".join(f.reason for f in result.findings if f.verdict is Verdict.WARN)
        return str(judge_overall([result], planned=[result.check])), reasons

    assert verdict(text)[0] == "PASS"
    other = "".join(
        line.replace("H100 80GB HBM3", "A100-SXM4-80GB") if "on ip-10-1-0-12 " in line else line
        for line in text.splitlines(keepends=True)
    )
    overall, why = verdict(other)
    assert overall == "WARN" and "8 × NVIDIA A100-SXM4-80GB, 8 × NVIDIA H100" in why
    # The last GPU of the second node is listed as a ninth one of the first.
    moved = text.replace("on ip-10-1-0-12 device  7 [0000:8f:00]", "on ip-10-1-0-11 device  8 [0000:99:00]")
    overall, why = verdict(moved)
    assert overall == "WARN" and "9 on ip-10-1-0-11, 7 on ip-10-1-0-12" in why
