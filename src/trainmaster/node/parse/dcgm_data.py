"""The words for a DCGM diagnostic, whichever of DCGM's formats it was printed in."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from trainmaster.core.compat import StrEnum
from trainmaster.node.parse import shorten


class Status(StrEnum):
    """What DCGM says of one test on one GPU. UNKNOWN: it said something else, or nothing."""

    PASS = "Pass"  # noqa: S105 (DCGM's word for a verdict)
    SKIP = "Skip"
    WARN = "Warn"
    NOT_RUN = "Not Run"
    UNKNOWN = "Unknown"
    FAIL = "Fail"


# Skip weighs least: a GPU on which everything was skipped is not healthy, and one skipped test harms no pass.
WEIGHT = {
    status: weight
    for weight, status in enumerate(
        (Status.SKIP, Status.PASS, Status.WARN, Status.NOT_RUN, Status.UNKNOWN, Status.FAIL)
    )
}
_WORDS = {status.value.replace(" ", "").lower(): status for status in Status if status is not Status.UNKNOWN}


# The kinds of things DCGM 4 tests (DcgmFieldsGetEntityGroupString).
GROUPS = frozenset({"GPU", "vGPU", "Switch", "GPU_I", "GPU_CI", "LINK", "CPU", "CPU_CORE", "ConnectX"})

# dcgm_errors.h: what DCGM asks for when a test reports an error.
SEVERITIES = {0: "none", 1: "monitor", 2: "isolate", 3: "unknown", 4: "triage", 5: "config", 6: "reset"}

DEPLOYMENT = "Deployment"  # the category of the software tests
NODE = "node"  # the entity of a warning that DCGM 4 attaches to none


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One warning DCGM attached to a result."""

    text: str
    severity: int | None = None
    error_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One test on one GPU; `gpu` None speaks of the whole node or of something that is no GPU (`entity`)."""

    status: Status
    word: str  # as printed: a status we do not know is kept
    gpu: int | None = None
    entity: str | None = None  # "CPU0", "Switch3", NODE
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """One test: its results, and what DCGM 4 says of it as a whole."""

    __test__ = False  # not for pytest

    name: str
    category: str
    results: tuple[Result, ...]
    summary: Status | None = None

    @property
    def key(self) -> str:
        """One name for DCGM 3's `GPU Memory` and DCGM 4's `memory`."""
        name = re.sub(r"\W+", "_", self.name.strip().lower())
        return {"gpu_memory": "memory", "eud_test": "eud"}.get(name, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diag:
    """One run of the diagnostic (or all iterations of it)."""

    format: str  # "json-3", "json-4", "text-3", "text-4"
    dcgm_version: str | None
    driver_version: str | None
    gpus: tuple[int, ...]  # every GPU that was detected or that any row names
    gpu_count: int | None  # how many DCGM says it detected; None: it did not say
    tests: tuple[Test, ...]
    runtime_error: str | None = None  # why DCGM could not run the diagnostic
    faults: tuple[str, ...] = ()

    def missing(self) -> tuple[tuple[str, int], ...]:
        """(test, GPU) for each GPU that a test about GPUs says nothing of."""
        return tuple(
            (test.name, gpu)
            for test in self.tests
            if any(result.gpu is not None for result in test.results)
            # DCGM 3 gives one word for the node there, and names a GPU only where one is at fault.
            if not (test.category == DEPLOYMENT and self.format.endswith("3"))
            for gpu in self.gpus
            if all(result.gpu != gpu for result in test.results)
        )


def read_status(word: object) -> Status:
    """DCGM's word; whatever it never says is UNKNOWN."""
    if not isinstance(word, str):
        return Status.UNKNOWN
    return _WORDS.get(word.replace(" ", "").replace("_", "").lower(), Status.UNKNOWN)


@dataclass(slots=True)
class Draft:
    """What has been read so far."""

    tests: list[Test] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    runtime_error: str | None = None


def build(
    draft: Draft, *, form: str, dcgm: str | None, driver: str | None, count: int | None, known: Iterable[int]
) -> Diag:
    """The run as data. A GPU that was counted and is named nowhere keeps its place among `gpus`."""
    numbers = {result.gpu for test in draft.tests for result in test.results if result.gpu is not None}
    gpus = set(known) | numbers
    if count is None:
        draft.faults.append("the output does not say how many GPUs were detected")
    elif len(gpus) > count:
        draft.faults.append(f"{count} GPUs were detected, but the rows name {len(gpus)}")
    elif len(gpus) < count:
        # Without a list, DCGM numbers what it detected from 0; places are filled so that a lost GPU shows.
        free = [number for number in range(count) if number not in gpus]
        gpus |= set(free[: count - len(gpus)])
    for test in draft.tests:
        seen = [result.gpu for result in test.results if result.gpu is not None]
        if len(seen) != len(set(seen)):
            draft.faults.append(f"the test {shorten(test.name)} says two things of one GPU")
        node_wide = test.category == DEPLOYMENT and form.endswith("3")
        named = [result for result in test.results if result.entity != NODE]
        if not node_wide and (not named or any(result.gpu is None and result.entity is None for result in named)):
            draft.faults.append(f"a result of the test {shorten(test.name)} names no GPU")
    if not draft.tests and draft.runtime_error is None:
        draft.faults.append("the output holds no test")
    return Diag(
        format=form,
        dcgm_version=dcgm,
        driver_version=driver,
        gpus=tuple(sorted(gpus)),
        gpu_count=count,
        tests=tuple(draft.tests),
        runtime_error=draft.runtime_error,
        faults=tuple(draft.faults),
    )
