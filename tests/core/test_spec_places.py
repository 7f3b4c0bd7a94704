"""Every field of the spec that may name something has a class: where it is opened, and with whose rights."""

from __future__ import annotations

from trainmaster.core.config.spec_places import BOUNDS, PLACES, Place, is_naming
from trainmaster.core.schema import describe
from trainmaster.core.spec import JobSpec


def test_every_field_of_text_has_one_and_no_other() -> None:
    fields = [row.path for row in describe(JobSpec) if is_naming(row.type)]
    assert sorted(PLACES) == sorted(fields), (
        "class a new field in core/config/spec_places.py, then run tools/write_spec_doc.py"
    )
    assert {field for field, place in PLACES.items() if place in (Place.SERVER, Place.UPLOADED)} == set(BOUNDS)
