"""The JSON of `dcgmi diag -j`.

That of DCGM 3 is under `DCGM GPU Diagnostic` and names GPUs by `gpu_id`; that of DCGM 4 is under `DCGM Diagnostic`,
names entities by group and number, and adds a summary per test. The shapes are those of dcgmi/Diag.cpp and
nvvs/include/NvvsJsonStrings.h in NVIDIA/DCGM, tags v2.4.7 to v4.6.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainmaster.node.parse import ParseError, read_int, shorten
from trainmaster.node.parse.dcgm_data import (
    GROUPS,
    NODE,
    Diag,
    Draft,
    Problem,
    Result,
    Status,
    Test,
    build,
    read_status,
)

NAMES = {"DCGM GPU Diagnostic": "json-3", "DCGM Diagnostic": "json-4"}


def parse_json(document: Any) -> Diag:
    """The document of one run, or of `--iterations`."""
    draft = Draft()
    if not isinstance(document, dict):
        raise ParseError("the JSON is not a DCGM diagnostic: it is no object")
    runs = document.get("iterations", [document])
    if not isinstance(runs, list):
        raise ParseError("the JSON is not a DCGM diagnostic: its iterations are no list")
    if not all(isinstance(run, dict) for run in runs):
        draft.faults.append("an iteration of the diagnostic has no report")
    runs = [run for run in runs if isinstance(run, dict)]
    forms = {form for run in runs for name, form in NAMES.items() if name in run}
    if len(forms) != 1:
        raise ParseError("the JSON is not a DCGM diagnostic: no `DCGM Diagnostic` and no `DCGM GPU Diagnostic` in it")
    known: set[int] = set()
    counts: set[int] = set()
    for run in runs:
        _read_run(run, draft)
        ids, count = _detected(run, draft)
        known |= ids
        counts |= set() if count is None else {count}
    if len(counts) > 1:
        draft.faults.append(f"the iterations detected different numbers of GPUs: {sorted(counts)}")
    overall = document.get("Overall Result", "Pass")
    if read_status(overall) is not Status.PASS:
        draft.runtime_error = draft.runtime_error or f"DCGM's overall result is {shorten(str(overall))}"
    meta = runs[0].get("metadata")
    meta = meta if isinstance(meta, dict) else runs[0]
    return build(
        draft,
        form=forms.pop(),
        dcgm=_word(meta.get("version")),
        driver=_word(meta.get("Driver Version Detected")),
        count=max(counts, default=None),
        known=known,
    )


def _read_run(run: dict[str, Any], draft: Draft) -> None:
    name = next((name for name in NAMES if name in run), None)
    body = run.get(name) if name else None
    if not isinstance(body, dict):
        draft.faults.append("a run of the diagnostic has no body")
        return
    for place in (body, run):
        if place.get("runtime_error"):
            draft.runtime_error = shorten(str(place["runtime_error"]))
    if draft.runtime_error is None or "test_categories" in body:
        for category in _list(body, "test_categories", draft):
            title = _word(category.get("category")) or ""
            for test in _list(category, "tests", draft):
                draft.tests.append(_read_test(test, title, draft))


def _read_test(test: dict[str, Any], category: str, draft: Draft) -> Test:
    name = _word(test.get("name"))
    if name is None:
        draft.faults.append("a test has no name")
    results: list[Result] = []
    rows = test.get("results")
    if not isinstance(rows, list) or not rows:
        draft.faults.append(f"the test {name or '?'} has no results")
        rows = []
    for row in rows:
        if row is None:  # DCGM 3 leaves a hole for a GPU that did not run the test
            results.append(Result(status=Status.NOT_RUN, word=""))
        elif isinstance(row, dict):
            results.extend(_read_result(row, draft))
        else:
            draft.faults.append(f"a result of the test {name or '?'} is no object")
    summary = test.get("test_summary")
    status = None
    results.extend(_read_remarks(test, draft))
    if isinstance(summary, dict):
        status = read_status(summary.get("status"))
        results.extend(_read_remarks(summary, draft))
    elif "test_summary" in test:
        draft.faults.append(f"the summary of the test {name or '?'} is no object")
        status = Status.UNKNOWN
    return Test(name=name or "", category=category, results=tuple(results), summary=status)


def _read_remarks(place: dict[str, Any], draft: Draft) -> Iterator[Result]:
    """Warnings of a whole test, as a result of the node."""
    problems = tuple(_read_problems(place, draft))
    if problems:
        yield Result(status=Status.PASS, word="", entity=NODE, problems=problems)


def _read_result(row: dict[str, Any], draft: Draft) -> Iterator[Result]:
    word = row.get("status")
    status = read_status(word)
    problems = tuple(_read_problems(row, draft))
    if status is Status.UNKNOWN:
        draft.faults.append(f"a result has the status {shorten(str(word))!r}, which DCGM does not use")
    gpus, entity = _who(row, draft)
    for gpu in gpus:
        yield Result(status=status, word=str(word), gpu=gpu, entity=entity, problems=problems)


def _who(row: dict[str, Any], draft: Draft) -> tuple[list[int | None], str | None]:
    """The GPUs a result is about: one (3.x, 4.x), a list in one text (2.x), or none (the node, a CPU, a switch)."""
    if "entity_id" in row or "entity_group" in row or "entity_group_id" in row:
        number, group = read_int(row.get("entity_id")), row.get("entity_group")
        if number is None or number < 0 or not isinstance(group, str) or group not in GROUPS:
            draft.faults.append("a result names an entity that cannot be read")
            return [None], None
        return ([number], None) if group == "GPU" else ([None], f"{group}{number}")
    gpu_ids = row.get("gpu_id", row.get("gpu_ids"))
    if gpu_ids is None and "gpu_id" not in row and "gpu_ids" not in row:
        return [None], None
    numbers = [read_int(piece) for piece in (gpu_ids.split(",") if isinstance(gpu_ids, str) else [gpu_ids])]
    if not numbers or any(number is None or number < 0 for number in numbers):
        draft.faults.append(f"a result names the GPU {shorten(str(gpu_ids))!r}, which is no number")
        return [None], None
    return list(numbers), None


def _read_problems(row: dict[str, Any], draft: Draft) -> Iterator[Problem]:
    warnings = row.get("warnings", [])
    if isinstance(warnings, str):  # DCGM 2
        warnings = [{"warning": warnings}]
    if not isinstance(warnings, list):
        draft.faults.append("the warnings of a result are no list")
        return
    for warning in warnings:
        if isinstance(warning, dict):
            text = warning.get("warning", warning.get("warnings"))  # DCGM 3 spells it both ways
            severity, error_id = read_int(warning.get("error_severity")), read_int(warning.get("error_id"))
            yield Problem(text=str(text or ""), severity=severity, error_id=error_id)
        elif warning is not None:
            yield Problem(text=str(warning))


def _detected(run: dict[str, Any], draft: Draft) -> tuple[set[int], int | None]:
    """The numbers of the GPUs, where the JSON lists them, and how many there are."""
    if "entity_groups" in run:
        ids: set[int] = set()
        listed = False
        for group in _list(run, "entity_groups", draft):
            if group.get("entity_group") != "GPU":
                continue
            listed = True
            for entity in _list(group, "entities", draft):
                number = read_int(entity.get("entity_id"))
                if number is None or number < 0 or number in ids:
                    draft.faults.append("the list of GPUs holds a number that cannot be read or comes twice")
                else:
                    ids.add(number)
        return ids, len(ids) if listed else None
    devices, serials = run.get("GPU Device IDs"), run.get("GPU Device Serials")
    count = len(devices) if isinstance(devices, list) else None
    numbers = {read_int(key) for key in serials} if isinstance(serials, dict) else set()
    ids = {number for number in numbers if number is not None}
    return (ids if count is not None and len(ids) == count else set()), count


def _list(mapping: dict[str, Any], key: str, draft: Draft) -> list[dict[str, Any]]:
    """The objects under a key; whatever is there that is none of that is a fault."""
    items = mapping.get(key)
    if not isinstance(items, list):
        draft.faults.append(f"`{key}` is missing or no list")
        return []
    good = [item for item in items if isinstance(item, dict)]
    if len(good) < len(items) or not items:
        draft.faults.append(f"`{key}` is empty or holds something that is no object")
    return good


def _word(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
