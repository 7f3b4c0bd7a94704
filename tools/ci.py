"""Run the parts of `make test`; give at most two failed tests a second run by themselves, and name them as FLAKY.

Fails closed: a part that did not end with "all passed" or "some failed" (interrupted, crashed, nothing collected, no
record written) fails the run, whatever the tests that did run have shown.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

MAX_SECOND_RUNS = 2
CHECKS = ("system-packages", "lint", "types")
PARTS = ("parallel", "alone")
RECORD = "TRAINMASTER_TEST_RECORD"  # tests/record.py writes the outcome of one pytest run there
PASSED, FAILED = 0, 1  # pytest's exit codes; every other one means that not all tests ran


def main() -> int:
    for name in CHECKS:
        if subprocess.run(["make", name], check=False).returncode:
            return 1
    with tempfile.TemporaryDirectory() as folder:
        return judge([run_part(name, Path(folder) / name) for name in PARTS], run_again)


def run_part(name: str, record: Path) -> dict[str, object]:
    """Exit code and failed tests of one part."""
    subprocess.run(["make", name], env={**os.environ, RECORD: str(record)}, check=False)
    try:
        found = json.loads(record.read_text())
    except (OSError, ValueError):
        return {"exit": None, "failed": []}
    return dict(found)


def judge(records: Sequence[dict[str, object]], again: Callable[[Sequence[str]], bool]) -> int:
    """Exit code of the whole run; `again` runs tests once more and returns whether all of them passed."""
    failed = [str(test) for record in records for test in record["failed"]]  # type: ignore[attr-defined]
    if any(record["exit"] not in (PASSED, FAILED) for record in records):
        print("FAILED: not every test ran")
        return 1
    if any((record["exit"] == FAILED) != bool(record["failed"]) for record in records):
        print("FAILED: the exit code and the list of failed tests disagree")
        return 1
    if not failed:
        return 0
    if len(failed) > MAX_SECOND_RUNS:
        print(f"FAILED: {len(failed)} tests; at most {MAX_SECOND_RUNS} are run once more")
        return 1
    if not again(failed):
        print(*(f"FAILED: {test}, and again by itself or beside the other" for test in failed), sep="\n")
        return 1
    print(*(f"FLAKY: {test}" for test in failed), sep="\n")
    return 0


def run_again(tests: Sequence[str]) -> bool:
    pytest = Path(os.environ.get("VENV", ".venv")) / "bin" / "pytest"
    return all(subprocess.run([pytest, "-v", test], check=False).returncode == PASSED for test in tests)


if __name__ == "__main__":
    sys.exit(main())
