"""UUIDs: only the canonical form is one."""

from __future__ import annotations

import uuid

import pytest

from trainmaster.core.ids import is_uuid

ONE = "0f8fad5b-d9cb-469f-a165-70867728950e"


def test_what_the_standard_library_makes_is_one() -> None:
    assert is_uuid(str(uuid.uuid4()))


@pytest.mark.parametrize(
    "change", [str.upper, lambda text: text + "\n", lambda text: text[1:], lambda text: f"{{{text}}}"]
)
def test_another_form_is_none(change: object) -> None:
    text = "0f8fad5b-d9cb-469f-a165-70867728950e"
    assert is_uuid(text) and callable(change) and not is_uuid(change(text))
