"""Options of the FSDP sample are refused with our name for them, and docs/reference/fsdp-options.md has each."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmaster.core.config.train import TrainConfig
from trainmaster.core.errors import SpecError
from trainmaster.core.schema import build, to_plain

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "fsdp-options.md"


def test_every_sample_option_is_refused_with_our_name() -> None:
    with pytest.raises(SpecError) as told:
        build(TrainConfig, dict.fromkeys(TrainConfig.OTHER_NAMES, 1))
    found = {fault.path: fault.message for fault in told.value.faults}
    assert found == {name: f"unknown field; here it is `{ours}`" for name, ours in TrainConfig.OTHER_NAMES.items()}


@pytest.mark.parametrize(("theirs", "ours"), TrainConfig.OTHER_NAMES.items())
def test_our_name_is_a_field_and_stands_in_the_page(theirs: str, ours: str) -> None:
    path = ours.partition(":")[0]
    place = to_plain(build(TrainConfig, {}))
    for part in path.split("."):
        assert part == "preset" or part in place, path
        place = place.get(part)
    rows = PAGE.read_text().splitlines()
    (row,) = [line for line in rows if f"`{theirs}`" in line.removeprefix("|").partition("|")[0]]
    assert path.rpartition(".")[2] in row
