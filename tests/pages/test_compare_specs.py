"""Differences of specs: what the walk that skips equal parts finds is what taking every spec apart finds."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trainmaster.pages.compare import ABSENT, find_differences

leaves = st.one_of(st.none(), st.integers(0, 2), st.sampled_from(["a", "b"]), st.lists(st.integers(0, 1), max_size=2))
parts = st.recursive(leaves, lambda below: st.dictionaries(st.sampled_from("xyz"), below, max_size=3), max_leaves=12)
specs = st.dictionaries(st.sampled_from(["name", "train", "env"]), parts, max_size=3)


def take_apart(part: Any, path: str = "") -> dict[str, str]:
    """Each stated field with its value as text."""
    fields: dict[str, str] = {}
    for name, value in part.items():
        here = f"{path}.{name}" if path else name
        if isinstance(value, dict):
            fields |= take_apart(value, here)
        elif value is not None and value != []:
            fields[here] = value if isinstance(value, str) else str(value)
    return fields


@given(st.lists(specs, min_size=1, max_size=5))
def test_every_difference_and_no_other(listed: list[dict[str, Any]]) -> None:
    named = {f"job-{number}": spec for number, spec in enumerate(listed)}
    apart = {job: take_apart(spec) for job, spec in named.items()}
    stated = {field for fields in apart.values() for field in fields}
    expected = {}
    for field in stated:
        texts = {job: fields.get(field, ABSENT) for job, fields in apart.items()}
        if len(set(texts.values())) > 1:
            expected[field] = texts
    differences, same = find_differences(named)
    found = {part.field: {job: value for value, jobs in part.values for job in jobs} for part in differences}
    assert found == expected and same == len(stated) - len(expected)
