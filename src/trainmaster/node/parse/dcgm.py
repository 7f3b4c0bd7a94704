"""`dcgmi diag`: every test on every GPU, from the JSON of DCGM 3 and 4 and from both text tables."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainmaster.node.parse import as_text, load_json
from trainmaster.node.parse.dcgm_data import DEPLOYMENT, NODE, SEVERITIES, WEIGHT, Diag, Problem, Result, Status, Test
from trainmaster.node.parse.dcgm_json import parse_json
from trainmaster.node.parse.dcgm_table import parse_table

__all__ = [
    "DEPLOYMENT",
    "NODE",
    "SEVERITIES",
    "Diag",
    "ExitCode",
    "Problem",
    "Result",
    "Status",
    "Test",
    "missing_tests",
    "parse",
    "read_exit",
    "worst",
]

# The tests that a level always runs (FillTestVectors in nvvs/src/NvidiaValidationSuite.cpp). A test that only some
# GPUs or versions have (EUD, nvbandwidth, nccl_tests, memory_bandwidth) is not asked for.
_LEVELS: tuple[tuple[int, frozenset[str]], ...] = (
    (2, frozenset({"memory", "pcie"})),
    (3, frozenset({"diagnostic", "targeted_stress", "targeted_power"})),
    (4, frozenset({"memtest"})),
)


def parse(raw: str | bytes) -> Diag:
    """The output of `dcgmi diag -r N`, with or without `-j`."""
    text = as_text(raw)
    start = text.find("{")
    if start >= 0 and not any(line.startswith("|") for line in text[:start].splitlines()):
        # dcgmi may print a warning before the JSON; what follows the last brace is no part of it either.
        return parse_json(load_json(text[start : text.rfind("}") + 1] or text))
    return parse_table(text)


def worst(diag: Diag, gpu: int | None = None) -> Status:
    """The worst that is known of a GPU, or of the whole run. PASS only if nothing is missing and all was read."""
    statuses = [status for test in diag.tests for status in _statuses(test, gpu)]
    known = max(statuses, key=WEIGHT.__getitem__, default=Status.UNKNOWN)
    absent = [where for _, where in diag.missing() if gpu in (None, where)]
    unsure = diag.faults or diag.runtime_error or absent or (gpu is not None and gpu not in diag.gpus)
    return max(known, Status.UNKNOWN, key=WEIGHT.__getitem__) if unsure else known


def missing_tests(diag: Diag, level: int) -> tuple[str, ...]:
    """Tests that `dcgmi diag -r <level>` always runs and that this output does not show, or shows as skipped only."""
    shown = {test.key for test in diag.tests if not _is_skipped(test)}
    wanted = {name for at, names in _LEVELS if level >= at for name in names}
    lost = sorted(wanted - shown)
    # Level 1 is one test called `software` in DCGM 4, and one row for each of its parts in DCGM 3.
    if not any(test.category == DEPLOYMENT or test.key == "software" for test in diag.tests):
        lost.insert(0, "software")
    return tuple(lost)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCode:
    """What dcgmi meant by its exit code."""

    code: int  # DCGM's own, 0 or negative; a positive one was none of DCGM's
    meaning: str
    isolate: bool = False  # DCGM asks to take the GPU out of service


# dcgm_structs.h, dcgmReturn_t; the shell sees 256 minus the number.
_EXITS = {
    1: "a parameter was wrong",
    3: "an error that DCGM does not name",
    6: "the diagnostic is not supported here",
    7: "DCGM could not be initialised",
    8: "NVML returned an error",
    11: "it timed out",
    14: "the diagnostic returned no data",
    17: "no permission",
    18: "a GPU is lost",
    19: "a GPU needs a reset",
    21: "the host engine cannot be reached",
    22: "DCGM does not support this GPU",
    23: "the GPUs of the group differ",
    29: "it must run as root",
    30: "the diagnostic ran and reported an error",
    33: "the diagnostic module is not loaded",
    34: "the GPU is in use",
    35: "there is no GPU in the group",
    39: "another diagnostic is running",
    40: "the diagnostic returned broken JSON",
    41: "the diagnostic could not be started",
    43: "a value passed its error threshold",
    44: "the driver is too old",
    50: "a test crashed",
    51: "the diagnostic found an error that asks for isolation of the GPU",
    52: "the diagnostic program is not installed",
    53: "the diagnostic was killed",
    54: "DCGM is paused",
    56: "NVML is not loaded",
    57: "the NVIDIA driver did not answer",
    58: "no test of this level is available",
    66: "the diagnostic was stopped",
    67: "GPUs are detached",
}


def read_exit(code: int) -> ExitCode:
    """DCGM's return code behind the exit code of `dcgmi diag`: 226 is −30, 205 is −51."""
    if code == 0:
        return ExitCode(code=0, meaning="every test passed or was skipped")
    if 128 < code < 256:
        own = 256 - code
        return ExitCode(code=-own, meaning=_EXITS.get(own, f"DCGM error {-own}"), isolate=own == 51)
    if code < 0:
        return ExitCode(code=-code, meaning=f"dcgmi was ended by signal {-code}")
    return ExitCode(code=code, meaning=f"dcgmi ended with {code}, which is no code of DCGM")


def _is_skipped(test: Test) -> bool:
    """Whether a test ran on no GPU."""
    rows = [result.status for result in test.results if result.entity != NODE] or [
        test.summary if test.summary is not None else Status.UNKNOWN
    ]
    return all(status is Status.SKIP for status in rows)


def _statuses(test: Test, gpu: int | None) -> Iterator[Status]:
    for result in test.results:
        if gpu is None or result.gpu == gpu or (result.gpu is None and result.entity is None):
            yield result.status
    # A summary that is worse than every result speaks of something no row shows; it then concerns each GPU.
    named = [result for result in test.results if result.entity != NODE]
    rows = max((result.status for result in named), key=WEIGHT.__getitem__, default=Status.SKIP)
    if test.summary is not None and (not named or WEIGHT[test.summary] > WEIGHT[rows]):
        yield test.summary
    if not test.results and test.summary is None:
        yield Status.UNKNOWN
